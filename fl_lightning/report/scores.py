"""What a run's curve comes to: five scores, and when it reached a target."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import numpy as np

from fl_lightning.report.runs import Column, Run

SCORES = ("tail", "last10", "smoothed", "last", "max")


def window(length: int) -> int:
    """Width of the smoothing of ``length`` values: odd, at most 101 and a fifth of them.

    >>> [window(n) for n in (3, 15, 20, 25, 10_000)]
    [0, 3, 3, 5, 101]
    """
    width = min(101, length // 5)
    return width - 1 if width and width % 2 == 0 else width


def smooth(values: Column) -> Column:
    """``values`` under a Hanning window, renormalised at the ends (FedInit, NeurIPS version, B.2.1)."""
    width = window(len(values))
    if width < 3:
        return values
    weights = np.hanning(width + 2)[1:-1]  # its ends are 0: three values would be one
    smoothed: Column = np.convolve(values, weights, "same") / np.convolve(
        np.ones_like(values), weights, "same"
    )
    return smoothed


def measured(run: Run, metric: str) -> tuple[Column, Column]:
    """(rounds, values) of ``metric`` where it is finite."""
    values = run.column(metric)
    finite = np.isfinite(values)
    return run.columns["round"][finite], values[finite]


def summed(run: Run, name: str) -> Column:
    """The cost ``name`` up to and with each round; a missing cell costs nothing."""
    total: Column = np.cumsum(np.nan_to_num(run.column(name), nan=0.0, posinf=0.0, neginf=0.0))
    return total


def tail(run: Run, metric: str) -> float | None:
    """The mean of what was measured in the last third of the run's gradients; None where nothing was measured.

    Evaluations of which none lies there: the last one. Without the column of gradients it is the last third of rounds.
    """
    spent = (
        summed(run, "cost/gradients")
        if "cost/gradients" in run.columns
        else run.columns["round"] + 1
    )
    return tail_of(run, metric, spent, float(spent[-1]) if len(spent) else 0.0)


def tail_of(run: Run, metric: str, spent: Column, budget: float) -> float | None:
    """The mean where 2/3 of ``budget`` < ``spent`` ≤ ``budget``; else the last value that ``budget`` affords."""
    finite = np.isfinite(run.column(metric))
    spent, values = spent[finite], run.column(metric)[finite]
    afforded = spent <= budget
    within = values[afforded & (3 * spent > 2 * budget)]
    if len(within):
        return fmean(within)  # exactly rounded: equal values give themselves
    return float(values[afforded][-1]) if afforded.any() else None


def scores(values: Column) -> dict[str, float | None]:
    """Every score of a run's finite ``values`` that asks for nothing else; None where there are none.

    ``last``; ``last10``, mean of the last ten; ``max``; ``smoothed``, the maximum over the last 50 of the smoothed
    curve (FedInit, § 5.1).
    """
    if not len(values):
        return dict.fromkeys(SCORES[1:])
    return {
        "last10": fmean(values[-10:]),
        "smoothed": float(np.max(smooth(values)[-50:])),
        "last": float(values[-1]),
        "max": float(np.max(values)),
    }


def score_of(run: Run, metric: str, score: str, mode: str | None = None) -> float | None:
    """The score that counts: a run that diverged has lost, 0 where greater is better, else none at all.

    ``mode``: which way is better, where a claim says it.
    """
    if run.status == "diverged":
        return 0.0 if run.directions.greater(metric, mode) else None
    return tail(run, metric) if score == "tail" else scores(measured(run, metric)[1])[score]


def reached(run: Run, metric: str, target: float, mode: str | None = None) -> dict[str, Any]:
    """What was spent when the smoothed curve first reached ``target``, that round included; else None.

    ``rounds``, ``bytes``, ``gradients``, ``seconds``.
    """
    never = dict.fromkeys(("rounds", "bytes", "gradients", "seconds"))
    rounds, values = measured(run, metric)
    curve = smooth(values)
    if run.status != "done" or not len(curve):
        return never
    hits = np.flatnonzero(
        curve >= target if run.directions.greater(metric, mode) else curve <= target
    )
    if not len(hits):
        return never
    last = rounds[hits[0]]
    until = run.columns["round"] <= last
    sent = run.column("communication/total_bytes")[run.columns["round"] == last]
    counted = "cost/gradients" in run.columns
    gradients = float(summed(run, "cost/gradients")[until][-1]) if counted else None
    seconds = float(np.sum(run.column("time/round")[until]))
    return {
        "rounds": int(last) + 1,
        "bytes": int(sent[0]) if math.isfinite(sent[0]) else None,
        "gradients": gradients,
        # a round without its time: not known
        "seconds": seconds if math.isfinite(seconds) else None,
    }
