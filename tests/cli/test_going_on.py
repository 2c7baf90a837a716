"""A run is gone on with, or left as it was: no completed round is lost, no advice leads nowhere."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.zygote import Cli, Zygote

FIT = (
    "fit",
    "-c",
    "base",
    "-c",
    "trainer/cpu",
    "--trainer.enable_progress_bar",
    "false",
    "--model.participation",
    1,
)
X = ("--trainer.default_root_dir", "x")


@pytest.fixture(scope="module")
def finished(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runner = Cli(zygote, tmp_path_factory.mktemp("finished"), tmp_path_factory.mktemp("files"))
    result = runner(*FIT, *X, "--trainer.max_epochs", 2)
    assert result.returncode == 0, result.stderr
    return runner.folder / "x"


@pytest.fixture
def run(cli: Cli, finished: Path) -> Path:
    """A run of two rounds in ``x``, the second its best."""
    shutil.copytree(finished, cli.folder / "x")
    last, best = (cli.folder / "x/checkpoints" / name for name in ("last.ckpt", "best.ckpt"))
    assert torch.load(last, weights_only=True)["callbacks"]["RunCheckpoint"]["best_round"] == 1
    best.unlink()
    os.link(last, best)  # as the run itself left them
    return cli.folder / "x"


def rounds(run: Path) -> list[str]:
    with open(run / "metrics.csv") as file:
        return [row["round"] for row in csv.DictReader(file)]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_without_last_the_advised_checkpoint_goes_on(cli: Cli, run: Path, damage: str) -> None:
    last = run / "checkpoints" / "last.ckpt"
    shutil.copy(last, run / "checkpoints" / "kept.ckpt")
    (run / "checkpoints" / "best.ckpt").unlink()
    whole = last.read_bytes()
    last.unlink()
    if damage == "cut short":
        last.write_bytes(whole[:3000])
    before = snapshot(run)
    result = cli("fit", "x", "--trainer.max_epochs", 3)
    assert result.returncode == 2 and "last.ckpt" in result.stderr
    assert snapshot(run) == before
    advice = "--ckpt_path x/checkpoints/kept.ckpt"
    assert advice in result.stderr
    result = cli("fit", "x", "--trainer.max_epochs", 3, *advice.split())
    assert result.returncode == 0, result.stderr
    assert rounds(run) == ["0", "1", "2"]


def test_a_failing_resume_leaves_the_config(cli: Cli, run: Path) -> None:
    config, metrics = (run / "config.yaml").read_text(), (run / "metrics.csv").read_text()
    (run / "metrics.csv").write_text("garbage\n1,2,3\n")
    result = cli("fit", "x", "--trainer.max_epochs", 3)
    assert result.returncode == 2 and "metrics.csv" in result.stderr
    (run / "metrics.csv").write_text(metrics)
    other = ("--model.server_optimizer", "Adam", "--model.server_optimizer.lr", "0.1")
    assert cli("fit", "x", "--trainer.max_epochs", 3, *other).returncode == 2
    assert (run / "config.yaml").read_text() == config
    assert cli("fit", "x", "--trainer.max_epochs", 3).returncode == 0
    assert "max_epochs: 3" in (run / "config.yaml").read_text(), (
        "a resume that worked writes its config"
    )
    assert sorted(os.listdir(run / "checkpoints")) == ["best.ckpt", "last.ckpt"]


def test_what_stopped_in_round_0_can_be_tried_again(cli: Cli) -> None:
    result = cli(*FIT, *X, "--trainer.max_epochs", 2, "--monitor", "val/accc")
    assert result.returncode == 2 and "'val/acc'" in result.stderr
    result = cli(*FIT, *X, "--trainer.max_epochs", 2)
    assert result.returncode == 0, result.stderr
    assert rounds(cli.folder / "x") == ["0", "1"]


def test_a_run_without_checkpoints_is_not_overwritten(cli: Cli) -> None:
    off = ("--trainer.enable_checkpointing", "false")
    assert cli(*FIT, *X, *off, "--trainer.max_epochs", 2).returncode == 0
    before = snapshot(cli.folder)
    for argv in ((*FIT, *X), ("fit", "x")):
        result = cli(*argv)
        assert result.returncode == 2 and "another folder" in result.stderr
    assert snapshot(cli.folder) == before


@pytest.mark.parametrize("more", [(), ("--trainer.max_epochs", 1), ("--trainer.max_epochs", 0)])
def test_a_finished_run_says_that_nothing_is_left(
    cli: Cli, run: Path, more: tuple[object, ...]
) -> None:
    before = snapshot(run)
    result = cli("fit", "x", *more)
    assert result.returncode == 0, result.stderr
    told = "2 rounds are done already; --trainer.max_epochs above 2 goes on"
    assert told in result.stdout
    # And what it has reached, as its closing table did.
    assert re.search(r"^accuracy: last 0\.\d+", result.stdout, re.MULTILINE)
    assert snapshot(run) == before


@pytest.mark.parametrize("status", ["running", "failed"])
def test_killed_after_its_last_round_is_done(cli: Cli, run: Path, status: str) -> None:
    record = json.loads((run / "run.json").read_text())
    # As a kill just before the end leaves it; a sweep then writes "failed".
    (run / "run.json").write_text(json.dumps(record | {"status": status, "ended": None}))
    result = cli("fit", "x")
    assert result.returncode == 0 and "recorded as done now" in result.stdout
    now = json.loads((run / "run.json").read_text())
    assert now.pop("ended") and now == {key: record[key] for key in now}
    assert set(now) == set(record) - {"ended"}


@pytest.mark.parametrize(
    "there",
    [
        {"status": "failed"},  # by an error, which has a time
        {"status": "running", "ended": None, "rounds": 3},  # killed before its last round
        {"status": "running", "ended": None, "rounds": -1},  # without end
    ],
)
def test_what_lacks_rounds_or_failed_is_not_called_done(
    cli: Cli, run: Path, there: dict[str, object]
) -> None:
    record = json.loads((run / "run.json").read_text()) | there
    (run / "run.json").write_text(json.dumps(record))
    assert cli("fit", "x", "--trainer.max_epochs", 2).returncode == 0
    assert json.loads((run / "run.json").read_text()) == record
