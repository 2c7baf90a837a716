"""Arms at equal cost: equal rounds, equal gradients, equal bytes, equal seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise

import numpy as np

from fl_lightning.report.runs import Column, Run
from fl_lightning.report.scores import measured, summed, tail_of

AXES = {
    "rounds": "rounds",
    "gradients": "gradients evaluated",
    "bytes": "bytes sent",
    "seconds": "seconds of rounds",
}
CPU, CLOCK = "time/cpu", "time/round"


@dataclass(frozen=True)
class View:
    """``tail`` of each finished run with ``budget``, what the cheapest done run spent, in place of its own total."""

    axis: str
    budget: float
    values: Mapping[str, Mapping[int, float | None]]  # arm → seed → value
    what: str = ""  # the column that was summed


def spending(run: Run, axis: str, seconds: str = CLOCK) -> Column:
    """What was spent up to and with each round; NaN where that is not known, seconds and gradients from there on."""
    if axis == "rounds":
        return run.columns["round"] + 1
    if axis == "bytes":
        return run.column("communication/total_bytes")
    total: Column = np.cumsum(run.column({"gradients": "cost/gradients", "seconds": seconds}[axis]))
    return total


def views(arms: Mapping[str, list[Run]], metric: str) -> list[View]:
    """A view for each axis that every done run has measured; of the clock's seconds where no two runs overlapped."""
    done = [
        run
        for runs in arms.values()
        for run in runs
        if run.status == "done" and len(measured(run, metric)[0])
    ]
    seconds = timed_by(done)
    found = []
    for axis in AXES:
        if axis == "seconds" and seconds is None:
            continue
        known = [spent for run in done if (spent := _all_spent(run, axis, seconds)) is not None]
        if known and len(known) == len(done):
            budget = min(known)
            values = {
                arm: {
                    run.seed: _value_at(run, metric, axis, budget, seconds)
                    for run in runs
                    if run.finished
                }
                for arm, runs in arms.items()
            }
            found.append(View(axis, budget, values, seconds or ""))
    return found


def timed_by(runs: Sequence[Run]) -> str | None:
    """The column of seconds that can be compared: the processor's, else the clock's of runs that were alone."""
    if runs and all(np.isfinite(run.column(CPU)).any() for run in runs):
        return CPU
    times = sorted(span for run in runs if (span := _span(run)) is not None)
    alone = len(times) == len(runs) and all(one[1] <= other[0] for one, other in pairwise(times))
    return CLOCK if alone and runs else None


def _span(run: Run) -> tuple[datetime, datetime] | None:
    """When a run started and ended: in UTC, where no zone stands there."""
    try:
        told = [datetime.fromisoformat(str(run.record[key])) for key in ("started", "ended")]
        began, ended = (time if time.tzinfo else time.replace(tzinfo=timezone.utc) for time in told)
        return (began, ended) if began <= ended else None
    except (KeyError, ValueError, TypeError):
        return None


def _spent(run: Run, axis: str, seconds: str | None) -> Column:
    """As :func:`spending`, where a missing cell costs nothing."""
    if axis == "rounds":
        return run.columns["round"] + 1
    if axis == "bytes":
        known = np.nan_to_num(
            run.column("communication/total_bytes"), nan=0.0, posinf=0.0, neginf=0.0
        )
        running: Column = np.maximum.accumulate(known)
        return running
    return summed(run, "cost/gradients" if axis == "gradients" else str(seconds))


def _all_spent(run: Run, axis: str, seconds: str | None) -> float | None:
    names = {"rounds": "round", "gradients": "cost/gradients", "bytes": "communication/total_bytes"}
    if not np.isfinite(run.column(names.get(axis, str(seconds)))).any():
        return None
    spent = _spent(run, axis, seconds)
    return float(spent[-1]) if len(spent) else None


def _value_at(run: Run, metric: str, axis: str, budget: float, seconds: str | None) -> float | None:
    if run.status == "diverged":
        return 0.0 if run.directions.greater(metric) else None
    return tail_of(run, metric, _spent(run, axis, seconds), budget)
