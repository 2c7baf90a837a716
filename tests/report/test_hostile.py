"""A run.json or metrics.csv that nobody should write: one paragraph, and no report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.errors import UserError
from fl_lightning.report.runs import find


def run(folder: Path, **record: Any) -> Path:
    told = {"status": "done", "seed": 0, "arm": "a", "rounds": 1, **record}
    (folder / "run.json").write_text(json.dumps(told))
    (folder / "metrics.csv").write_text("round,val/acc\n0,0.1\n")
    return folder


@pytest.mark.parametrize(
    "record",
    [{"claims_hash": [1]}, {"config_hash": {}}, {"arm": "x" * 9999}, {"arm": "\ud800"}, {"command": 3}, {"arm": [1]}],
    ids=str,
)
def test_what_no_run_writes_into_run_json(tmp_path: Path, record: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(record))):
        find([run(tmp_path, **record)])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (run(tmp_path) / "run.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="cannot read"):
        find([tmp_path])
    (run(tmp_path) / "metrics.csv").write_text("round,val/acc\n0," + "1" * 200_000 + "\n")
    with pytest.raises(UserError, match="field larger"):
        find([tmp_path])
    (tmp_path / "metrics.csv").unlink()
    os.mkfifo(tmp_path / "metrics.csv")
    with pytest.raises(UserError, match=r"metrics\.csv"):
        find([tmp_path])
