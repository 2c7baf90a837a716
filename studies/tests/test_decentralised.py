"""The table and the claims of studies/decentralised.md, calculated again from the kept runs."""

from __future__ import annotations

import math
import re
import statistics
from pathlib import Path

import pytest

from studies.kept import read

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "studies/decentralised.md").read_text("utf-8")
RUNS = ROOT / "studies/decentralised_results/digits-dir0.3-100"
SEEDS = range(20, 25)
METHODS = {
    "FedAvg": "fedavg",
    "FedInit": "fedinit",
    "DFedAvg": "dfedavg",
    "DFedAvgM": "dfedavgm",
    "DFedSAM": "dfedsam",
    "OledFL, β = 0.9": "oledfl",
    "K-GT": "kgt",
}
GRAPHS = {
    "a server": "",
    "Ring": "-ring",
    "Torus": "-torus",
    "ExponentialGraph": "-exponential",
    "FullyConnected": "-full",
}
CELLS = {(metric, run): held.split(" ") for metric, run, held in read(RUNS / "curves.csv.xz")}
LINES = [line for line in PAGE.splitlines() if line.startswith("| ")]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


ROWS = [cells_of(line) for line in LINES[1:]]  # below the head
T95 = 2.7764451  # Student's t with four degrees of freedom


def values(metric: str, arm: str, seed: int) -> list[float]:
    return [float(cell) for cell in CELLS[metric, f"{arm}/seed-{seed}"] if cell]


def scores(arm: str) -> list[float]:
    return [100 * statistics.mean(values("val/acc", arm, seed)[-10:]) for seed in SEEDS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}, {row[1]}")
def test_each_row_is_that_of_its_runs(row: list[str]) -> None:
    method, graph, accuracy, consensus = row
    arm = METHODS[method] + GRAPHS[graph]
    assert accuracy == f"{statistics.mean(scores(arm)):.2f} ± {statistics.stdev(scores(arm)):.2f}"
    if graph == "a server":
        assert consensus == "–"
    else:
        last = statistics.mean(values("gossip/consensus", arm, seed)[-1] for seed in SEEDS)
        assert consensus == f"{last:.2g}"


def test_the_table_has_every_arm() -> None:
    arms = {METHODS[row[0]] + GRAPHS[row[1]] for row in ROWS}
    assert arms == {run.partition("/")[0] for _, run in CELLS if not run.startswith("select/")}


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ("dfedavg-torus", "dfedavg-ring", "1.98 points above the ring (1.21 to 2.75)"),
        ("dfedavg-exponential", "dfedavg-torus", "0.87 above the torus (0.18 to 1.56)"),
        ("dfedavg-full", "dfedavg-exponential", "(+0.18, 0.00 to 0.37)"),
        ("fedavg", "dfedavg-ring", "3.04 points above DFedAvg on a ring (2.09 to 3.98)"),
        ("kgt-ring", "dfedavg-ring", "+1.71 on the ring (0.70 to 2.72)"),
        ("kgt-torus", "dfedavg-torus", "+1.39 (0.29 to 2.48)"),
    ],
)
def test_an_interval_on_the_page_is_that_of_the_paired_differences(
    a: str, b: str, told: str
) -> None:
    assert told in re.sub(r"\s+", " ", PAGE)
    differences = [x - y for x, y in zip(scores(a), scores(b), strict=True)]
    mean = statistics.mean(differences)
    half = T95 * statistics.stdev(differences) / math.sqrt(len(differences))
    numbers = [float(number) for number in re.findall(r"\d+\.\d\d", told)]
    assert numbers == pytest.approx([mean, mean - half, mean + half], abs=0.0051)
