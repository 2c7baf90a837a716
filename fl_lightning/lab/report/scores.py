"""Five scores of a curve, when a target was reached, arms at equal cost, and layers over time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from fl_lightning.lab.report.runs import Column, Found, ReportedRun
from fl_lightning.metrics import without_prefix

SCORE_TITLES = {
    "tail": "mean over last third of gradients",
    "last10": "mean of last 10",
    "smoothed": "smoothed, best of last 50",
    "last": "last value",
    "max": "highest value",
}
SCORES = tuple(SCORE_TITLES)

FORMS = {
    "consensus/": "raw, as FedALS defines it",
    "consensus_per_coordinate/": "per coordinate",
    "consensus_relative/": "relative to ‖mean x‖²",
}
# What PerClientEvaluation logs of a metric, such as acc.
OF_CLIENTS = {
    "mean": "clients/{}",
    "std": "clients/{}_std",
    "worst10": "clients/{}_worst10",
    "worst_domain": "domains/{}_worst",
}


def window(length: int) -> int:
    """Return the width of the smoothing of ``length`` values: odd, at most 101 and a fifth of them.

    >>> [window(n) for n in (3, 15, 20, 25, 10_000)]
    [0, 3, 3, 5, 101]
    """
    width = min(101, length // 5)
    return width - 1 if width and width % 2 == 0 else width


def smooth(values: Column) -> Column:
    """Smooth ``values`` by a Hann window, renormalised at the ends.

    FedInit smooths in the same way (NeurIPS version, B.2.1).
    """
    width = window(len(values))
    if width < 3:
        return values
    # np.hanning is 0 at both ends: without two extra points, three values would count as one.
    weights = np.hanning(width + 2)[1:-1]
    mass = np.convolve(np.ones_like(values), weights, "same")
    smoothed: Column = np.convolve(values, weights, "same") / mass
    return smoothed


def measured(run: ReportedRun, metric: str) -> tuple[Column, Column]:
    """Return (rounds, values) of ``metric``, for the rounds in which it is finite."""
    values = run.column(metric)
    finite = np.isfinite(values)
    return run.columns["round"][finite], values[finite]


def summed(run: ReportedRun, name: str) -> Column:
    """Return the cost ``name`` up to and including each round; a missing cell costs nothing."""
    total: Column = np.cumsum(np.nan_to_num(run.column(name), nan=0.0, posinf=0.0, neginf=0.0))
    return total


def tail(run: ReportedRun, metric: str) -> float | None:
    """Return the mean of the evaluations in the last third of the run's gradients, finite or not.

    If that part has no evaluation, it is the last one; None if nothing was measured. Without the
    column of gradients it is the last third of rounds.
    """
    spent = run.columns["round"] + 1
    if "cost/gradients" in run.columns:
        spent = summed(run, "cost/gradients")
    return tail_of(run, metric, spent, float(spent[-1]) if len(spent) else 0.0)


def tail_of(run: ReportedRun, metric: str, spent: Column, budget: float) -> float | None:
    """Return the mean of the values in the last third of ``budget``; infinite if one of them is
    infinite.

    If nothing was measured there, it is the last value within ``budget``.
    """
    evaluated = ~np.isnan(run.column(metric))
    spent = spent[evaluated]
    values = run.column(metric)[evaluated]
    afforded = spent <= budget
    within = values[afforded & (3 * spent > 2 * budget)]
    if len(within):
        # This mean is rounded once, so the mean of equal values is exactly that value.
        return fmean(within)
    return float(values[afforded][-1]) if afforded.any() else None


def scores(values: Column, less: bool = False) -> dict[str, float | None]:
    """Return every score that needs only a run's finite ``values``; None without values.

    ``last10`` is the mean of the last ten; ``smoothed`` the maximum over the last 50 of the
    smoothed curve (FedInit, § 5.1), or their minimum where ``less`` is better.
    """
    if not len(values):
        return dict.fromkeys(SCORES[1:])
    return {
        "last10": fmean(values[-10:]),
        "smoothed": float((np.min if less else np.max)(smooth(values)[-50:])),
        "last": float(values[-1]),
        "max": float(np.max(values)),
    }


def score_of(run: ReportedRun, metric: str, score: str, mode: str | None = None) -> float | None:
    """Return the score that counts; for a run that has lost, :func:`lost` gives it.

    ``mode``: the better direction, if a claim gives it.
    """
    if has_lost(run, metric, score):
        return lost(run, metric, mode)
    if score == "tail":
        return tail(run, metric)
    # Use the maximum if the direction is not known; comparing arms will ask for it.
    less = run.directions.known(metric, mode) is False
    return scores(measured(run, metric)[1], less)[score]


def has_lost(run: ReportedRun, metric: str, score: str = "last") -> bool:
    """Return whether the run diverged, or its last value, or one that ``score`` averages, is not
    finite.

    If only finite values counted, a run would be scored by the time before it went wrong.
    """
    if run.status == "diverged":
        return True
    if score == "tail":
        mean = tail(run, metric)
        return mean is not None and math.isinf(mean)
    values = run.column(metric)
    evaluated = values[~np.isnan(values)]
    return bool(np.isinf(evaluated[-10 if score == "last10" else -1 :]).any())


def lost(run: ReportedRun, metric: str, mode: str | None = None) -> float | None:
    """Return the score of a run that has lost: 0 if nothing can be worse, else None.

    Nothing can be worse if greater is better and no run in the report measured less than 0.
    """
    greater = run.directions.greater(metric, mode)
    return 0.0 if greater and metric not in run.directions.below_zero else None


def reached(
    run: ReportedRun, metric: str, target: float, mode: str | None = None
) -> dict[str, Any]:
    """Return rounds, bytes, gradients and seconds until the smoothed curve first reached
    ``target``.

    The round that reached it counts; None if none did, or the cost is not known.
    """
    never = dict.fromkeys(("rounds", "bytes", "gradients", "seconds"))
    rounds, values = measured(run, metric)
    curve = smooth(values)
    # A run that has lost may have passed the target on its way, but that does not count.
    if run.status != "done" or has_lost(run, metric) or not len(curve):
        return never
    greater = run.directions.greater(metric, mode)
    # The curve may fall back later: the first time counts.
    hits = np.flatnonzero(curve >= target if greater else curve <= target)
    if not len(hits):
        return never
    last = rounds[hits[0]]
    until = run.columns["round"] <= last
    sent = run.column("communication/total_bytes")[run.columns["round"] == last]
    gradients = None
    if "cost/gradients" in run.columns:
        gradients = float(summed(run, "cost/gradients")[until][-1])
    seconds = float(np.sum(run.column("time/round")[until]))
    return {
        "rounds": int(last) + 1,
        "bytes": int(sent[0]) if math.isfinite(sent[0]) else None,
        "gradients": gradients,
        # NaN if the time of one round is missing: then the sum is not known.
        "seconds": seconds if math.isfinite(seconds) else None,
    }


# ----------------------------------------------------------------------------- equal cost

AXES = {
    "rounds": "rounds",
    "gradients": "gradient evaluations",
    "bytes": "bytes sent",
    "virtual": "seconds of simulated devices",
    "seconds": "wall-clock seconds",
}
_COLUMNS = {
    "rounds": "round",
    "gradients": "cost/gradients",
    "bytes": "communication/total_bytes",
    "virtual": "time/virtual",
    # Other work on the machine lengthens processor seconds less than those of the clock.
    "seconds": "time/cpu",
}
# The values of these columns are running totals.
_RUNNING = ("bytes", "virtual")


@dataclass(frozen=True)
class BudgetView:
    """``tail`` of each finished run, up to the ``budget`` that the cheapest done run spent.

    ``values``: arm → seed → value. ``alike``: whether all done runs spent the same on this axis.
    """

    axis: str
    budget: float
    values: Mapping[str, Mapping[int, float | None]]
    alike: bool = False


def spending(run: ReportedRun, axis: str) -> Column:
    """Return the cost up to and including each round; NaN if it is not known.

    Seconds are those of the clock. After a round without seconds or gradients their sum is unknown.
    """
    spent = run.column("time/round" if axis == "seconds" else _COLUMNS[axis])
    if axis == "rounds":
        return spent + 1
    return spent if axis in _RUNNING else np.cumsum(spent)


def views(
    arms: Mapping[str, list[ReportedRun]], metric: str, timed: bool = True
) -> list[BudgetView]:
    """Return a view for each axis that every done run has measured.

    Seconds are processor seconds, and only of runs on one machine. ``timed``: whether to include
    them.
    """
    done: list[ReportedRun] = []
    for runs in arms.values():
        done += [run for run in runs if run.status == "done" and len(measured(run, metric)[0])]
    made = []
    for axis, column in _COLUMNS.items():
        # If one run lacks the column of a budget, there is nothing to compare.
        if not done or not all(np.isfinite(run.column(column)).any() for run in done):
            continue
        if axis == "seconds" and not (timed and one_machine(done)):
            continue
        totals = [float(_spent(run, axis)[-1]) for run in done]
        budget = min(totals)
        values: dict[str, dict[int, float | None]] = {}
        for arm, runs in arms.items():
            values[arm] = {}
            for run in filter(lambda run: run.finished, runs):
                value = tail_of(run, metric, _spent(run, axis), budget)
                # A run's value so far may be infinite, even if it was finite again later.
                if has_lost(run, metric) or (value is not None and math.isinf(value)):
                    value = lost(run, metric)
                values[arm][run.seed] = value
        alike = budget == max(totals)
        made.append(BudgetView(axis, budget, values, alike))
    return made


def one_machine(runs: Sequence[ReportedRun]) -> bool:
    """Return whether all runs were made on one machine, so that seconds can be compared."""
    return len({(run.machine.get("processor"), run.machine.get("gpu")) for run in runs}) == 1


def _spent(run: ReportedRun, axis: str) -> Column:
    """As :func:`spending`, but a missing cell costs nothing."""
    if axis == "rounds":
        return run.columns["round"] + 1
    if axis in _RUNNING:
        # This column is a running total, so an empty cell takes the value before it.
        known = np.nan_to_num(run.column(_COLUMNS[axis]), nan=0.0, posinf=0.0, neginf=0.0)
        running: Column = np.maximum.accumulate(known)
        return running
    return summed(run, _COLUMNS[axis])


# ----------------------------------------------------------------------- what else is logged


def of_clients(run: ReportedRun, metric: str) -> dict[str, float]:
    """Return the last values that a run logged of its clients' own metric, by :data:`OF_CLIENTS`;
    empty if it measured no clients.
    """
    name = without_prefix(metric)
    if metric.startswith("clients/"):
        name = re.sub(r"_(weighted|std|worst10)$", "", metric.removeprefix("clients/"))
    found = {}
    for measure, column in OF_CLIENTS.items():
        values = run.column(column.format(name))
        values = values[np.isfinite(values)]
        if len(values):
            found[measure] = float(values[-1])
    return found


def forms(found: Found) -> dict[str, list[str]]:
    """Return prefix of a form → the layers that were logged in it, beginning at the input.

    Forms that no run logged are left out.
    """
    # The total is a separate metric, and not a layer.
    names = [name for name in found.metrics if name != "consensus/total"]
    logged = {}
    for form in FORMS:
        layers = [name.removeprefix(form) for name in names if name.startswith(form)]
        if layers:
            logged[form] = layers
    return logged


def over_time(runs: Sequence[ReportedRun], name: str) -> float | None:
    """Return the mean of ``name`` over the rounds that have it, and then over runs.

    The mean is over the done runs, or over all runs if none is done.
    """
    means = []
    for run in [run for run in runs if run.status == "done"] or runs:
        column = run.column(name)
        measured = column[np.isfinite(column)]
        if len(measured):
            means.append(float(measured.mean()))
    return fmean(means) if means else None
