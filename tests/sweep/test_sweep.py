"""What a sweep does with runs that fail, settings that changed, choices to make, and a cluster's
tasks."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.commands import table, typed
from tests.helpers.zygote import Cli
from tests.sweep.conftest import states

pytestmark = pytest.mark.slow

ONE_ARM = ("method=method/fedavg", "trainer.max_epochs=1")


def test_what_diverges_or_fails_is_recorded_and_the_rest_goes_on(cli: Cli) -> None:
    (cli.folder / "s.yaml").write_text("""
configs: [base, data/digits, trainer/cpu]
fixed: {trainer.max_epochs: 2, model.engine: sequential, model.local_epochs: 1}
grid:
  model.learner.init_args.lr: [1.0e+30, 0.1]
  data.num_clients: [10, 5000]
""")
    result = cli("sweep", "s.yaml", "--jobs", 2)
    assert result.returncode == 1
    expected = {
        "1e+30_10/0": "diverged",
        "1e+30_5000/0": "failed",
        "0.1_10/0": "done",
        "0.1_5000/0": "failed",
    }
    assert states(cli.folder / "runs/s") == expected
    assert "0.1_5000/seed-0: failed, fl-lightning:" in result.stdout  # and why
    diverged = cli.folder / "runs/s/1e+30_10/seed-0/run.json"
    when = diverged.stat().st_mtime_ns
    again = cli("sweep", "s.yaml", "--jobs", 2, "data.num_clients=10")
    # it has diverged: not run again
    assert again.returncode == 3 and diverged.stat().st_mtime_ns == when


def test_select_chooses_with_other_seeds_on_held_out_data(cli: Cli) -> None:
    (cli.folder / "s.yaml").write_text("""
configs: [base, data/digits, trainer/cpu]
fixed: {trainer.max_epochs: 2, model.engine: sequential, model.local_epochs: 1}
grid:
  method: [method/fedavg, method/fedinit]
  seed_everything: [1]
select:
  over: {model.learner.init_args.lr: [1.0e-6, 0.1], method.beta: [0.1]}
  metric: val/acc
  val_fraction: 0.2
  seeds: [100]
""")
    assert cli("sweep", "s.yaml", "--jobs", 2).returncode == 0
    folder = cli.folder / "runs/s"
    keys = ("arm", "model.learner.init_args.lr", "method.beta", "chosen")
    assert [
        tuple(row[key] for key in keys) for row in table(folder / "select.csv")
    ] == [  # FedAvg has no β to choose
        ("fedavg", "1e-06", "", ""),
        ("fedavg", "0.1", "", "yes"),
        ("fedinit", "1e-06", "0.1", ""),
        ("fedinit", "0.1", "0.1", "yes"),
    ]
    chosen = yaml.safe_load((folder / "selections.yaml").read_text())
    rate = {"model.learner.init_args.lr": 0.1}
    assert chosen == {"fedavg": rate, "fedinit": {**rate, "method.beta": 0.1}}
    assert json.loads((folder / "fedinit/seed-1/run.json").read_text())["axes"] == {
        "method": "fedinit"
    }
    measured = json.loads((folder / "select/fedavg/1e-06/seed-100/run.json").read_text())
    assert measured["seed"] == 100 and "--data.val_fraction=0.2" in measured["command"]
    own = json.loads((folder / "fedinit/seed-1/run.json").read_text())["command"]
    assert {"--model.learner.init_args.lr=0.1", "--method.beta=0.1"} <= set(own)
    assert not any("val_fraction" in option for option in own)
    assert len(states(folder)) == 2  # the report is of these
    assert cli("report", "runs/s", "--figures", "none").returncode == 0
    assert set(json.loads((folder / "report.json").read_text())["arms"]) == {"fedavg", "fedinit"}


def test_a_metric_that_no_run_logs_ends_the_selection_after_its_first_run(cli: Cli) -> None:
    (cli.folder / "s.yaml").write_text("""
