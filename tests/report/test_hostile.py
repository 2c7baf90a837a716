"""A run.json or metrics.csv that nobody should write: one paragraph, and no report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from folders import make_arm, report

from fl_lightning.errors import UserError
from fl_lightning.lab.report.runs import find


def run(folder: Path, **record: Any) -> Path:
    told = {"status": "done", "seed": 0, "arm": "a", "rounds": 1, **record}
    (folder / "run.json").write_text(json.dumps(told))
    (folder / "metrics.csv").write_text("round,val/acc\n0,0.1\n")
    return folder


@pytest.mark.parametrize(
    "record",
    [
        {"claims_hash": [1]},
        {"config_hash": {}},
        {"arm": "x" * 9999},
        {"arm": "\ud800"},
        {"command": 3},
        {"arm": [1]},
    ],
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


@pytest.mark.parametrize(
    "record", [{"commit": "\ud800"}, {"axes": {"x": "\ud800"}}, {"rounds": "\ud800"}], ids=ascii
)
def test_text_that_no_file_can_hold(tmp_path: Path, record: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="surrogate"):
        find([run(tmp_path, **record)])


def test_what_lies_beside_the_runs_is_read_with_care(tmp_path: Path) -> None:
    times = (
        {"started": "2026-01-01T00:00:00", "ended": "2026-01-01T00:01:00"},
        {"started": "2026-01-01T00:02:00+00:00", "ended": "2026-01-01T00:03:00+00:00"},
    )
    for arm, when in zip("ab", times, strict=True):
        make_arm(tmp_path / "s", arm, {0: 0.5}, **when)  # the first without a zone
    (tmp_path / "s/runs.csv").write_text("arm,seed\n" + "a" * 200_000 + ",0\n")
    (tmp_path / "s/sweep.yaml").write_bytes(b"\xff\xfe")
    assert set(report(tmp_path / "out", tmp_path / "s")["arms"]) == {"a", "b"}


def test_numbers_without_a_sum_and_rounds_without_end(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "a", {0: 0.5})
    path = tmp_path / "s/a/seed-0/metrics.csv"
    path.write_text("round,val/acc\n0,1e308\n1,1e308\n2,0.5\n")
    scores = report(tmp_path / "out", tmp_path / "s")["arms"]["a"]["scores"]
    # as if the others were infinite, which a longer number is read as
    assert (scores["last10"]["mean"], scores["last"]["mean"]) == (0.0, 0.5)
    path.write_text(f"round,val/acc\n{'9' * 400},0.5\n")
    with pytest.raises(UserError, match="rounds in"):
        find([tmp_path / "s"])


@pytest.mark.parametrize(
    "config",
    ["method: 3", "method: {a: 1}", "data: {class_path: A, init_args: [1]}", "data: 3\nmodel: []"],
)
def test_a_config_that_no_run_writes(tmp_path: Path, config: str) -> None:
    make_arm(tmp_path / "s", "a", {0: 0.5, 1: 0.6})
    for folder in (tmp_path / "s/a").iterdir():
        (folder / "config.yaml").write_text(config)
    assert set(report(tmp_path / "out", tmp_path / "s")["arms"]) == {"a"}
