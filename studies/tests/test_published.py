"""Numbers that papers printed, beside a report's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fl_lightning.lab.cli.compose import packaged
from fl_lightning.lab.report.cells import Table
from fl_lightning.lab.report.runs import find
from fl_lightning.lab.report.summary import summarise
from studies import chosen
from studies.papers import PUBLISHED as FOLDER
from studies.papers import report
from studies.printed import Printed, columns
from tests.report.folders import make_arm, make_run

PUBLISHED = sorted(FOLDER.glob("*.yaml"))
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
    report([tmp_path / "s"], tmp_path / "out", None, "--figures", "none")
    text = (tmp_path / "out/report.md").read_text()
    assert "| fedinit-0.1 | 75.95 | 70.33 ± 1.53 | max_epochs 150 (500) |" in text
    packaged_one = packaged()["experiment/fedinit/table3-fashionmnist-dir0.1-100-small"].read_text(
        "utf-8"
    )
    # known by its text
    (tmp_path / "s/sweep.yaml").write_text(f"{packaged_one}\n# over it: trainer.max_epochs=3\n")
    report([tmp_path / "s"], tmp_path / "out", None, "--figures", "none")
    assert (
        "| fedinit-0.1 | 75.95 | 70.33 ± 1.53 | max_epochs 150 (500) |"
        in (tmp_path / "out/report.md").read_text()
    )
    (tmp_path / "s/sweep.yaml").write_text("configs: [base]\n")
    report([tmp_path / "s"], tmp_path / "out", None, "--figures", "none")
    assert "75.95" not in (tmp_path / "out/report.md").read_text()


def test_a_smaller_network_and_fewer_samples_are_told() -> None:
    """A twin may have the paper's class of network, and its data, in another size."""
    table = next(table for table in columns(PUBLISHED) if "Table 2, CIFAR10" in table.source)
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
    for table in columns(PUBLISHED):
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
        stated: list[dict[str, Any]] = [
            {"id": f"{folder}-acc", "metric": "val/acc", **sides},
            {"id": f"{folder}-all", "metric": "divergence/all", "scale": "log_ratio", **sides},
        ]
        (tmp_path / folder / "claims.yaml").write_text(yaml.safe_dump(stated))
    folders = [tmp_path / "s", tmp_path / "t"]
    report(folders, tmp_path / "out", None, "--figures", "none")
    claims = json.loads((tmp_path / "out/report.json").read_text("utf-8"))["claims"]
    # The second sweep has arms of the same names, and is of no published experiment.
    assert ["published" in claim for claim in claims] == [True, True, False, False]
    theirs = [claim["published"][0]["mean"] for claim in claims[:2]]
    assert theirs == pytest.approx([0.7595 - 0.7253, np.log(0.76 / 0.855)])
    gains, beside = Printed(PUBLISHED).tables(summarise(find(folders)))
    assert cells(gains, "published, a − b") == ["+3.42", "−0.118"]
    assert cells(gains, "ours, a − b") == ["+4.00", "+0.0556"]
    assert cells(gains, "printed") == ["75.95 − 72.53", "0.76 / 0.855"]
    assert cells(beside, "arm") == ["s/fedinit-0.0", "s/fedinit-0.1"]


@pytest.mark.parametrize(
    ("metric", "seen"), [("clients/acc", True), ("domains/acc_mean", True), ("val/acc", False)]
)
def test_choices_are_shown_with_what_was_tried(tmp_path: Path, metric: str, seen: bool) -> None:
    make_arm(tmp_path / "s", "tuned", {0: 0.5})
    (tmp_path / "s/sweep.yaml").write_text("configs: [base]\n")
    head = f"arm,model.learner.init_args.lr,method.beta,model.clip_norm,{metric} (tail),runs,chosen"
    rows = ["tuned,0.05,0.1,null,0.6,2,", "tuned,0.1,0.1,10.0,0.7,2,", "tuned,1.0,0.1,5.0,0.5,2,"]
    for best, at_end in ((1, "no"), (2, "learner lr")):
        marked = [row + "yes" * (place == best) for place, row in enumerate(rows)]
        (tmp_path / "s/select.csv").write_text("\n".join([head, *marked]) + "\n")
        table = chosen.table(summarise(find([tmp_path / "s"])))
        assert cells(table, "at an end") == [at_end] and cells(table, "candidates") == ["3"]
    assert cells(table, "chosen") == ["learner lr 1.0; method beta 0.1; model clip_norm 5.0"]
    assert "model clip_norm 5.0, 10.0, null" in cells(table, "tried")[0]
    assert ("held-out" not in table.title) == ("clients' test samples" in table.note) == seen
