"""The tables of tuned methods on studies/compared.md, calculated again from the kept runs."""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path

import pytest

from studies.kept import read

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "studies/results/methods"
SEEDS = range(20, 25)
T95 = 2.7764451  # Student's t with 4 degrees of freedom, 97.5 %


@cache
def cells(sweep: str) -> dict[tuple[str, str], list[str]]:
    rows = read(RUNS / sweep / "curves.csv.xz")
    return {(metric, run): held.split(" ") for metric, run, held in rows}


def tables() -> list[tuple[str, str, list[str]]]:
    """The rows of the tables: sweep, what follows an arm's name, cells."""
    page = (ROOT / "studies/compared.md").read_text("utf-8")
    found = []
    for key, sweep, suffixes in (
        ("accuracy", "fashionmnist-100", ["_dir0.1", "_dir0.6"]),
        ("accuracy of later methods", "fashionmnist-100-2026", [""]),
    ):
        begin, end = (f"<!-- {key}: python -m studies", f"<!-- end of {key} -->")
        generated = page.partition(begin)[2].partition(end)[0]
        for suffix, part in zip(suffixes, generated.split("\n| method |")[1:], strict=True):
            lines = [line for line in part.splitlines()[2:] if line.startswith("|")]
            for line in lines:
                row = [cell.strip(" *") for cell in line.strip("|").split("|")]
                found.append((sweep, suffix, row))
    return found


def test_each_arm_of_the_sweeps_has_a_row() -> None:
    shown = {(sweep, row[0] + suffix) for sweep, suffix, row in tables()}
    for sweep in ("fashionmnist-100", "fashionmnist-100-2026"):
        arms = {run.split("/")[0] for _, run in cells(sweep)} - {"select"}
        assert arms == {arm for its, arm in shown if its == sweep}


def accuracies(sweep: str, arm: str) -> list[float]:
    """Percent, a number per seed: the mean of the last third of rounds."""
    made = []
    for measured in counted(sweep, arm, "val/acc"):
        last = [value for t, value in enumerate(measured, 1) if 3 * t > 2 * len(measured)]
        made.append(100 * statistics.mean(last))
    return made


def counted(sweep: str, arm: str, metric: str) -> list[list[float]]:
    """A list per seed: the metric's values, round by round."""
    runs = [f"{arm}/seed-{seed}" for seed in SEEDS]
    return [list(map(float, cells(sweep)[metric, run])) for run in runs]


def sent(sweep: str, arm: str) -> float:
    """Bytes; the column is a sum since round 0."""
    return statistics.mean(run[-1] for run in counted(sweep, arm, "communication/total_bytes"))


def gradients(sweep: str, arm: str) -> float:
    return statistics.mean(map(sum, counted(sweep, arm, "cost/gradients")))


@pytest.mark.parametrize("sweep, suffix, row", tables(), ids=lambda it: str(it)[:40])
def test_each_row_is_that_of_its_runs(sweep: str, suffix: str, row: list[str]) -> None:
    ours, fedavg = (accuracies(sweep, arm + suffix) for arm in (row[0], "fedavg"))
    assert row[1] == f"{statistics.mean(ours):.2f} ± {statistics.stdev(ours):.2f}"
    if row[0] != "fedavg":
        more = [a - b for a, b in zip(ours, fedavg, strict=True)]
        mean = statistics.mean(more)
        half = T95 * statistics.stdev(more) / len(more) ** 0.5
        told = row[2].replace("−", "-").replace("[", "").replace("]", "").replace(",", "")
        assert [float(number) for number in told.split()] == pytest.approx(
            [mean, mean - half, mean + half], abs=0.0051
        )
    for cell, cost in ((row[4], sent), (row[5], gradients)):
        assert cell == f"{cost(sweep, row[0] + suffix) / cost(sweep, 'fedavg' + suffix):.2g}"
