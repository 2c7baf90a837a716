"""The command that compares, times and profiles on a GPU, tried on the CPU as a process of its
own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch

from benchmarks.gpu_compositions import COMPOSITIONS
from tests.helpers.commands import typed

ROOT = Path(__file__).parents[2]
COMMAND = ["-m", "benchmarks.gpu_check"]


def test_it_compares_times_and_profiles(python: str, tmp_path: Path) -> None:
    few = typed("--check W1 --methods FedSMOO --speed W1 --profile W1 --repetitions 1 --small")
    where = ["--accelerator", "cpu", "--json", str(tmp_path / "seconds.json")]
    done = subprocess.run(
        [python, *COMMAND, *few, *where], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  ok     W1 ") == 8 and "0 comparisons failed" in done.stdout
    assert done.stdout.count(" (tests): captured: ") == len(COMPOSITIONS)
    assert "FedSMOO, side by side" in done.stdout and "aten::" in done.stdout
    seconds = json.loads((tmp_path / "seconds.json").read_text("utf-8"))["W1"]
    assert {"bare", "sequential", "stacked", "auto"} <= seconds.keys() and all(seconds.values())


def test_without_a_gpu_it_says_so(python: str) -> None:
    if torch.cuda.is_available():
        return
    done = subprocess.run([python, *COMMAND], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "no CUDA GPU is here" in done.stdout