configs: [base, data/digits, trainer/cpu]
fixed: {trainer.max_epochs: 2, model.engine: sequential, model.local_epochs: 1}
grid: {method: [method/fedavg, method/fedinit], seed_everything: [1]}
select:
  over: {model.learner.init_args.lr: [0.05, 0.1]}
  metric: val/acccuracy
  mode: max
  val_fraction: 0.2
  seeds: [100]
""")
    ended = cli("sweep", "s.yaml", "--jobs", 1)
    assert ended.returncode == 2
    assert "select.metric val/acccuracy: " in ended.stderr and "Logged: " in ended.stderr
    assert len(list((cli.folder / "runs/s/select").rglob("metrics.csv"))) == 1


def test_an_arm_without_a_working_candidate_does_not_hold_up_the_others(cli: Cli) -> None:
    (cli.folder / "s.yaml").write_text("""
configs: [base, data/digits, trainer/cpu]
fixed: {trainer.max_epochs: 1, model.engine: sequential, model.local_epochs: 1}
grid: {method: [method/ri, method/fedavg, method/fedinit], seed_everything: [1]}
select:
  over: {model.learner.init_args.lr: [0.1]}
  arms:
    fedavg: {model.learner.init_args.lr: [1.0e+20, 1.0e+30]}
    ri: {after: fedavg, method.beta: [0.05, 0.1]}
  metric: val/loss
  seeds: [100]
""")
    ended = cli("sweep", "s.yaml", "--jobs", 1)
    assert ended.returncode == 1, ended.stderr
    for arm in ("fedavg", "ri"):  # ri would take fedavg's choice
        assert f"no choice: the candidates of {arm}, or of" in ended.stdout
    assert "the same command goes on" not in ended.stdout
    standing = {"ri/1": "waiting", "fedavg/1": "waiting", "fedinit/1": "done"}
    assert states(cli.folder / "runs/s") == standing
    script = cli("sweep", "s.yaml", "seed_everything=[1,2]", "--slurm", "-").stdout
    assert "fedinit/seed-2" in script and "fedavg/seed" not in script and "ri/seed" not in script


AFTER = """
configs: [base, data/digits, trainer/cpu]
fixed: {trainer.max_epochs: 2, model.engine: sequential, model.local_epochs: 1}
grid:
  method: [{name: ri, configs: [method/fedinit]}, method/fedavg]
  seed_everything: [1]
select:
  over: {model.learner.init_args.lr: [1.0e-6, 0.1]}
  arms: {ri: {after: fedavg, method.beta: [0.05, 0.1]}}
  seeds: [100]
