"""A run uses at most as many threads within an operation as cores, whatever the environment says.

Fresh processes, since OpenMP reads its settings once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no choice of cores here"),
]

FIT = ["fit", "-c", "base", "-c", "data/digits", "--trainer.max_epochs=1"]
FIT += ["--model.learner.network.init_args.sizes=[64,8,10]", "--data.num_clients=2"]


def command(folder: Path, *arguments: str, cores: int = 1, **environment: str) -> str:
    """What ``fl-lightning`` says with these environment variables and so many cores."""
    usable = sorted(os.sched_getaffinity(0))[:cores]
    if len(usable) < cores:
        pytest.skip(f"fewer than {cores} cores")
    kept = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "fl_lightning", *arguments],
        cwd=folder,
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, usable),
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def machine(folder: Path) -> dict[str, Any]:
    """What the only run below a folder says of the machine that it trained on."""
    (record,) = folder.rglob("run.json")
    found: dict[str, Any] = json.loads(record.read_text())["machine"]
    return found


def test_more_threads_than_cores_are_not_used_and_a_note_says_so(tmp_path: Path) -> None:
    said = command(tmp_path, *FIT, OMP_NUM_THREADS="8")
    assert machine(tmp_path)["threads"] == 1
    assert "threads within an operation (OMP_NUM_THREADS=8)" in " ".join(said.split())


def test_processes_of_a_run_share_the_cores(tmp_path: Path) -> None:
    several = ["-c", "trainer/ddp", "--trainer.devices=2", "--trainer.accelerator=cpu"]
    command(tmp_path, *FIT, *several, cores=2, OMP_NUM_THREADS="2")
    assert machine(tmp_path)["threads"] == 1


def test_runs_of_a_sweep_use_the_threads_of_their_cores(tmp_path: Path) -> None:
    """Two runs on two cores: each has one core, on which two threads would wait in a loop."""
    text = "configs: [base, data/digits]\nfixed: {trainer.max_epochs: 1}\n"
    (tmp_path / "s.yaml").write_text(f"{text}grid: {{seed_everything: [1, 2]}}\n")
    command(tmp_path, "sweep", "s.yaml", "--jobs=2", cores=2, OMP_NUM_THREADS="2")
    records = sorted(tmp_path.rglob("run.json"))
    assert [json.loads(r.read_text())["machine"]["threads"] for r in records] == [1, 1]
    log = next(tmp_path.rglob("log.txt")).read_text()
    assert "2 threads within an operation (OMP_NUM_THREADS=2)" in " ".join(log.split())


def test_openmp_does_not_bind_a_run_to_one_core_and_a_resumed_run_keeps_its_threads(
    tmp_path: Path,
) -> None:
    said = command(tmp_path, *FIT, cores=2, GOMP_CPU_AFFINITY="0-1", OMP_PROC_BIND="true")
    assert machine(tmp_path)["cores"] == 2
    assert "GOMP_CPU_AFFINITY and OMP_PROC_BIND would bind this process" in " ".join(said.split())
    (folder,) = (path.parent for path in tmp_path.rglob("run.json"))
    said = command(tmp_path, "fit", str(folder), "--trainer.max_epochs=2", cores=1)
    assert machine(tmp_path)["threads"] == 2
    assert "this run began with 2 threads" in " ".join(said.split())
