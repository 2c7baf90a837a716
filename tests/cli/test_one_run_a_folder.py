"""Two runs in one folder: one writes, the other says who does.

A frozen one that wakes up leaves the folder alone.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from fl_lightning.errors import UserError
from fl_lightning.storage import lock
from tests.helpers.commands import typed
from tests.helpers.zygote import Cli, Process

SLOW = """
import time, torch
from fl_lightning.models import ImageClassifier
class Slow(ImageClassifier):
    def training_step(self, batch, i):
        time.sleep(0.002)
        return super().training_step(batch, i)
"""
FIT = typed("fit -c base -c trainer/cpu -c method/scaffold", "--trainer.enable_progress_bar false")
RUN = (*FIT, *typed("--model.participation 2 --model.engine sequential --trainer.logger false"))
X = ("--trainer.default_root_dir", "x", "--ckpt_path", "last")


def started(cli: Cli, rounds: int) -> Process:
    (cli.folder / "slow.py").write_text(SLOW)
    return cli.start(*RUN, *X, "--trainer.max_epochs", rounds, "--model.learner", "slow.Slow")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def rounds(folder: Path) -> list[str]:
    return [line.split(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()[1:]]


def frozen(process: Process) -> None:
    process.kill(signal.SIGSTOP)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.005)


def test_two_started_at_once_leave_one_run(cli: Cli) -> None:
    first, second = started(cli, 3), started(cli, 3)
    results = {process: process.wait() for process in (first, second)}
    winner, loser = sorted(results, key=lambda process: results[process].returncode)
    assert [results[winner].returncode, results[loser].returncode] == [0, 2], results[loser].stderr
    said = results[loser].stderr.strip().splitlines()[-1]
    assert f"process {winner.pid} on {socket.gethostname()} (since 20" in said and "x: " in said
    assert rounds(cli.folder / "x") == ["0", "1", "2"]
    again = cli(*RUN, *X, "--trainer.max_epochs", 4, "--model.learner", "slow.Slow")
    assert again.returncode == 0 and rounds(cli.folder / "x") == ["0", "1", "2", "3"], again.stderr


def test_who_has_just_locked_a_folder_is_named_once_it_has_written_who_it_is(
    tmp_path: Path,
) -> None:
    fcntl = pytest.importorskip("fcntl")
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        about = '{"pid": 12, "host": "elsewhere", "since": "today"}'
        writing = threading.Timer(0.3, lambda: print(about, file=file, flush=True))
        writing.start()
        with pytest.raises(UserError, match=r"process 12 on elsewhere \(since today\)"):
            lock.hold(tmp_path)
        writing.join()


def test_a_killed_run_leaves_no_lock_and_a_stopped_one_keeps_it(cli: Cli) -> None:
    folder = cli.folder / "x"
    process = started(cli, 1000)
    process.wait_for(folder / "checkpoints" / "last.ckpt")
    frozen(process)
    before = snapshot(folder)
    result = started(cli, 2).wait()
    assert result.returncode == 2 and f"kill -CONT {process.pid}" in result.stderr
    assert snapshot(folder) == before
    process.kill(signal.SIGKILL)
    process.wait()
    done = len(rounds(folder))
    result = started(cli, done + 2).wait()
    assert result.returncode == 0, result.stderr
    assert rounds(folder) == [str(t) for t in range(done + 2)]


def test_a_frozen_run_that_wakes_up_after_another_took_over_writes_nothing(cli: Cli) -> None:
    """As on a file system without locks: the second run could not see the first one's."""
    folder = cli.folder / "x"
    process = started(cli, 1000)
    process.wait_for(folder / "checkpoints" / "last.ckpt")
    frozen(process)
    (folder / ".lock").unlink()
    result = started(cli, len(rounds(folder)) + 3).wait()
    assert result.returncode == 0, result.stderr
    before = snapshot(folder)
    process.kill(signal.SIGCONT)
    woken = process.wait()
    assert woken.returncode == 2 and "has continued this run in the meantime" in woken.stderr
    assert snapshot(folder) == before


def test_a_removed_lock_is_made_again_by_who_had_it(cli: Cli) -> None:
    folder = cli.folder / "x"
    process = started(cli, 1000)
    process.wait_for(folder / "checkpoints" / "last.ckpt")
    (folder / ".lock").unlink()
    process.wait_for(folder / ".lock")
    assert str(process.pid) in started(cli, 1000).wait().stderr
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait().returncode == 143
