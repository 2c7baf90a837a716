"""One report over several sweeps: each arm's costs stand beside those of its own sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_lightning.lab.report import report_tables
from fl_lightning.lab.report.cells import Table
from fl_lightning.lab.report.runs import find
from fl_lightning.lab.report.summary import Summary, summarise
from tests.report.folders import make_run

BYTES = {"small": {"fedavg": 10, "topk": 5}, "large": {"fedavg": 1000, "topk": 100}}


@pytest.fixture()
def joint(tmp_path: Path) -> Summary:
    """Two sweeps whose rounds send very different numbers of bytes."""
    for sweep, arms in BYTES.items():
        for arm, sent in arms.items():
            for seed in range(2):
                columns = {
                    "val/acc": [0.5, 0.6, 0.7],
                    "communication/total_bytes": [sent * (t + 1) for t in range(3)],
                }
                folder = tmp_path / sweep / arm / f"seed-{seed}"
                make_run(folder, arm, seed, columns, partition=sweep, axes={"method": arm})
        (tmp_path / sweep / "sweep.yaml").write_text(f"# {sweep}\n")
    return summarise(find([tmp_path / sweep for sweep in BYTES]), "val/acc", ["0.6"])


def column(table: Table, title: str) -> dict[str, str]:
    place = list(table.columns).index(title)
    return {row[0].text: row[place].text for row in table.rows}


def test_an_arm_s_bytes_are_compared_with_the_first_arm_of_its_own_sweep(joint: Summary) -> None:
    expected = {
        "small/fedavg": "1.00 ×",
        "small/topk": "0.50 ×",
        "large/fedavg": "1.00 ×",
        "large/topk": "0.10 ×",
    }
    assert column(report_tables.communication(joint), "× first arm") == expected
    until = column(report_tables.targets(joint)[0], "sent, × first arm")
    assert until == expected


def test_equal_cost_is_within_a_sweep_and_leaves_out_what_all_spent_alike(joint: Summary) -> None:
    small, large = report_tables.budgets(joint)
    assert list(small.columns) == ["arm", "15 B sent"], "all have three rounds"
    assert list(large.columns) == ["arm", "300 B sent"]
    # In large, 300 bytes are what top-k spends in all, and no whole round of FedAvg.
    assert column(large, "300 B sent") == {"large/fedavg": "–", "large/topk": "70.00 ± 0.00"}
    assert column(small, "15 B sent")["small/fedavg"] == "50.00 ± 0.00"
