"""SIGKILL of a sweep and of a run: nothing runs twice, nothing is lost, no worker stays behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import table
from tests.helpers.zygote import Cli, Process
from tests.sweep.conftest import alive, children, log_of, states

pytestmark = pytest.mark.slow

# of each run that is killed midway: enough for a look from outside, however busy the machine
ROUNDS = 8


def until(condition: Callable[[], Any], process: Process, seconds: float = 90) -> Any:
    """The first true answer, which has to come before the process ends."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline and not process.ended(), process.stdout + process.stderr
        time.sleep(0.01)
    return answer


def halted(process: Process) -> int | None:
    """A worker whose run has a checkpoint and rounds left, halted, so that it still has them when
    it is killed."""
    for pid in children(process.pid):
        with suppress(OSError):  # it ends as we look
            folder = log_of(pid).parent
            if (folder / "checkpoints/last.ckpt").exists() and rounds_done(folder) < ROUNDS - 1:
                os.kill(pid, signal.SIGSTOP)
                if alive(pid) and rounds_done(folder) < ROUNDS - 1:
                    return pid
                os.kill(pid, signal.SIGCONT)
    return None


def rounds_done(run: Path) -> int:
    return (run / "metrics.csv").read_text().count("\n") - 1


def starts(run: Path) -> int:
    return (run / "log.txt").read_text().count("→ ")


def rows(run: Path) -> list[dict[str, str]]:
    found = table(run / "metrics.csv")
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in found]


def test_killed_twice_and_the_report_is_the_same(cli: Cli, sweep_file: Path) -> None:
    claim = (
        "- {id: A1, a: scaffold, b: fedavg, metric: val/acc, direction: greater, margin: 0.005}\n"
    )
    (cli.folder / "claims.yaml").write_text(claim)
    text = sweep_file.read_text().replace("max_epochs: 3", f"max_epochs: {ROUNDS}")
    text = text.replace("[0, 1, 2, 3]", "[0, 1]")
    text = text.replace("{configs: [method/fedinit], method.beta: 0.1}, ", "")
    sweep_file.write_text(text + "claims: claims.yaml\n")
    folder = cli.folder / "runs/demo"
    first = cli.start("sweep", sweep_file, "--jobs", 2)
    until(lambda: (folder / "runs.csv").exists() and "done" in states(folder).values(), first)
    until(lambda: halted(first), first)
    workers = children(first.pid)
    first.kill(signal.SIGKILL)  # the halted worker dies with it, as the one that runs does
    assert first.wait().returncode == -signal.SIGKILL
    until_gone = time.monotonic() + 10
    while any(map(alive, workers)):
        assert time.monotonic() < until_gone
    done = {
        run.parent
        for run in folder.glob("*/seed-*/run.json")
        if json.loads(run.read_text())["status"] == "done"
    }
    assert 1 <= len(done) < 4
    before = {
        path: path.stat().st_mtime_ns for run in done for path in run.iterdir() if path.is_file()
    }

    second = cli.start("sweep", sweep_file, "--jobs", 2)
    victim = until(lambda: halted(second), second)
    killed = log_of(victim).parent
    os.kill(victim, signal.SIGKILL)
    result = second.wait()
    assert result.returncode == 1 and f"failed: {killed.relative_to(folder)}" in result.stdout
    assert sorted(states(folder).values()) == ["done"] * 3 + ["failed"]
    assert json.loads((killed / "run.json").read_text())["status"] == "failed"

    assert cli("sweep", sweep_file, "--jobs", 2).returncode == 0
    assert set(states(folder).values()) == {"done"} and len(states(folder)) == 4
    # what was done was not touched
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert "going on with round" in (killed / "log.txt").read_text()
    assert (
        sum(starts(run.parent) for run in folder.glob("*/seed-*/log.txt")) <= 4 + 2 + 1
    )  # two were at work, then one was killed

    assert cli("sweep", sweep_file, "--jobs", 2, "--out", "runs/whole").returncode == 0
    for run in folder.glob("*/seed-*"):
        assert rows(run) == rows(cli.folder / "runs/whole" / run.relative_to(folder)), run
    reports = []
    for name in ("demo", "whole"):
        asked = ("--targets", "0.3,0.8", "--figures", "none", "--out", name)
        assert cli("report", f"runs/{name}", *asked).returncode == 0
        text = (cli.folder / name / "report.json").read_text().replace("runs/whole", "runs/demo")
        report = json.loads(text)
        for arm in report["arms"].values():
            del arm["seconds_to"]
        reports.append(report)
    assert reports[0] == reports[1] and reports[0]["claims"][0]["changed"] is False