"""


def test_an_arm_begins_from_what_another_chose(cli: Cli) -> None:
    (cli.folder / "s.yaml").write_text(AFTER)
    folder = cli.folder / "runs/s"
    early = cli("sweep", "s.yaml", "--run", "select/ri/0.05/seed-100")
    assert early.returncode == 2 and "fedavg has not chosen yet" in early.stderr
    listed = []
    for _ in range(2):
        script = cli("sweep", "s.yaml", "--slurm", "job.sh")
        assert script.returncode == 0 and "writes the next script" in script.stdout, script.stderr
        text = (cli.folder / "job.sh").read_text()
        listed.append([line.strip() for line in text.splitlines() if "/seed-" in line])
        # As a kill in the middle of the selection leaves it, one of its runs is not done.
        for place in listed[-1][: 2 - len(listed) // 2]:
            assert cli("sweep", "s.yaml", "--run", place).returncode == 0
    assert listed == [
        ["select/fedavg/1e-06/seed-100", "select/fedavg/0.1/seed-100"],
        ["select/ri/0.05/seed-100", "select/ri/0.1/seed-100"],
    ]
    begun = folder / "select/ri/0.05/seed-100"
    when = (begun / "metrics.csv").stat().st_mtime_ns
    # A worker that was killed before its first round left this; the same command takes it up again.
    failed = folder / "select/fedavg/0.1/seed-100/run.json"
    record, config = failed.read_text(), (failed.parent / "config.yaml").read_text()
    shutil.rmtree(failed.parent)
    failed.parent.mkdir()
    failed.write_text(record.replace('"done"', '"failed"'))
    (failed.parent / "config.yaml").write_text(config)
    result = cli("sweep", "s.yaml", "--jobs", 1)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ri chose model.learner.init_args.lr 0.1 as fedavg, method.beta 0." in result.stdout
    assert (begun / "metrics.csv").stat().st_mtime_ns == when
    chosen = yaml.safe_load((folder / "selections.yaml").read_text())
    assert list(chosen) == ["ri", "fedavg"]
    assert list(chosen["ri"]) == ["model.learner.init_args.lr", "method.beta"]
    rates = [
        (row["arm"], row["model.learner.init_args.lr"]) for row in table(folder / "select.csv")
    ]
    assert rates == [("ri", "0.1"), ("ri", "0.1"), ("fedavg", "1e-06"), ("fedavg", "0.1")]
    own = json.loads((folder / "ri/seed-1/run.json").read_text())["command"]
    assert "--model.learner.init_args.lr=0.1" in own
    taken = cli("sweep", "s.yaml", "select.from=runs/s", "--dry_run", "--out", "other")
    assert taken.stdout.count("--model.learner.init_args.lr=0.1") == 2


def test_more_rounds_and_seeds_go_on_in_one_folder(cli: Cli, sweep_file: Path) -> None:
    assert cli("sweep", sweep_file, *ONE_ARM, "seed_everything=0").returncode == 0
    longer = ("method=method/fedavg", "trainer.max_epochs=2", "seed_everything=[0,1]")
    assert "fedavg/seed-0" in cli("sweep", sweep_file, *longer, "--slurm", "-").stdout
    assert "2 waiting" in cli("sweep", sweep_file, *longer, "--dry_run").stdout
    more = cli("sweep", sweep_file, *longer)
    assert more.returncode == 0 and set(states(cli.folder / "runs/demo").values()) == {"done"}
    rows = (cli.folder / "runs/demo/fedavg/seed-0/metrics.csv").read_text().splitlines()
    log = (cli.folder / "runs/demo/fedavg/seed-0/log.txt").read_text()
    assert len(rows) == 3 and "going on with round 2" in log


def test_what_cannot_work_is_said_before_anything_runs(cli: Cli, sweep_file: Path) -> None:
    wrong = "{configs: [method/scaffold], method.beta: 1}]"
    sweep_file.write_text(sweep_file.read_text().replace("method/scaffold]", wrong))
    result = cli("sweep", sweep_file)
    assert result.returncode == 2 and "no method of this run has the option 'beta'" in result.stderr
    assert not list(cli.folder.glob("runs/demo/*/*"))


def test_claims_come_before_the_runs(cli: Cli, sweep_file: Path) -> None:
    """Also before those that select."""
    claim = "- {id: A1, a: ARM, b: fedavg, metric: val/acc, direction: greater, margin: 0.005}\n"
    select = "select: {over: {model.clip_norm: [1.0, 2.0]}, seeds: [100]}\n"
    sweep_file.write_text(f"{sweep_file.read_text()}claims: claims.yaml\n{select}")
    claims, few = cli.folder / "claims.yaml", ("trainer.max_epochs=1", "seed_everything=[0]")
    claims.write_text(claim.replace("ARM", "fedint"))
    unknown = cli("sweep", sweep_file, *few, "--slurm", "-")
    assert unknown.returncode == 2 and "arm fedint is not known" in unknown.stderr
    claims.write_text(claim.replace("ARM", "fedinit-0.1"))
    assert cli("sweep", sweep_file, *few, "--slurm", "-").returncode == 0
    assert (cli.folder / "runs/demo/claims.yaml").read_bytes() == claims.read_bytes()
    assert cli("sweep", sweep_file, *few, "--run", "select/fedavg/1.0/seed-100").returncode == 0
    claims.write_text(claim.replace("ARM", "scaffold"))
    changed = cli("sweep", sweep_file, *few)
    assert changed.returncode == 2 and "claims have to come before the runs" in changed.stderr
    sweep_file.write_text(sweep_file.read_text().replace("claims: claims.yaml\n", ""))
    removed = cli("sweep", sweep_file, "trainer.max_epochs=1", "seed_everything=[0,1]")
    assert removed.returncode == 2 and "its claims (none) differ" in removed.stderr


def test_a_slurm_task_is_one_run(cli: Cli, python: str, sweep_file: Path) -> None:
    two = ("sweep", sweep_file, *ONE_ARM, "seed_everything=[0,1]")
    assert cli(*two, "--slurm", "job.sh").returncode == 0
    script = (cli.folder / "job.sh").read_text()
    assert "#SBATCH --array=0-1\n" in script
    assert set(states(cli.folder / "runs/demo").values()) == {"waiting"}
    program = cli.folder / "bin/fl-lightning"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {python} -m fl_lightning "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    given = {"PATH": path, "PYTHONPATH": os.getcwd(), "SLURM_ARRAY_TASK_ID": "1"}
    environment, command = {**os.environ, **given}, ["bash", "job.sh"]
    task = subprocess.run(command, cwd=cli.folder, env=environment, capture_output=True, text=True)
    assert task.returncode == 0, task.stderr
    record = json.loads((cli.folder / "runs/demo/fedavg/seed-1/run.json").read_text())
    assert (record["status"], record["arm"]) == ("done", "fedavg")
    assert cli(*two, "--run", "fedavg/seed-0").returncode == 0
    again = cli(*two)
    assert again.returncode == 0 and "(1 of" not in again.stdout
    assert set(states(cli.folder / "runs/demo").values()) == {"done"}


def test_everything_that_decides_a_run_is_compared(cli: Cli, sweep_file: Path) -> None:
    few = ("method=method/fedavg", "trainer.max_epochs=2", "seed_everything=0")
    assert cli("sweep", sweep_file, *few).returncode == 0
    other = cli("sweep", sweep_file, *few, "model.participation=0.3")
    told = "fedavg/seed-0 began with model.participation 0.5, and now it is 0.3"
    assert other.returncode == 2 and told in other.stderr
    text = sweep_file.read_text()
    added = {
        "partition": "  data.partition: {class_path: Dirichlet, init_args: {alpha: 0.1}}\n",
        "method": "  method+: [DriftLogger]\n",
    }
    for key, line in added.items():
        sweep_file.write_text(text.replace("fixed:\n", f"fixed:\n{line}"))
        result = cli("sweep", sweep_file, *few)
        assert result.returncode == 2, (key, result.stderr)
        assert "fedavg/seed-0 began with " in result.stderr and key in result.stderr
    sweep_file.write_text(text)
    fewer = cli("sweep", sweep_file, *few, "trainer.max_epochs=1")
    told = "began with trainer.max_epochs 2, and now it is 1"
    assert fewer.returncode == 2 and told in fewer.stderr
    # decides nothing
    assert cli("sweep", sweep_file, *few, "data.init_args.root=elsewhere").returncode == 0
    (cli.folder / "runs/demo/runs.csv").write_text("nothing,of,a,sweep\n1,2,3,4\n")
    (cli.folder / "runs/demo/fedavg/seed-0/config.yaml").write_text("{[")
    broken = cli("sweep", sweep_file, *few)
    assert (
        broken.returncode == 2
        and "seed-0/config.yaml, line 1, column 3: not valid" in broken.stderr
    )


METHOD = """
import torch
from fl_lightning.callback import FederatedCallback


