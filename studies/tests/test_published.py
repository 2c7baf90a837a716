"""Numbers that papers printed, beside a report's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fl_lightning.__main__ import main
from fl_lightning.lab.cli.compose import packaged
from fl_lightning.lab.report import report_tables
from fl_lightning.lab.report.cells import Table
from fl_lightning.lab.report.printed_results import tables
from fl_lightning.lab.report.runs import find
from fl_lightning.lab.report.summary import summarise
from tests.report.folders import make_arm, make_run, report

PUBLISHED = sorted((Path(__file__).parents[2] / "studies/published").glob("*.yaml"))
OPTIONS: list[str] = []
for _file in PUBLISHED:
    OPTIONS += ["--published", str(_file)]
LEVELS = {0: 0.70, 1: 0.72, 2: 0.69}
SEEDS = range(6)


def cells(table: Table, column: str) -> list[str]:
    """The texts of a column."""
    place = list(table.columns).index(column)
    return [row[place].text for row in table.rows]


def test_published_numbers_stand_beside_ours_with_what_differs(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "trainer": {"max_epochs": 150},
        "model": {
            "participation": 0.1,
            "local_epochs": 5.0,
            "learner": {
                "init_args": {
                    "network": {"class_path": "x.ResNet18GN"},
                    "lr": 0.1,
                    "weight_decay": 0.001,
                }
            },
        },
        "data": {
            "class_path": "fl_lightning.datamodules.CIFAR10",
            "init_args": {
                "num_clients": 100,
                "batch_size": 50,
                "partition": {
                    "class_path": "x.Dirichlet",
                    "init_args": {
                        "alpha": 0.1,
                        "replacement": True,
                        "samples_per_client": None,
                        "prior": "uniform",
                    },
                },
            },
        },
    }
    for arm in ("fedinit-0", "fedinit-0.1"):
        for run in make_arm(tmp_path / "s", arm, LEVELS):
            (run / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "s/sweep.yaml").write_text(
        "configs: [base, experiment/fedinit/table3-cifar10-small]\n"
    )
    report(tmp_path / "out", tmp_path / "s", *OPTIONS)
    text = (tmp_path / "out/report.md").read_text()
    assert "| fedinit-0.1 | 75.95 | 70.33 ± 1.53 | max_epochs 150 (500) |" in text
    packaged_one = packaged()["experiment/fedinit/table3-fashionmnist-dir0.1-100-small"].read_text(
        "utf-8"
    )
    # known by its text
    (tmp_path / "s/sweep.yaml").write_text(f"{packaged_one}\n# over it: trainer.max_epochs=3\n")
    report(tmp_path / "out", tmp_path / "s", *OPTIONS)
    assert (
        "| fedinit-0.1 | 75.95 | 70.33 ± 1.53 | max_epochs 150 (500) |"
        in (tmp_path / "out/report.md").read_text()
    )
    (tmp_path / "s/sweep.yaml").write_text("configs: [base]\n")
    report(tmp_path / "out", tmp_path / "s", *OPTIONS)
    assert "75.95" not in (tmp_path / "out/report.md").read_text()


def test_a_smaller_network_and_fewer_samples_are_told() -> None:
    """A twin may have the paper's class of network, and its data, in another size."""
    table = next(table for table in tables(PUBLISHED) if "Table 2, CIFAR10" in table.source)
    sizes = {"depth": 8, "width": 16}
    network = {"class_path": "fl_lightning.models.ResNet20", "init_args": sizes}
    config = {
        "model": {"learner": {"init_args": {"network": network}}},
        "data": {"init_args": {"samples": 10_000}},
    }
    told = table.differences("fedals-1", config)
    assert "depth 8 (20)" in told and "samples 10000 (all)" in told
    assert not [text for text in told if text.startswith(("width", "network"))]


def test_every_published_column_reads() -> None:
    for table in tables(PUBLISHED):
        assert table.arms and table.setting and table.source and table.configs
        most = 1 if table.metric.endswith("acc") else 10  # a loss
        assert all(0 < value < most for value, _ in table.arms.values())


def test_a_claims_difference_stands_beside_the_one_that_the_paper_printed(tmp_path: Path) -> None:
    """FedInit's Table 3: 75.95 at β = 0.1, 72.53 at 0, whose Δ is 0.760 and 0.855."""
    name = "experiment/fedinit/table3-fashionmnist-dir0.1-100-small"
    for folder, text in (("s", packaged()[name].read_text("utf-8")), ("t", "configs: [base]\n")):
        for arm, level in (("fedinit-0.0", 0.7), ("fedinit-0.1", 0.74)):
            for seed in SEEDS:
                columns = {"val/acc": [level + seed / 100] * 9, "divergence/all": [level] * 9}
                make_run(tmp_path / folder / arm / f"seed-{seed}", arm, seed, columns)
        (tmp_path / folder / "sweep.yaml").write_text(text)
        sides = {"a": "fedinit-0.1", "b": "fedinit-0.0", "direction": "greater", "margin": 0}
        claims: list[dict[str, Any]] = [
            {"id": f"{folder}-acc", "metric": "val/acc", **sides},
            {"id": f"{folder}-all", "metric": "divergence/all", "scale": "log_ratio", **sides},
        ]
        (tmp_path / folder / "claims.yaml").write_text(yaml.safe_dump(claims))
    summary = summarise(find([tmp_path / "s", tmp_path / "t"]), printed=PUBLISHED)
    # The second sweep has arms of the same names, and is of no published experiment.
    assert [claim.get("published") is None for claim in summary.to_json()["claims"]] == [
        False,
        False,
        True,
        True,
    ]
    theirs = [claim["published"][0]["mean"] for claim in summary.to_json()["claims"][:2]]
    assert theirs == pytest.approx([0.7595 - 0.7253, np.log(0.76 / 0.855)])
    table = report_tables.gains(summary)
    assert cells(table, "published, a − b") == ["+3.42", "−0.118"]
    assert cells(table, "ours, a − b") == ["+4.00", "+0.0556"]
    assert cells(table, "printed") == ["75.95 − 72.53", "0.76 / 0.855"]
    (beside,) = [table for table in report_tables.beside_published(summary) if table.rows]
    assert cells(beside, "arm") == ["s/fedinit-0.0", "s/fedinit-0.1"]


@pytest.mark.parametrize(
    ("text", "words"), [(None, "FileNotFoundError"), ("- source: x\n", "KeyError: 'arms'")]
)
def test_a_file_that_holds_no_columns_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    make_arm(tmp_path / "s", "a", {0: 0.5})
    if text is not None:
        (tmp_path / "p.yaml").write_text(text)
    options = [str(tmp_path / "s"), "--published", str(tmp_path / "p.yaml")]
    assert main(["report", *options]) == 2
    assert words in capsys.readouterr().err
