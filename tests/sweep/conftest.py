"""A small sweep, and a look at its processes from outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.commands import table

FILE = """
configs: [base, data/digits, trainer/cpu]
fixed:
  trainer.max_epochs: 3
  model.engine: sequential
  model.local_epochs: 1
grid:
  method: [method/fedavg, {configs: [method/fedinit], method.beta: 0.1}, method/scaffold]
  seed_everything: [0, 1, 2, 3]
"""


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    """``demo.yaml``: three methods, four seeds, three rounds."""
    path = tmp_path / "demo.yaml"
    path.write_text(FILE)
    return path


def states(folder: Path) -> dict[str, str]:
    """arm/seed → status, of a runs.csv."""
    rows = table(folder / "runs.csv")
    return {f"{row['arm']}/{row['seed']}": row["status"] for row in rows}


def children(parent: int) -> list[int]:
    """Processes that ``parent`` started and that still are."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def log_of(pid: int) -> Path:
    """Where a process writes its output."""
    return Path(os.readlink(f"/proc/{pid}/fd/1"))


def alive(pid: int) -> bool:
    """Whether a process is still at work."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