class Threads(FederatedCallback):
    def on_round_end(self, server):
        server.log("threads", torch.get_num_threads())
"""


def test_a_run_of_a_sweep_has_the_bits_of_its_command(python: str, tmp_path: Path) -> None:
    """Whatever the number of threads, which is the environment's, but for what validation logs."""
    (tmp_path / "mine.py").write_text(METHOD)
    (tmp_path / "s.yaml").write_text("""
configs: [base, data/digits, trainer/cpu]
fixed:
  trainer.max_epochs: 1
  model.engine: concurrent
  model.participation: 0.3
  model.local_epochs: 1
  model.learner.network: {class_path: fl_lightning.models.MLP, init_args: {sizes: [64, 1000, 10]}}
  method+:
    [DivergenceLogger, DriftLogger, ConsensusDistanceLogger, DynamicRegularization, mine.Threads]
grid: {seed_everything: [0]}
""")

    def told(program: str, threads: int, *argv: str) -> subprocess.CompletedProcess[str]:
        given = {"PYTHONPATH": f"{os.getcwd()}:{tmp_path}", "OMP_NUM_THREADS": str(threads)}
        command, own = [program, "-m", "fl_lightning", *argv], {**os.environ, **given}
        result = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return result

    listed = told(python, 1, "sweep", "s.yaml", "--dry_run").stdout
    (command,) = [line for line in listed.splitlines() if "fl-lightning fit" in line]
    argv = shlex.split(command.partition("fl-lightning ")[2])
    place = "--trainer.default_root_dir="
    told(python, 2, *(f"{place}alone" if word.startswith(place) else word for word in argv))
    # Bindings tell what they leave where an interpreter ends, which a forked one does not.
    assert "nanobind" not in told(sys.executable, 1, "sweep", "s.yaml").stderr
    alone, swept = (
        [{k: v for k, v in row.items() if not k.startswith("time/")} for row in table(path)]
        for path in (tmp_path / "alone/metrics.csv", tmp_path / "runs/s/s/seed-0/metrics.csv")
    )
    assert [row.pop("threads") for row in swept] == ["1.0"]
    assert [row.pop("threads") for row in alone] == ["2.0"] or len(os.sched_getaffinity(0)) == 1
    for one, other in zip(alone, swept, strict=True):
        assert one.keys() == other.keys()
        # Validation runs on all threads, and sums in their order.
        measured = [name for name in one if name.startswith("val/") and one[name]]
        assert [float(one.pop(name)) for name in measured] == pytest.approx(
            [float(other.pop(name)) for name in measured], rel=1e-5
        )
    assert alone == swept


