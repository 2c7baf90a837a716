"""Twelve small runs: one sweep beside twelve ``fl-lightning fit``, one after the other: ``python -m
benchmarks.sweep``.

Half of the fits run before the sweep and half after it, so that a busy neighbour troubles both. The
sweep's time includes its imports and its look at every arm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

METHODS, SEEDS, ROUNDS = ("fedavg", "fedinit", "scaffold"), (0, 1, 2, 3), 3


def main() -> None:
    """Print seconds of wall clock and of the processor for both, and their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        grid = {"method": [f"method/{name}" for name in METHODS], "seed_everything": list(SEEDS)}
        configs = ["base", "data/digits", "trainer/cpu"]
        sweep = {"configs": configs, "fixed": {"trainer.max_epochs": ROUNDS}, "grid": grid}
        (Path(folder) / "twelve.yaml").write_text(json.dumps(sweep))  # JSON is YAML
        fits = [
            ["fit", *(part for name in (*configs, f"method/{method}") for part in ("-c", name)),
             f"--trainer.max_epochs={ROUNDS}", f"--seed_everything={seed}",
             f"--trainer.default_root_dir={method}-{seed}"]
            for method in METHODS for seed in SEEDS
        ]  # fmt: skip
        before = [_seconds(command, folder) for command in fits[::2]]
        wall, processor = _seconds(["sweep", "twelve.yaml"], folder)
        after = [_seconds(command, folder) for command in fits[1::2]]
        one_by_one = [sum(column) for column in zip(*before, *after, strict=True)]
    cores = len(os.sched_getaffinity(0))
    print(f"{len(fits)} runs of {ROUNDS} rounds, {cores} cores")
    print(f"one after the other  {one_by_one[0]:6.1f} s, of the processor {one_by_one[1]:6.1f} s")
    print(f"one sweep            {wall:6.1f} s, of the processor {processor:6.1f} s")
    print(
        f"ratio                {wall / one_by_one[0]:6.2f}                      "
        f"{processor / one_by_one[1]:6.2f}"
    )


def _seconds(command: list[str], folder: str) -> tuple[float, float]:
    """(wall clock, processor) of one command."""
    began, used = time.perf_counter(), os.times()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
    }
    done = subprocess.run(
        [sys.executable, "-m", "fl_lightning", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    now = os.times()
    spent = now.children_user + now.children_system - used.children_user - used.children_system
    return time.perf_counter() - began, spent


if __name__ == "__main__":
    main()
