"""Curves over rounds, gradients, bytes and seconds, with bands over seeds; other measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from fl_lightning.report.budgets import AXES, spending
from fl_lightning.report.claimed import unit_of
from fl_lightning.report.drawing import (
    INK,
    Drawing,
    figure,
    legend,
    logarithmic,
    look,
    plain,
    styled,
)
from fl_lightning.report.runs import Column, Run
from fl_lightning.report.scores import measured, smooth
from fl_lightning.report.sections import metric_title, windows
from fl_lightning.report.summary import Summary
from fl_lightning.report.wording import Unit, size

MEASUREMENTS = {
    "train/loss": "train/loss, along the local paths",
    "global/train_loss": "global/train_loss, of the global model",
    "global/gap": "global/gap, val/loss − global/train_loss",
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
    """Draw the smoothed metric against each thing that can be spent, where it was measured."""
    drawings = []
    shown = unit_of(summary)
    for axis, title in AXES.items():
        if not any(_has(run, summary.metric, axis) for run in summary.found.runs):
            continue
        drawn = figure(9.2, 4.2)
        axes = drawn.add_subplot()
        handles = []
        for number, arm in enumerate(summary.arms.values()):
            handle = _arm(axes, arm.runs, summary.metric, axis, number, shown)
            if handle is not None:
                handles.append(handle)
        axes.set_xlabel(title)
        axes.set_ylabel(metric_title(summary))
        dots = (0, (1, 3))
        for target in summary.targets:
            height = float(target) * shown.factor
            axes.axhline(height, color=INK, linewidth=0.9, linestyle=dots)
        if axis == "bytes":
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x) if x > 0 else "0"))
        plain(axes)
        # Targets are lines without a name: the caption tells of them.
        legend(drawn, handles, [str(handle.get_label()) for handle in handles])
        caption = "The same curves against the mean of what was spent."
        if axis == "rounds":
            caption = _caption(summary)
        name = title.capitalize()
        drawings.append(Drawing(f"curves-{axis}", name, caption, drawn, group="curves"))
    return drawings


def _caption(summary: Summary) -> str:
    width = windows(summary)
    curve = "curve, unsmoothed,"
    if width != "1":
        curve = f"curve, smoothed by a Hanning window of {width} values,"
    parts = [
        f"Line: mean of the {curve} over the runs that are done; band: ± one sample deviation."
    ]
    statuses = {run.status for run in summary.found.runs}
    if statuses & {"running", "stopped", "failed"}:
        parts.append("Thin: runs that are not finished, one line each.")
    if "diverged" in statuses:
        parts.append("A thin line that ends in ×: a run that diverged.")
    if summary.targets:
        parts.append("Dotted: the targets.")
    return " ".join(parts)


def _has(run: Run, metric: str, axis: str) -> bool:
    return bool(len(measured(run, metric)[0])) and bool(np.isfinite(spending(run, axis)).any())


def _arm(axes: Axes, runs: list[Run], metric: str, axis: str, number: int, shown: Unit) -> Any:
    """Draw an arm and give the line that stands for it in the legend."""
    style = look(number)
    colour = style["color"]
    handle = None
    having = [run for run in runs if _has(run, metric, axis)]
    done = [run for run in having if run.status == "done"]
    if done:
        x, mean, sd = _over_seeds(done, metric, axis)
        (handle,) = axes.plot(x, mean * shown.factor, label=done[0].arm, **style)
        if len(done) > 1:
            low = (mean - sd) * shown.factor
            high = (mean + sd) * shown.factor
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    for run in having:
        # A mean stands for the runs that are done; each of the others has its own line.
        if run.status == "done":
            continue
        rounds, values = measured(run, metric)
        x = spending(run, axis)[np.isin(run.columns["round"], rounds)]
        y = smooth(values) * shown.factor
        (line,) = axes.plot(x, y, linewidth=0.9, alpha=0.9, **style)
        if run.status == "diverged":
            cross: dict[str, Any] = {"marker": "x", "markersize": 7, "markeredgewidth": 1.6}
            axes.plot(x[-1:], y[-1:], color=colour, **cross)
        if handle is None:
            handle = line
            handle.set_label(f"{run.arm} ({run.status})")
    return handle


def _common(runs: list[Run], metric: str) -> tuple[list[Run], list[float]]:
    """The rounds that all ``runs`` have measured; the first run alone where they share none."""
    rounds = [set(measured(run, metric)[0]) for run in runs]
    common = sorted(set.intersection(*rounds))
    # Runs that were evaluated in other rounds have no mean.
    if not common:
        return runs[:1], sorted(rounds[0])
    return runs, common


def _spread(values: list[Column]) -> Column:
    """The sample deviation of each round, 0 where there is one run."""
    if len(values) > 1:
        return np.asarray(np.std(values, axis=0, ddof=1))
    return np.zeros(len(values[0]))


def _over_seeds(runs: list[Run], metric: str, axis: str) -> tuple[Column, Column, Column]:
    """(spent, mean, deviation) at the rounds that all ``runs`` have measured."""
    runs, common = _common(runs, metric)
    values = []
    spent = []
    for run in runs:
        rounds, column = measured(run, metric)
        values.append(smooth(column)[np.isin(rounds, common)])
        spent.append(spending(run, axis)[np.isin(run.columns["round"], common)])
    return np.mean(spent, axis=0), np.mean(values, axis=0), _spread(values)


@styled
def measurements(summary: Summary) -> list[Drawing]:
    """Draw small panels of what else the runs logged, round by round, unsmoothed."""
    logged = [name for name in MEASUREMENTS if name != summary.metric and _logged(summary, name)]
    if not logged:
        return []
    # Four panels make a square; three in a row fit the page.
    columns = 2 if len(logged) in (2, 4) else min(3, len(logged))
    rows = -(-len(logged) // columns)
    drawn = figure(9.6 if columns > 1 else 6.0, 2.4 * rows + 0.5)
    handles: dict[str, Any] = {}
    for place, name in enumerate(logged, start=1):
        axes = drawn.add_subplot(rows, columns, place)
        handles |= _measurement(axes, summary, name)
        axes.set_title(MEASUREMENTS[name], fontsize=9.5)
        if place > len(logged) - columns:
            axes.set_xlabel("rounds")
        plain(axes)
    legend(drawn, list(handles.values()), list(handles))
    caption = "Means over seeds, ± one sample deviation, unsmoothed; "
    caption += "logarithmic where all values are positive."
    return [Drawing("measurements", "What else was measured", caption, drawn)]


def _logged(summary: Summary, name: str) -> bool:
    return any(len(measured(run, name)[0]) for run in summary.found.runs)


def _measurement(axes: Axes, summary: Summary, name: str) -> dict[str, Any]:
    """Draw one panel, and give each arm's line for the legend."""
    handles = {}
    positive = True
    for number, (arm, own) in enumerate(summary.arms.items()):
        runs = [run for run in own.runs if len(measured(run, name)[0])]
        runs = [run for run in runs if run.status == "done"] or runs
        if runs:
            x, mean, sd = _raw(runs, name)
            positive = positive and bool((mean > 0).all())
            (handles[arm],) = axes.plot(x, mean, **{**look(number), "linewidth": 1.3})
            # A band below 0 has no place on a logarithmic axis.
            low = np.maximum(mean - sd, mean / 10)
            band: dict[str, Any] = {"alpha": 0.13, "linewidth": 0, "color": look(number)["color"]}
            axes.fill_between(x, low, mean + sd, **band)
    if positive:
        logarithmic(axes)
    return handles


def _raw(runs: list[Run], name: str) -> tuple[Column, Column, Column]:
    """(rounds, mean, deviation) at the rounds that all ``runs`` have measured."""
    runs, common = _common(runs, name)
    values = []
    for run in runs:
        rounds, column = measured(run, name)
        values.append(column[np.isin(rounds, common)])
    return np.array(common) + 1, np.mean(values, axis=0), _spread(values)
