"""Real runs of the command line: the run.json that each leaves, and a report on three of them."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import typed
from tests.helpers.zygote import Cli

FIT = typed("fit -c base -c data/digits -c trainer/cpu --trainer.enable_progress_bar false")
FIT = (*FIT, "--model.engine", "sequential")
LEARNER = """
import time, torch, pytorch_lightning as pl
from pathlib import Path

class Lit(pl.LightningModule):
    def __init__(self, fault: str = ""):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        self.fault = fault
    def training_step(self, batch, batch_idx):
        if self.fault == "slow":
            time.sleep(0.05)
        if self.fault == "raise" and Path("training").exists():
            raise KeyError("mine")
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return loss * float("nan") if self.fault == "nan" else loss
    def on_train_epoch_start(self):
        Path("training").touch()  # rounds have begun: before, a step is tried
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


ROOT = Path(__file__).parents[2]


def git(*argv: str) -> str | None:
    result = subprocess.run(["git", "-C", str(ROOT), *argv], capture_output=True, text=True)
    return result.stdout.strip() if result.returncode == 0 else None


TRACKED = git("ls-files", "fl_lightning/lab/cli/run_record.py")
COMMIT = (
    f"{git('rev-parse', 'HEAD')}{'-dirty' * bool(git('status', '--porcelain', '-uno'))}"
    if TRACKED
    else None
)


def header(folder: Path) -> list[str]:
    return (folder / "metrics.csv").read_text().splitlines()[0].split(",")


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_three_runs_and_their_report(cli: Cli) -> None:
    for name, method, seed in (("a", "fedavg", 1), ("b", "fedinit", 1), ("c", "fedinit", 2)):
        argv = ("-c", f"method/{method}", "--seed_everything", seed, "--trainer.max_epochs", 3)
        assert cli(*FIT, *argv, "--trainer.default_root_dir", name).returncode == 0
    a, b, c = (record(cli.folder / name) for name in "abc")
    expected = {
        "status": "done",
        "seed": 1,
        "arm": None,
        "title": "FedAvg",
        "rounds": 3,
        "axes": {},
    }
    expected |= {"claims_hash": None, "commit": COMMIT, "validated_on": "test"}
    assert {name: a[name] for name in expected} == expected
    assert a["partition_hash"] == b["partition_hash"] != c["partition_hash"]
    assert b["config_hash"] == c["config_hash"] != a["config_hash"]  # the seed is no part of it
    assert a["command"][:4] == ["fl-lightning", "fit", "-c", "base"]
    started, ended = (datetime.fromisoformat(a[when]) for when in ("started", "ended"))
    assert started <= ended and started.utcoffset() == timedelta(0)
    assert {"time/cpu", "time/round"} <= set(header(cli.folder / "a"))
    assert set(a["versions"]) >= {"fl-lightning", "torch", "pytorch-lightning", "python"}
    machine = a["machine"]
    assert machine["cores"] >= 1 and machine["threads"] >= 1 and machine["processes"] == 1
    assert machine["gpu"] is None and machine["memory"] > 2**20 and machine["processor"]
    result = cli("report", "a", "b", "c", "--targets", "0.5", "--out", "out")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("→ out/report.html")
    found = json.loads((cli.folder / "out/report.json").read_text())
    assert {arm: entry["n"] for arm, entry in found["arms"].items()} == {"FedAvg": 1, "FedInit": 2}
    assert found["pairs"][0]["n"] == 1 and found["arms"]["FedInit"]["bytes_to"]["0.5"]["1"] > 0
    assert "MLP" in (cli.folder / "a/config.yaml").read_text()


def test_a_changed_digit_of_the_metrics_is_named(cli: Cli) -> None:
    """Also after a run that went on, and in a packed file; a run without the hash is older."""
    for rounds in (2, 3):
        argv = ("-c", "method/fedavg", "--trainer.default_root_dir", "a")
        argv = argv if rounds == 2 else ("--ckpt_path", "a/checkpoints/last.ckpt", *argv)
        assert cli(*FIT, *argv, "--trainer.max_epochs", rounds).returncode == 0

    def notes() -> str:
        made = cli("report", "a", "--figures", "none", "--out", "out")
        assert made.returncode == 0, made.stderr
        return (cli.folder / "out/report.md").read_text()

    assert "SHA-256" not in notes()
    metrics = cli.folder / "a/metrics.csv"
    rows = metrics.read_bytes()
    packed = metrics.with_name("metrics.csv.gz")
    packed.write_bytes(gzip.compress(rows))
    metrics.unlink()
    assert "SHA-256" not in notes()
    packed.unlink()
    metrics.write_bytes(rows[:-3] + (b"1" if rows[-3:-2] != b"1" else b"2") + rows[-2:])
    named = "a/metrics.csv: the run is done, but this file has changed since the run wrote it"
    assert named in notes()
    of_the_run = record(cli.folder / "a")
    del of_the_run["metrics_hash"]
    (cli.folder / "a/run.json").write_text(json.dumps(of_the_run))
    assert "SHA-256" not in notes()


def own(cli: Cli, fault: str, rounds: int = 2) -> tuple[object, ...]:
    (cli.folder / "my_learner.py").write_text(LEARNER)
    learner = ("--model.learner", "my_learner.Lit", f"--model.learner.fault={fault}")
    return (*FIT, "--trainer.default_root_dir", "x", *learner, "--trainer.max_epochs", rounds)


@pytest.mark.parametrize("fault, status", [("nan", "diverged"), ("raise", "failed")])
def test_a_run_that_ends_badly_says_how(cli: Cli, fault: str, status: str) -> None:
    assert cli(*own(cli, fault)).returncode != 0
    assert record(cli.folder / "x")["status"] == status


def test_a_killed_run_is_running_a_stopped_one_stopped_and_going_on_ends_it(cli: Cli) -> None:
    steps = typed("--model.local_epochs=null --model.local_steps=8 --ckpt_path last")
    argv = (*own(cli, "slow"), *steps)
    for number, status in ((signal.SIGKILL, "running"), (signal.SIGTERM, "stopped")):
        process = cli.start(*argv)
        process.wait_for(cli.folder / "training")
        process.kill(number)
        process.wait()
        left = record(cli.folder / "x")
        assert left["status"] == status and (left["ended"] is None) == (status == "running")
        (cli.folder / "training").unlink()
    report = cli("report", "x", "--figures", "none")
    assert report.returncode == 0 and "seed 0: stopped" in report.stdout
    changed = record(cli.folder / "x") | {"arm": "mine", "claims_hash": "h"}
    (cli.folder / "x/run.json").write_text(json.dumps(changed))  # as a sweep would have it
    assert cli("fit", "x").returncode == 0
    ended = record(cli.folder / "x")
    assert ended["started"] == left["started"] < ended["ended"]
    assert (ended["status"], ended["arm"], ended["claims_hash"]) == ("done", "mine", "h")
