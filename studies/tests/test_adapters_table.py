"""The table of methods for adapters on studies/compared.md, calculated again from the kept runs."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from studies.kept import read

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "studies/adapters_results/shakespeare"
ARMS = {
    ("FedIT", "8"): "fedit",
    ("FFA-LoRA", "8"): "ffa",
    ("FedSA-LoRA", "8"): "fedsa",
    ("RoLoRA", "8"): "rolora",
    ("FlexLoRA", "8"): "flexlora",
    ("HetLoRA", "8"): "hetlora",
    ("FLoRA", "8"): "flora",
    ("FedEx-LoRA", "8"): "fedex",
    ("LoRA-FAIR", "8"): "fair",
    ("FlexLoRA", "1 to 8"): "flexlora-unequal",
    ("HetLoRA", "1 to 8"): "hetlora-unequal",
    ("FLoRA", "1 to 8"): "flora-unequal",
}


def rows() -> list[list[str]]:
    page = (ROOT / "studies/compared.md").read_text("utf-8")
    section = page.partition("## Adapters on a small text")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_table_has_every_arm() -> None:
    assert [(row[0], row[4]) for row in rows()] == list(ARMS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row[0]}, {row[4]}")
def test_each_row_is_that_of_its_runs(row: list[str]) -> None:
    arm = ARMS[row[0], row[4]]
    cells = {(metric, run): held.split(" ") for metric, run, held in read(RUNS / "curves.csv.xz")}
    runs = [f"{arm}/seed-{seed}" for seed in range(20, 25)]
    scores = []
    for run in runs:
        measured = [float(cell) for cell in cells["val/acc", run] if cell]
        # Each second of twelve rounds was validated, so the last third has two values.
        scores.append(100 * statistics.mean(measured[-2:]))
    accuracy = f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f}"
    ways = [float(cells[f"communication/{way}_bytes", runs[0]][-1]) for way in ("down", "up")]
    assert row[1:4] == [accuracy, *(f"{way / 1e6:.2f}" for way in ways)]
