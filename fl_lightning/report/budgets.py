"""Arms at equal cost: equal rounds, equal gradients, equal bytes, equal seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

import numpy as np

from fl_lightning.report.runs import Column, Run
from fl_lightning.report.scores import lost, measured, summed, tail_of

AXES = {
    "rounds": "rounds",
    "gradients": "gradients evaluated",
    "bytes": "bytes sent",
    "seconds": "seconds of rounds",
}
CPU = "time/cpu"
CLOCK = "time/round"
BYTES = "communication/total_bytes"
GRADIENTS = "cost/gradients"
_COLUMNS = {"rounds": "round", "gradients": GRADIENTS, "bytes": BYTES}


@dataclass(frozen=True)
class View:
    """``tail`` of each finished run, had it spent only ``budget``, what the cheapest done run did.

    ``values``: arm → seed → value. ``what`` is the column of seconds that was summed.
    """

    axis: str
    budget: float
    values: Mapping[str, Mapping[int, float | None]]
    what: str = ""


def spending(run: Run, axis: str, seconds: str = CLOCK) -> Column:
    """What was spent up to and with each round; NaN where that is not known.

    After a round without seconds or gradients their sum is not known any more.
    """
    if axis == "rounds":
        return run.columns["round"] + 1
    if axis == "bytes":
        return run.column(BYTES)
    total: Column = np.cumsum(run.column(_COLUMNS.get(axis, seconds)))
    return total


def views(arms: Mapping[str, list[Run]], metric: str) -> list[View]:
    """A view for each axis that every done run has measured.

    There is one of the clock's seconds where no two runs overlapped.
    """
    done: list[Run] = []
    for runs in arms.values():
        done += [run for run in runs if run.status == "done" and len(measured(run, metric)[0])]
    seconds = timed_by(done)
    made = []
    for axis in AXES:
        if axis == "seconds" and seconds is None:
            continue
        totals = [_all_spent(run, axis, seconds) for run in done]
        known = [total for total in totals if total is not None]
        # A budget that one of the runs does not know would compare it by nothing.
        if known and len(known) == len(done):
            budget = min(known)
            values: dict[str, dict[int, float | None]] = {arm: {} for arm in arms}
            for arm, runs in arms.items():
                for run in runs:
                    if run.finished:
                        values[arm][run.seed] = _value_at(run, metric, axis, budget, seconds)
            made.append(View(axis, budget, values, seconds or ""))
    return made


def timed_by(runs: Sequence[Run]) -> str | None:
    """The column of seconds that can be compared.

    It is the processor's, else the clock's of runs that were alone on the machine.
    """
    # A processor's seconds do not depend on what else ran; runs on a GPU have none.
    if runs and all(np.isfinite(run.column(CPU)).any() for run in runs):
        return CPU
    # The clock's seconds of runs side by side would say how busy the machine was.
    spans = sorted(span for run in runs if (span := _span(run)) is not None)
    alone = len(spans) == len(runs) and all(one[1] <= other[0] for one, other in pairwise(spans))
    return CLOCK if alone and runs else None


def _span(run: Run) -> tuple[datetime, datetime] | None:
    """When a run started and ended."""
    try:
        began = _utc(run.record["started"])
        ended = _utc(run.record["ended"])
        return (began, ended) if began <= ended else None
    except (KeyError, ValueError, TypeError):
        return None


def _utc(text: Any) -> datetime:
    """A time as run.json has it: in UTC, where it names no zone."""
    time = datetime.fromisoformat(str(text))
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


def _spent(run: Run, axis: str, seconds: str | None) -> Column:
    """As :func:`spending`, where a missing cell costs nothing."""
    if axis == "rounds":
        return run.columns["round"] + 1
    if axis == "bytes":
        # This column is a running total, so where a cell is missing the one before it holds.
        known = np.nan_to_num(run.column(BYTES), nan=0.0, posinf=0.0, neginf=0.0)
        running: Column = np.maximum.accumulate(known)
        return running
    return summed(run, _COLUMNS.get(axis, str(seconds)))


def _all_spent(run: Run, axis: str, seconds: str | None) -> float | None:
    if not np.isfinite(run.column(_COLUMNS.get(axis, str(seconds)))).any():
        return None
    return float(_spent(run, axis, seconds)[-1])


def _value_at(run: Run, metric: str, axis: str, budget: float, seconds: str | None) -> float | None:
    if run.status == "diverged":
        return lost(run, metric)
    return tail_of(run, metric, _spent(run, axis, seconds), budget)