def test_runs_go_seed_by_seed_and_finished_folders_are_done(cli: Cli, sweep_file: Path) -> None:
    few = typed("method=[method/fedavg,method/scaffold] trainer.max_epochs=2 --jobs 1")
    few += typed("seed_everything=[0,1]")
    first = cli("sweep", sweep_file, *few)
    done = [line.partition(":")[0] for line in first.stdout.splitlines() if "done, val/acc" in line]
    assert done == ["fedavg/seed-0", "scaffold/seed-0", "fedavg/seed-1", "scaffold/seed-1"]
    for seed in (0, 1):  # what a repository keeps of a run
        there, kept = (cli.folder / f"{at}/fedavg/seed-{seed}" for at in ("runs/demo", "kept"))
        kept.mkdir(parents=True)
        for name in ("run.json", "config.yaml"):
            shutil.copy(there / name, kept / name)
        if seed:
            packed = gzip.compress((there / "metrics.csv").read_bytes())
            (kept / "metrics.csv.gz").write_bytes(packed)
        else:
            shutil.copy(there / "metrics.csv", kept)
    again = cli("sweep", sweep_file, *few, "--out", "kept")
    assert again.returncode == 0 and "fedavg/seed-0: done" not in again.stdout
    assert set(states(cli.folder / "kept").values()) == {"done"}
    shown, values = (
        [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("  fedavg")]
        for run in (first, again)
    )
    assert values == shown
    longer = typed("method=method/fedavg trainer.max_epochs=3 --out kept")
    more = cli("sweep", sweep_file, *few, *longer)
    # without a checkpoint to go on from
    assert more.returncode == 1 and more.stdout.count("already holds a run") == 2
    assert not (kept / "metrics.csv").exists()
