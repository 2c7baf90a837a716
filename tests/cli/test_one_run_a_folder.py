"""Two runs in one folder: one writes, the other says who does. And where a command writes."""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
from pathlib import Path

import pytest

from tests.helpers.commands import QUIET_FIT, done, rounds, snapshot, typed
from tests.helpers.zygote import Cli, Process

SLOW = """
import time, torch
from fl_lightning.models import Classifier
class Slow(Classifier):
    def training_step(self, batch, i):
        time.sleep(0.002)
        return super().training_step(batch, i)
"""
RUN = (
    *QUIET_FIT,
    *typed("-c method/scaffold --model.participation 2 --model.engine sequential"),
    *typed("--trainer.logger false --model.learner slow.Slow"),
    *typed("--trainer.default_root_dir x --ckpt_path last --trainer.max_epochs"),
)


def started(cli: Cli, number: int) -> Process:
    (cli.folder / "slow.py").write_text(SLOW)
    return cli.start(*RUN, number)


def running(cli: Cli) -> Process:
    process = started(cli, 1000)
    process.wait_for(cli.folder / "x/checkpoints/last.ckpt")
    return process


def frozen(process: Process) -> None:
    process.kill(signal.SIGSTOP)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.005)


def test_two_started_at_once_leave_one_run(cli: Cli) -> None:
    first, second = started(cli, 3), started(cli, 3)
    results = {process: process.wait() for process in (first, second)}
    winner, loser = sorted(results, key=lambda process: results[process].returncode)
    assert [results[winner].returncode, results[loser].returncode] == [0, 2], results[loser].stderr
    told = results[loser].stderr.strip().splitlines()[-1]
    assert f"process {winner.pid} on {socket.gethostname()} (since 20" in told and "x: " in told
    assert rounds(cli.folder / "x") == ["0", "1", "2"]
    done(started(cli, 4).wait())
    assert rounds(cli.folder / "x") == ["0", "1", "2", "3"]


def test_a_killed_run_leaves_no_lock_and_a_stopped_one_keeps_it(cli: Cli) -> None:
    folder = cli.folder / "x"
    process = running(cli)
    frozen(process)
    before = snapshot(folder)
    result = started(cli, 2).wait()
    assert result.returncode == 2 and f"process {process.pid} " in result.stderr
    assert snapshot(folder) == before
    process.kill(signal.SIGKILL)
    process.wait()
    many = len(rounds(folder))
    done(started(cli, many + 2).wait())
    assert rounds(folder) == [str(t) for t in range(many + 2)]


TINY = (*QUIET_FIT, *typed("-c debug/tiny --trainer.max_epochs 1 --trainer.default_root_dir"))


@pytest.mark.slow
@pytest.mark.parametrize("given", ["~/run", "${PLACE}/run"])
def test_the_folder_is_expanded_once_for_all(cli: Cli, given: str) -> None:
    environment = {"HOME": str(cli.folder / "home"), "PLACE": str(cli.folder / "home")}
    (cli.folder / "home").mkdir()
    done(cli(*TINY, given, env=environment))
    run = cli.folder / "home" / "run"
    assert os.listdir(cli.folder) == ["home"] and os.listdir(cli.folder / "home") == ["run"]
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert {"config", "metrics", "run", "checkpoints", "events"} <= names
    assert f"default_root_dir: {run}" in (run / "config.yaml").read_text()


@pytest.mark.slow
def test_an_output_that_is_no_file_is_refused_and_stays(cli: Cli) -> None:
    done(cli(*TINY, "x"))
    os.mkfifo(cli.folder / "pipe")
    (cli.folder / "folder").mkdir()
    (cli.folder / "file").write_text("before")
    (cli.folder / "link").symlink_to("target.pt")
    (cli.folder / "s.yaml").write_text("configs: [base, debug/tiny]\ngrid: {seed_everything: [0]}")
    before = {path: stat.S_IFMT(path.lstat().st_mode) for path in cli.folder.iterdir()}
    refused = [
        *((command, "x", "-o", name) for command in ("export", "predict") for name in WRONG),
        ("partition", *QUIET_FIT[1:3], "-o", "file"),
        ("report", "x", "--out", "file"),
        ("analyse", "hessian", "x", "--out", "file"),
        ("sweep", "s.yaml", "--out", "file"),
        (*TINY, "file"),
    ]
    for argv in refused:
        ended = cli(*argv)
        assert ended.returncode == 2 and "Traceback" not in ended.stderr, (argv, ended.stderr)
        assert WRONG.get(argv[-1], "file") in ended.stderr
    done(cli("export", "x", "-o", "link"))
    assert (cli.folder / "target.pt").stat().st_size > 100
    (cli.folder / "target.pt").unlink()
    assert {path: stat.S_IFMT(path.lstat().st_mode) for path in cli.folder.iterdir()} == before
    assert (cli.folder / "file").read_text() == "before"


WRONG = {"pipe": "a pipe", "folder": "a folder", "file/below": "is not a folder"}
