"""How evenly clients are served: what ``PerClientEvaluation`` wrote of each of them.

R. Jain, D. Chiu, W. Hawe: A Quantitative Measure of Fairness and Discrimination for Resource
Allocation in Shared Computer Systems (1984). C. Gini: Variabilità e mutabilità (1912).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fl_lightning.metrics import without_prefix
from fl_lightning.report.runs import Column, read_table

# Measure → what it is called in tables.
MEASURES = {
    "mean": "mean of clients",
    "worst10": "worst 10 %",
    "best10": "best 10 %",
    "jain": "Jain's index",
    "gini": "Gini",
}
# These have the metric's unit, the others none.
OF_METRIC = ("mean", "worst10", "best10")


def fairness(folder: Path, metric: str, greater: bool) -> dict[str, float | None]:
    """The measures of a run's ``clients.csv``; empty where it has none of ``metric``."""
    name = column_of(metric)
    values = [_number(row.get(name)) for row in read_table(folder / "clients.csv")]
    known = np.array(values, dtype=float)
    known = known[np.isfinite(known)]
    return spread(known, greater) if len(known) else {}


def column_of(metric: str) -> str:
    """A metric's column in clients' tables: ``val/acc`` and ``clients/acc`` are ``acc`` there."""
    return without_prefix(metric.removeprefix("clients/"))


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return float("nan")


def spread(values: Column, greater: bool) -> dict[str, float | None]:
    """Means of the ⌈k/10⌉ worst and best of k clients, Jain's index (Σx)² / k Σx², Gini.

    Indices are of values that are not negative and not all 0: of others they are None.

    >>> spread(np.array([0.0, 1.0]), True)
    {'mean': 0.5, 'worst10': 0.0, 'best10': 1.0, 'jain': 0.5, 'gini': 0.5}
    """
    ascending = np.sort(values)
    k = len(ascending)
    tenth = -(-k // 10)
    least = float(ascending[:tenth].mean())
    most = float(ascending[-tenth:].mean())
    worst, best = (least, most) if greater else (most, least)
    total = float(ascending.sum())
    jain: float | None = None
    gini: float | None = None
    if total > 0 and ascending[0] >= 0:
        jain = total**2 / (k * float(ascending @ ascending))
        # Σ_i Σ_j |x_i − x_j| / (2 k² mean), by ranks.
        ranks = 2 * np.arange(1, k + 1) - k - 1
        gini = float(ranks @ ascending) / (k * total)
    measures = [total / k, worst, best, jain, gini]
    return dict(zip(MEASURES, measures, strict=True))


def over_rounds(folder: Path, metric: str) -> dict[int, dict[str, float]]:
    """Round → client → value, of a run's ``clients_rounds.csv``; empty where it has none."""
    name = column_of(metric)
    rounds: dict[int, dict[str, float]] = {}
    for row in read_table(folder / "clients_rounds.csv"):
        value = _number(row.get(name))
        round_text = row.get("round") or ""
        # A killed process may have left half of a row.
        if round_text.isdecimal() and np.isfinite(value):
            rounds.setdefault(int(round_text), {})[row.get("client") or ""] = value
    return rounds
