"""Curves over rounds, gradients, bytes and seconds, with bands over seeds; other measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from fl_lightning.lab.report.budgets import AXES, spending
from fl_lightning.lab.report.cells import Unit, size
from fl_lightning.lab.report.charts import looks
from fl_lightning.lab.report.drawing import (
    INK,
    Drawing,
    beside,
    figure,
    legend,
    logarithmic,
    plain,
    points,
    styled,
    whole_rounds,
)
from fl_lightning.lab.report.report_tables import metric_title, unit_of, windows
from fl_lightning.lab.report.runs import Column, ReportedRun
from fl_lightning.lab.report.scores import measured, smooth
from fl_lightning.lab.report.summary import Summary

MEASUREMENTS = {
    "train/loss": "train/loss, during local training",
    "global/train_loss": "global/train_loss, of the global model",
    "global/gap": "global/gap, val/loss − train_loss",
    "global/grad_norm": "global/grad_norm, ‖∇f(w)‖",
    "val/loss": "val/loss",
    "divergence/participants": "divergence/participants",
    "divergence/all": "divergence/all, FedInit's Δ",
    "divergence/update": "divergence/update, ‖w′ − w‖²",
    "consensus/total": "consensus/total",
    "drift/norm": "drift/norm",
    "hessian/top_eigenvalue": "hessian/top_eigenvalue",
    "hessian/trace": "hessian/trace",
}


@styled
def curves(summary: Summary) -> list[Drawing]:
    """Draw the smoothed metric against each kind of cost, if it was measured.

    Each of several sweeps has its own panel, one below the other.
    """
    drawings = []
    for axis, title in AXES.items():
        if axis == "seconds" and not summary.timed:
            continue
        parts = {}
        longest = 0
        for name, part in summary.by_sweep.items():
            having = [run for run in part.found.runs if _has(run, part.metric, axis)]
            rounds = max((len(measured(run, part.metric)[0]) for run in having), default=0)
            longest = max(longest, rounds)
            # A single round gives no curve.
            if rounds > 1:
                parts[name] = part
        if not longest:
            continue
        parts = parts or {"": summary}
        several = len(parts) > 1
        drawn = figure(9.2, 2.6 * len(parts) if several else 4.2)
        for place, (name, part) in enumerate(parts.items(), start=1):
            axes = drawn.add_subplot(len(parts), 1, place)
            handles = _panel(axes, part, axis)
            if several:
                axes.set_title(name, fontsize=points(9.5))
                beside(axes, handles)
            else:
                # Targets are lines without a name; the caption explains them.
                legend(drawn, handles)
        axes.set_xlabel(title)
        caption = "The same curves over the mean cost of the runs."
        if axis == "rounds":
            caption = _caption(summary)
        drawings.append(
            Drawing(f"curves-{axis}", title.capitalize(), caption, drawn, group="curves")
        )
    return drawings


def _panel(axes: Axes, summary: Summary, axis: str) -> dict[str, Any]:
    """Draw the arms' curves over their cost, and return each arm's line for the legend."""
    shown = unit_of(summary)
    handles: dict[str, Any] = {}
    for arm, look in looks(summary):
        having = [run for run in arm.runs if _has(run, summary.metric, axis)]
        handles |= _arm(axes, having, summary.metric, axis, look, shown)
    axes.set_ylabel(metric_title(summary))
    dots = (0, (1, 3))
    for target in summary.targets:
        height = float(target) * shown.factor
        axes.axhline(height, color=INK, linewidth=0.9, linestyle=dots)
    if axis == "rounds":
        whole_rounds(axes)
    if axis == "bytes":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x) if x > 0 else "0"))
    plain(axes)
    return handles


def _caption(summary: Summary) -> str:
    width = windows(summary)
    curve = "is not smoothed"
    if width != "1":
        curve = f"is smoothed by a Hanning window of {width} values"
    parts = [
        f"Each run's curve {curve}. A line is the mean over the runs of an arm that are done, and "
        "its band is ± one sample standard deviation."
    ]
    statuses = {run.status for run in summary.found.runs}
    if statuses & {"running", "stopped", "failed"}:
        parts.append("Each thin line is one run that is not finished.")
    if "diverged" in statuses:
        parts.append("A thin line that ends in × is a run that diverged.")
    if summary.targets:
        parts.append("Dotted lines are the targets.")
    return " ".join(parts)


def _has(run: ReportedRun, metric: str, axis: str) -> bool:
    return bool(len(measured(run, metric)[0])) and bool(np.isfinite(spending(run, axis)).any())


def _arm(
    axes: Axes,
    runs: list[ReportedRun],
    metric: str,
    axis: str,
    look: Mapping[str, Any],
    shown: Unit,
) -> dict[str, Any]:
    """Draw an arm and return its line for the legend, by its name there."""
    handles = {}
    if done := [run for run in runs if run.status == "done"]:

        def smoothed(run: ReportedRun) -> Column:
            return smooth(measured(run, metric)[1])

        chosen, rounds, mean, sd = _over_seeds(done, metric, smoothed)
        x = np.mean([_at(run, rounds, spending(run, axis)) for run in chosen], axis=0)
        every = marked(len(x))
        look = _seen(look, len(x))
        (handles[done[0].arm],) = axes.plot(x, mean * shown.factor, markevery=every, **look)
        if len(done) > 1:
            low = (mean - sd) * shown.factor
            high = (mean + sd) * shown.factor
            axes.fill_between(x, low, high, color=look["color"], alpha=0.16, linewidth=0)
    for run in runs:
        # The mean covers the finished runs; each other run has its own line.
        if run.status == "done":
            continue
        rounds, values = measured(run, metric)
        x = _at(run, rounds, spending(run, axis))
        y = smooth(values) * shown.factor
        thin = {**look, "linewidth": 0.9, "alpha": 0.9}
        (line,) = axes.plot(x, y, markevery=marked(len(x)), **thin)
        if run.status == "diverged":
            cross: dict[str, Any] = {"marker": "x", "markersize": 7, "markeredgewidth": 1.6}
            axes.plot(x[-1:], y[-1:], color=look["color"], **cross)
        if not handles:
            handles[f"{run.arm} ({run.status})"] = line
    return handles


def _seen(look: Mapping[str, Any], points: int) -> dict[str, Any]:
    """Return the looks of a curve of so many points: one point makes no line, and needs a
    marker.
    """
    return {**look, "marker": look.get("marker") or "o"} if points == 1 else dict(look)


def marked(points: int) -> list[int]:
    """Return which points of a curve have its marker: at most nine, including the first and the
    last.
    """
    places = np.linspace(0, max(points - 1, 0), 9)
    return sorted({round(place) for place in places.tolist()})


def _at(run: ReportedRun, rounds: Column, column: Column) -> Column:
    """Return the values of a run's column in these rounds."""
    return column[np.isin(run.columns["round"], rounds)]


