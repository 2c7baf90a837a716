"""A short `make soak`: real runs, killed and resumed, against one that nothing happened to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_runs_that_were_killed_end_with_the_bits_of_an_undisturbed_one(python: str) -> None:
    few = ["--kills", "8", "--only", "SCAFFOLD with FedInit"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, "-m", "benchmarks.soak", *few], cwd=ROOT, capture_output=True, text=True, env=env
    )
    # The status is not asserted: eight kills may leave a phase of the round empty.
    assert "every run left the bits of one that nothing happened to" in done.stdout, done.stdout