def test_a_stopped_sweep_shows_how_far_its_runs_are(cli: Cli) -> None:
    (cli.folder / "s.yaml").write_text("""
configs: [base, data/digits, trainer/cpu]
fixed: {trainer.max_epochs: 10000, model.engine: sequential, model.local_epochs: 1}
grid: {method: [method/fedavg, method/fedinit], seed_everything: [1]}
""")
    sweep = cli.start("sweep", "s.yaml", "--jobs", 1)
    run = cli.folder / "runs/s/fedavg/seed-1"
    until(lambda: (run / "metrics.csv").exists() and rounds_done(run) > 1, sweep)
    sweep.kill(signal.SIGINT)
    ended = sweep.wait()
    assert ended.returncode == 128 + signal.SIGINT
    rounds = rounds_done(run)
    lines = [line.split(maxsplit=1) for line in ended.stdout.splitlines() if line]
    table = {line[0]: line[1:] for line in lines}
    assert table["fedavg"] == [f"stopped after round {rounds - 1}"] and table["fedinit"] == ["·"]
    assert "report" not in ended.stdout  # there is nothing to compare yet


def test_killed_after_its_arm_chose_goes_on_with_the_choice(cli: Cli) -> None:
    (cli.folder / "s.yaml").write_text(f"""
configs: [base, data/digits, trainer/cpu]
fixed: {{trainer.max_epochs: {ROUNDS}, model.engine: sequential, model.local_epochs: 1}}
grid: {{method: [method/fedavg], seed_everything: [1]}}
select:
  over: {{model.learner.init_args.lr: [1.0e-6, 0.1]}}
  rounds: 1
  seeds: [100]
""")
    folder = cli.folder / "runs/s"
    first = cli.start("sweep", "s.yaml", "--jobs", 1)
    until((folder / "selections.yaml").exists, first)
    until(lambda: halted(first), first)
    first.kill(signal.SIGKILL)
    assert first.wait().returncode == -signal.SIGKILL
    again = cli("sweep", "s.yaml", "--jobs", 1)
    assert again.returncode == 0, again.stderr
    assert states(folder) == {"fedavg/1": "done"}
    assert "going on with round" in (folder / "fedavg/seed-1/log.txt").read_text()
    assert "lr: 0.1\n" in (folder / "fedavg/seed-1/config.yaml").read_text()


def test_killed_after_its_last_round_is_done(cli: Cli, sweep_file: Path) -> None:
    one = ("sweep", sweep_file, "method=method/fedavg", "seed_everything=0")
    assert cli(*one).returncode == 0
    path = cli.folder / "runs/demo/fedavg/seed-0/run.json"
    # As a sweep's own process writes it after a kill just before the end.
    record = json.loads(path.read_text()) | {"status": "failed", "ended": None}
    path.write_text(json.dumps(record))
    assert cli(*one).returncode == 0
    assert json.loads(path.read_text())["status"] == "done"
    assert set(states(cli.folder / "runs/demo").values()) == {"done"}


def test_one_sweep_at_a_time(cli: Cli, sweep_file: Path) -> None:
    first = cli.start("sweep", sweep_file, "--jobs", 1)
    first.wait_for(cli.folder / "runs/demo/runs.csv")
    second = cli("sweep", sweep_file)
    assert second.returncode == 2 and "is writing in this folder" in second.stderr
    assert str(first.pid) in second.stderr
    first.kill(signal.SIGTERM)  # stops each run after its round
    assert first.wait().returncode == 128 + signal.SIGTERM
    found = states(cli.folder / "runs/demo")
    assert "waiting" in found.values() and not {"failed", "running"} & set(found.values())
