"""The closing table of a sweep: which metrics it shows, and of which files."""

from __future__ import annotations

import json
from pathlib import Path

from fl_lightning.lab.sweep.grid import PlannedRun
from fl_lightning.lab.sweep.progress_table import ProgressTable
from fl_lightning.lab.sweep.sweep_folder import DONE, WAITING


def ended(folder: Path, arm: str, shown: list[str]) -> PlannedRun:
    place = f"{arm}/seed-0"
    (folder / place).mkdir(parents=True)
    (folder / place / "run.json").write_text(json.dumps({"status": DONE, "shown": shown}))
    (folder / place / "metrics.csv").write_text("round,val/acc,clients/acc\n0,0.5,0.75\n")
    return PlannedRun(folder, place, arm, 0, ())


def test_each_number_is_named_where_arms_are_shown_by_different_metrics(tmp_path: Path) -> None:
    one = ended(tmp_path, "fedavg", ["val/acc"])
    own = ended(tmp_path, "ifca", ["clients/acc"])
    lines = ProgressTable("s", None, {}).lines({one: DONE, own: DONE})
    assert [line.split() for line in lines[2:5]] == [
        ["seed", "0"],
        ["fedavg", "val/acc", "0.5000"],
        ["ifca", "clients/acc", "0.7500"],
    ]
    lines = ProgressTable("s", None, {}).lines({one: DONE, own: WAITING})
    assert [line.split() for line in lines[2:5]] == [
        ["val/acc", "seed", "0"],
        ["fedavg", "0.5000"],
        ["ifca", "·"],
    ]


def test_a_damaged_table_of_a_run_shows_no_value(tmp_path: Path) -> None:
    run = ended(tmp_path, "fedavg", ["val/acc"])
    (run.folder / "metrics.csv").write_text("round,val/acc\n0,\x1e.5\n")
    lines = ProgressTable("s", None, {}).lines({run: DONE})
    assert lines[3].split() == ["fedavg", "done"]
