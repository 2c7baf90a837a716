"""The command as a process, with tiny numbers: the columns of its table, and its files."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_one_table_with_json_and_plot_beside_it(python: str, tmp_path: Path) -> None:
    tiny = (
        "--axis clients --values 400 --returning 20 --rounds 6 --checkpoint-every 2 "
        "--rows-in-memory 2"
    )
    command = [
        python,
        "-m",
        "benchmarks.scaling",
        *tiny.split(),
        "--json",
        str(tmp_path / "found.json"),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    heading = next(line for line in done.stdout.splitlines() if "returning" in line)
    for column in (
        "round s",
        "last 1/10",
        "with ckpt s",
        "cpu s",
        "peak MB",
        "disk MB",
        "segments",
    ):
        assert column in heading
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[3:4] == ["9,985"]]
    assert [row[:3] for row in rows] == [["400", "0", "10"], ["400", "20", "10"]]
    for point in json.loads((tmp_path / "found.json").read_text()):
        assert len(point["seconds"]) == 6 and point["whole"] >= point["round"] > 0
        assert point["segments"] >= 3 and point["peak_mb"] > 0
        # rows of at least the last rounds' participants
        assert point["disk_mb"] > 3 * 10 * 4 * 9985 / 2**20
    assert (tmp_path / "found.png").read_bytes()[1:4] == b"PNG"
