"""The comparison of two checkouts, as a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PLANTED = """
original = ControlVariates.on_server_update


def planted(self, server):
    original(self, server)
    self.c *= 1.00001


ControlVariates.on_server_update = planted
"""

pytestmark = pytest.mark.slow


def compared(python: str, old: Path, new: Path, arguments: str, out: Path) -> tuple[int, str, Any]:
    """Exit status, what is printed, and the file."""
    given = [str(old), str(new), *arguments.split(), "--out", str(out)]
    command, env = [python, "-m", "benchmarks.checkouts", *given], {**os.environ}
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert out.exists(), done.stderr[-2000:]
    return done.returncode, done.stdout, json.loads(out.read_text())


def test_a_planted_factor_is_found_and_nothing_else(python: str, tmp_path: Path) -> None:
    new = tmp_path / "new"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fl_lightning", new / "fl_lightning", ignore=ignore)
    with (new / "fl_lightning" / "callbacks" / "drift" / "control_variates.py").open("a") as method:
        method.write(PLANTED)
    names = "FedAvg SCAFFOLD FedALS+top-k"
    status, printed, found = compared(
        python, ROOT, new, f"bits --only {names}", tmp_path / "found.json"
    )
    assert status == 1
    assert "SCAFFOLD, captured: DIFFERENT: w, evaluated vector, server state Contr" in printed
    words = {name: set(row.values()) for name, row in found["verdicts"]["bits"].items()}
    assert words == {"FedAvg": {"same"}, "SCAFFOLD": {"DIFFERENT"}, "FedALS+top-k": {"refused"}}
    assert len(found["verdicts"]["bits"]["FedAvg"]) == 9
    assert found["sha256"]["old"]["FedAvg"] == found["sha256"]["new"]["FedAvg"]
    for kind in ("concurrent, captured", "stacked"):
        assert f"2 {kind}" in printed  # they were not handed over to another engine
