"""Command lines as they are typed, what they say, and what they leave."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.helpers.zygote import Result


def typed(*texts: str) -> tuple[str, ...]:
    """The words of a command line."""
    return tuple(" ".join(texts).split())


QUIET_FIT = typed("fit -c base -c trainer/cpu --trainer.enable_progress_bar false")


def said(result: Result, *words: str) -> None:
    """Status 2, and one paragraph of at most 6 lines of 100 characters with all ``words`` in it."""
    assert result.returncode == 2, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("fl-lightning: ")]
    alone = "Traceback" not in result.stderr and "usage:" not in result.stderr
    assert len(lines) == 1 and alone, result.stderr
    assert len(lines[0]) <= 600, lines[0]
    for word in words:
        assert word in lines[0], f"{word!r} is not in: {lines[0]}"


def done(result: Result, *words: str) -> Result:
    """Status 0, with all ``words`` in what it printed."""
    assert result.returncode == 0, result.stderr
    for word in words:
        assert word in result.stdout + result.stderr, f"{word!r} is not in: {result.stdout}"
    return result


def snapshot(folder: Path) -> dict[str, bytes]:
    """What is in each file of a folder, but for the lock, which names who held it last."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [path for path in files if path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def table(file: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with open(file) as opened:
        return list(csv.DictReader(opened))


def rounds(run: Path) -> list[str]:
    """The rounds of a run's metrics.csv."""
    return [row["round"] for row in table(run / "metrics.csv")]
