"""Arms at equal cost: equal rounds, gradients, bytes, or seconds, of devices or of processors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise

import numpy as np

from fl_lightning.lab.report.runs import Column, ReportedRun
from fl_lightning.lab.report.scores import has_lost, lost, measured, summed, tail_of

AXES = {
    "rounds": "rounds",
    "gradients": "gradient evaluations",
    "bytes": "bytes sent",
    "virtual": "seconds of simulated devices",
    "seconds": "wall-clock seconds",
}
CPU = "time/cpu"
CLOCK = "time/round"
_COLUMNS = {
    "rounds": "round",
    "gradients": "cost/gradients",
    "bytes": "communication/total_bytes",
    "virtual": "time/virtual",
}

# The values of these columns are running totals.
_RUNNING = ("bytes", "virtual")


@dataclass(frozen=True)
class BudgetView:
    """``tail`` of each finished run, up to the ``budget`` that the cheapest done run spent.

    ``values``: arm → seed → value. ``what`` is the name of the column of seconds that was summed.
    ``alike``: whether all done runs spent the same on this axis.
    """

    axis: str
    budget: float
    values: Mapping[str, Mapping[int, float | None]]
    what: str = ""
    alike: bool = False


def spending(run: ReportedRun, axis: str, seconds: str = CLOCK) -> Column:
    """Return the cost up to and including each round; NaN if it is not known.

    After a round without seconds or gradients their sum is unknown.
    """
    spent = run.column(_COLUMNS.get(axis, seconds))
    if axis == "rounds":
        return spent + 1
    return spent if axis in _RUNNING else np.cumsum(spent)


def views(
    arms: Mapping[str, list[ReportedRun]], metric: str, timed: bool = True
) -> list[BudgetView]:
    """Return a view for each axis that every done run has measured.

    The clock's seconds have a view if no two runs overlapped. ``timed``: whether to include
    seconds.
    """
    done: list[ReportedRun] = []
    for runs in arms.values():
        done += [run for run in runs if run.status == "done" and len(measured(run, metric)[0])]
    seconds = timed_by(done) if timed else None
    made = []
    for axis in AXES:
        column = _COLUMNS.get(axis, seconds)
        # If one run lacks the column of a budget, there is nothing to compare.
        if column is None or not all(np.isfinite(run.column(column)).any() for run in done):
            continue
        totals = [float(_spent(run, axis, column)[-1]) for run in done]
        if not totals:
            continue
        budget = min(totals)
        values: dict[str, dict[int, float | None]] = {}
        for arm, runs in arms.items():
            values[arm] = {}
            for run in filter(lambda run: run.finished, runs):
                value = tail_of(run, metric, _spent(run, axis, column), budget)
                # A run's value so far may be infinite, even if it was finite again later.
                if has_lost(run, metric) or (value is not None and math.isinf(value)):
                    value = lost(run, metric)
                values[arm][run.seed] = value
        alike = budget == max(totals)
        made.append(BudgetView(axis, budget, values, seconds or "", alike))
    return made


def timed_by(runs: Sequence[ReportedRun]) -> str | None:
    """Return the column of seconds that can be compared.

    Comparable seconds are processor seconds, or wall-clock seconds of runs that had the machine to
    themselves; runs on several machines have none.
    """
    # Seconds of different or unknown machines cannot be compared.
    if len({(run.machine.get("processor"), run.machine.get("gpu")) for run in runs}) > 1:
        return None
    # The processor's seconds depend less on other work than the clock's; runs on a GPU have none.
    if runs and all(np.isfinite(run.column(CPU)).any() for run in runs):
        return CPU
    # If runs overlapped, the clock's seconds would mostly show how busy the machine was.
    spans = sorted(span for run in runs if (span := _span(run)) is not None)
    alone = len(spans) == len(runs) and all(one[1] <= other[0] for one, other in pairwise(spans))
    return CLOCK if alone and runs else None


def _span(run: ReportedRun) -> tuple[datetime, datetime] | None:
    """Return when a run started and ended, from run.json; in UTC if it names no time zone."""
    times = []
    for key in ("started", "ended"):
        try:
            time = datetime.fromisoformat(str(run.record.get(key)))
        except ValueError:
            return None
        times.append(time if time.tzinfo else time.replace(tzinfo=timezone.utc))
    began, ended = times
    return (began, ended) if began <= ended else None


def _spent(run: ReportedRun, axis: str, column: str) -> Column:
    """As :func:`spending`, but a missing cell costs nothing."""
    if axis == "rounds":
        return run.columns["round"] + 1
    if axis in _RUNNING:
        # This column is a running total, so an empty cell takes the value before it.
        known = np.nan_to_num(run.column(column), nan=0.0, posinf=0.0, neginf=0.0)
        running: Column = np.maximum.accumulate(known)
        return running
    return summed(run, column)
