"""Arms at equal cost: equal rounds, equal gradients, equal bytes, equal seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fl_lightning.report.runs import Column, Run
from fl_lightning.report.scores import measured, smooth

AXES = {"rounds": "rounds", "gradients": "gradients evaluated", "bytes": "bytes sent", "seconds": "seconds of rounds"}


@dataclass(frozen=True)
class View:
    """Smoothed metric of each finished run where it had spent at most ``budget``: what every done run could afford."""

    axis: str
    budget: float
    values: Mapping[str, Mapping[int, float | None]]  # arm → seed → value


def spending(run: Run, axis: str) -> Column:
    """What was spent up to and with each round; NaN where that is not known."""
    if axis == "rounds":
        return run.columns["round"] + 1
    if axis == "bytes":
        return run.column("communication/total_bytes")
    total: Column = np.cumsum(run.column({"gradients": "cost/gradients", "seconds": "time/round"}[axis]))
    return total


def views(arms: Mapping[str, list[Run]], metric: str) -> list[View]:
    """A view for each axis that every done run has measured."""
    done = [run for runs in arms.values() for run in runs if run.status == "done" and len(measured(run, metric)[0])]
    found = []
    for axis in AXES:
        most = [float(np.nanmax(cost)) if np.isfinite(cost := spending(run, axis)).any() else None for run in done]
        known = [cost for cost in most if cost is not None]
        if known and len(known) == len(done):
            budget = min(known)
            values = {
                arm: {run.seed: _value_at(run, metric, axis, budget) for run in runs if run.finished}
                for arm, runs in arms.items()
            }
            found.append(View(axis, budget, values))
    return found


def _value_at(run: Run, metric: str, axis: str, budget: float) -> float | None:
    if run.status == "diverged":
        return 0.0 if run.directions.greater(metric) else None
    rounds, values = measured(run, metric)
    affordable = np.flatnonzero(spending(run, axis)[np.isin(run.columns["round"], rounds)] <= budget)
    return float(smooth(values)[affordable[-1]]) if len(affordable) else None