def _over_seeds(
    runs: list[ReportedRun], metric: str, values_of: Callable[[ReportedRun], Column]
) -> tuple[list[ReportedRun], Column, Column, Column]:
    """Return (runs, rounds, mean, deviation) in the rounds in which all ``runs`` have ``metric``.

    Runs that were measured in different rounds have no mean; then the first run is drawn.
    ``values_of`` returns a run's values in the rounds in which it was measured.
    """
    rounds = [measured(run, metric)[0] for run in runs]
    common = np.array(sorted(set.intersection(*map(set, rounds))))
    if not len(common):
        runs = runs[:1]
        common = rounds[0]
    places = [np.isin(own, common) for own in rounds[: len(runs)]]
    values = [values_of(run)[place] for run, place in zip(runs, places, strict=True)]
    sd = np.std(values, axis=0, ddof=1) if len(runs) > 1 else np.zeros(len(common))
    return runs, common, np.mean(values, axis=0), np.asarray(sd)


@styled
def measurements(summary: Summary) -> list[Drawing]:
    """Draw small panels of the runs' other metrics, round by round, without smoothing.

    Each of several sweeps has its own drawing.
    """
    parts = summary.by_sweep
    drawings = []
    for name, part in parts.items():
        logged = [metric for metric in MEASUREMENTS if _is_drawn(part, metric)]
        if not logged:
            continue
        drawn = _measurements(part, logged)
        caption = "Means over seeds, not smoothed. Bands are ± one sample standard deviation. "
        caption += "The vertical axis is logarithmic if all values are positive."
        title = "Other measurements"
        if len(parts) == 1:
            drawings.append(Drawing("measurements", title, caption, drawn))
        else:
            key = f"measurements-{len(drawings) + 1}"
            drawings.append(Drawing(key, f"{title}: {name}", caption, drawn, group="measurements"))
    return drawings


def _is_drawn(summary: Summary, metric: str) -> bool:
    drawn = any(len(measured(run, metric)[0]) for run in summary.found.runs)
    return metric != summary.metric and drawn


def _measurements(summary: Summary, logged: list[str]) -> Figure:
    # Four panels make a square; three in a row fit the page.
    columns = 2 if len(logged) in (2, 4) else min(3, len(logged))
    rows = -(-len(logged) // columns)
    drawn = figure(9.6 if columns > 1 else 6.0, 2.4 * rows + 0.5, wide=columns > 1)
    handles: dict[str, Any] = {}
    for place, name in enumerate(logged, start=1):
        axes = drawn.add_subplot(rows, columns, place)
        handles |= _measurement(axes, summary, name)
        title = MEASUREMENTS[name].replace("val/loss", summary.called("val/loss"))
        axes.set_title(title, fontsize=points(9.5))
        whole_rounds(axes)
        if place > len(logged) - columns:
            axes.set_xlabel("rounds")
        plain(axes)
    legend(drawn, handles)
    return drawn


def _measurement(axes: Axes, summary: Summary, name: str) -> dict[str, Any]:
    """Draw one panel, and return each arm's line for the legend."""
    handles = {}
    positive = True
    for arm, look in looks(summary, linewidth=1.3):
        runs = [run for run in arm.runs if len(measured(run, name)[0])]
        runs = [run for run in runs if run.status == "done"] or runs
        if runs:
            _, rounds, mean, sd = _over_seeds(runs, name, lambda run: measured(run, name)[1])
            positive = positive and bool((mean > 0).all())
            look = _seen(look, len(mean))
            (handles[arm.name],) = axes.plot(rounds + 1, mean, markevery=marked(len(mean)), **look)
            # A logarithmic axis cannot show a band below 0.
            low = np.maximum(mean - sd, mean / 10)
            band: dict[str, Any] = {"alpha": 0.13, "linewidth": 0, "color": look["color"]}
            axes.fill_between(rounds + 1, low, mean + sd, **band)
    if positive:
        logarithmic(axes)
    return handles
