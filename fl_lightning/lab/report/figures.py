"""Figures: paired intervals, curves over rounds and costs, and other measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from fl_lightning.lab.report.cells import Unit, size
from fl_lightning.lab.report.claims import OF_TWO_ARMS, Claim
from fl_lightning.lab.report.drawing import (
    INK,
    VERDICT_COLOURS,
    Drawing,
    beside,
    figure,
    legend,
    logarithmic,
    plain,
    points,
    style,
    styled,
    whole_rounds,
)
from fl_lightning.lab.report.report_tables import (
    SIGNS,
    difference_unit,
    metric_title,
    shown_first,
    unit_of,
)
from fl_lightning.lab.report.runs import Column, ReportedRun
from fl_lightning.lab.report.scores import AXES, SCORE_TITLES, measured, smooth, spending
from fl_lightning.lab.report.summary import Arm, Summary
from fl_lightning.lab.report.verdicts import Comparison

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
def intervals(summary: Summary) -> list[Drawing]:
    """Draw every pair as a row: a dot per seed, the mean, its interval, and the margin of a
    claim.
    """
    rows = shown_first(summary.verdicts) or summary.pairs
    # A claim that an arm diverges has no interval.
    rows = [row for row in rows if row.evidence.values and row.claim.kind != "diverges"]
    if not rows:
        return []
    # Comparisons of one metric or cost, and of one scale, share an axis.
    panels: dict[tuple[str, str, str], list[Comparison]] = {}
    for row in rows:
        cost = row.claim.cost if row.claim.kind == "to_target" else ""
        panels.setdefault((row.claim.metric, row.claim.unit, cost), []).append(row)
    drawn = figure(9.2, 0.75 * len(panels) + 0.42 * len(rows) + 0.3, wide=True)
    heights = [0.42 * len(panel) + 0.1 for panel in panels.values()]
    every_axes = drawn.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, ((metric, scale, cost), panel) in zip(every_axes, panels.items(), strict=True):
        shown = difference_unit(summary, panel[0])
        _panel(axes, panel, shown, claimed=bool(summary.verdicts))
        # Without claims, b is always the first arm.
        b = panel[0].claim.b
        arms = {row.claim.a for row in panel}
        a = arms.pop() if len(arms) == 1 else "each arm"
        difference = f"{a} minus {b}"
        ratio = f"log of {a} / {b}"
        if summary.verdicts:
            difference = "a − b"
            ratio = "log(a / b)"
        measured = summary.called(metric)
        if cost:
            measured = f"{cost} until the target in {measured}"
        label = {
            "difference": f"{measured}: {difference}",
            "log_ratio": f"{measured}: {ratio}",
            "number": f"{measured}: Spearman's ρ",
        }[scale]
        scores = " / ".join(dict.fromkeys(SCORE_TITLES[row.claim.score] for row in panel))
        said = "" if cost else f" ({scores})"
        axes.set_xlabel(f"{label}{', in percentage points' * shown.percent}{said}")
    caption = "The large marker is the mean, and the line is its 95 % interval, which needs at "
    caption += "least two pairs. Each dot below is one seed."
    if any(row.percent == 90 for row in rows):
        caption += " For an equivalence (≈), the thick line is the 90 % interval, which belongs "
        caption += "to its two one-sided tests. The thin line is the 95 % interval."
    if summary.verdicts:
        caption += " A dotted line is the claim's margin. "
        if style().markers:
            caption += "A full diamond means reproduced, a cross contradicted, an open diamond "
            caption += "not reproduced, and an open circle inconclusive."
        else:
            caption += "Green means reproduced, red contradicted, grey not reproduced, and "
            caption += "amber inconclusive."
    return [Drawing("intervals", "Paired intervals", caption, drawn)]


def _panel(axes: Axes, rows: Sequence[Comparison], shown: Unit, claimed: bool) -> None:
    """Draw the pairs that share an axis."""
    axes.axvline(0, color=INK, linewidth=0.9)
    names = []
    for y, row in enumerate(rows):
        claim = row.claim
        names.append(_claimed(claim) if claimed else claim.a)
        _interval(axes, y, row, shown, _verdict_look(row.verdict if claimed else ""))
        # Shade both sides of 0 for an equivalence, and otherwise the side on which the claim
        # expects its arm.
        sides = [-1] if claim.direction == "less" else [1]
        for side in [1, -1] if claim.kind == "equivalence" else sides:
            if claim.margin:
                margin = claim.margin * shown.factor * side
                dots = (0, (1, 2))
                heights = [y - 0.36, y + 0.36]
                axes.plot([margin, margin], heights, color=INK, linewidth=1.1, linestyle=dots)
    axes.set_yticks(range(len(rows)), names)
    # The first row is on top.
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    plain(axes, "x")
    axes.tick_params(axis="y", length=0)


def _claimed(claim: Claim) -> str:
    if claim.kind not in OF_TWO_ARMS:
        return f"{claim.id}   {claim.kind.replace('_', ' ')}"
    sign = "≈" if claim.kind == "equivalence" else SIGNS[claim.direction]
    # A long name takes a line of its own, so that room is left for the intervals.
    long = len(claim.id) + len(claim.a) + len(claim.b) > 56
    return f"{claim.id}   {claim.a} {sign}{chr(10) if long else ' '}{claim.b}"


def _verdict_look(verdict: str) -> dict[str, Any]:
    """Return the look of a claim's mean, by its verdict: a colour, and in a paper a shape. "":
    nothing is claimed.
    """
    if not style().markers:
        colour = VERDICT_COLOURS.get(verdict, style().colours[0])
        return {"marker": "D", "color": colour, "markeredgewidth": 0}
    shape = {"contradicted": "X", "inconclusive": "o"}.get(verdict, "D")
    look = {"marker": shape, "color": INK, "markeredgewidth": 0.9}
    hollow = verdict in ("not reproduced", "inconclusive")
    return {**look, "markerfacecolor": "white"} if hollow else look


def _interval(axes: Axes, y: int, row: Comparison, shown: Unit, look: Mapping[str, Any]) -> None:
    interval = row.interval
    colour = look["color"]
    seeds = [value * shown.factor for value in row.evidence.values.values()]
    dots: dict[str, Any] = {"color": colour, "markeredgewidth": 0}
    dots["markersize"] = points(4.5)
    axes.plot(seeds, [y + 0.22] * len(seeds), "o", alpha=0.6, **dots)
    # The thick line is the interval that the claim's test uses; for an equivalence a thin one shows
    # 95 %.
    for percent, width in ((95, 1.0), (row.percent, 2.6)):
        if ends := interval.ends(percent):
            reach = [end * shown.factor for end in ends]
            axes.plot(reach, [y, y], color=colour, linewidth=width, solid_capstyle="round")
    if interval.mean is not None:
        size = points(7)
        axes.plot([interval.mean * shown.factor], [y], linestyle="", markersize=size, **look)


# -------------------------------------------------------------------------------------- curves


@styled
def curves(summary: Summary) -> list[Drawing]:
    """Draw the smoothed metric against each kind of cost, if it was measured.

    Each of several sweeps has its own panel, one below the other.
    """
    drawings = []
    for axis, title in AXES.items():
        parts = {name: part for name, part in summary.by_sweep.items() if _has_curve(part, axis)}
        if not parts or (axis == "seconds" and not summary.timed):
            continue
        several = len(parts) > 1
        drawn = figure(9.2, 2.6 * len(parts) if several else 4.2)
        for place, (name, part) in enumerate(parts.items(), start=1):
            axes = drawn.add_subplot(len(parts), 1, place)
            handles = _curves(axes, part, axis)
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
        drawings.append(Drawing(f"curves-{axis}", title.capitalize(), caption, drawn))
    return drawings


def _curves(axes: Axes, summary: Summary, axis: str) -> dict[str, Any]:
    """Draw the arms' curves over their cost, and return each arm's line for the legend."""
    factor = unit_of(summary).factor
    handles: dict[str, Any] = {}
    for arm, look in _looks(summary):
        runs = [run for run in arm.runs if _has(run, summary.metric, axis)]
        if done := [run for run in runs if run.status == "done"]:
            handles[arm.name], _ = _mean(axes, done, summary.metric, look, axis, factor)
        # The mean covers the runs that are done; each other run has its own line.
        for run in runs:
            if run.status != "done":
                thin = {**look, "linewidth": 0.9, "alpha": 0.9}
                line, _ = _mean(axes, [run], summary.metric, thin, axis, factor)
                handles.setdefault(arm.name if done else f"{arm.name} ({run.status})", line)
    axes.set_ylabel(metric_title(summary))
    for target in summary.targets:
        axes.axhline(float(target) * factor, color=INK, linewidth=0.9, linestyle=(0, (1, 3)))
    if axis == "rounds":
        whole_rounds(axes)
    if axis == "bytes":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size(x) if x > 0 else "0"))
    plain(axes)
    return handles


def _caption(summary: Summary) -> str:
    text = (
        "Each run's curve is smoothed by a Hann window over at most a fifth of its values. A "
        "line is the mean over the runs of an arm that are done, and its band is ± one sample "
        "standard deviation."
    )
    if any(run.status != "done" for run in summary.found.runs):
        text += " Each thin line is one run that diverged or is not finished."
    return text + " Dotted lines are the targets." * bool(summary.targets)


def _has(run: ReportedRun, metric: str, axis: str) -> bool:
    return bool(len(measured(run, metric)[0])) and bool(np.isfinite(spending(run, axis)).any())


def _has_curve(summary: Summary, axis: str) -> bool:
    """Return whether a run measured the metric in several rounds, and its cost."""
    metric = summary.metric
    return any(
        _has(run, metric, axis) and len(measured(run, metric)[0]) > 1 for run in summary.found.runs
    )


def _looks(summary: Summary, **more: Any) -> Iterator[tuple[Arm, dict[str, Any]]]:
    """Return each arm with its looks; a style's entries take precedence over ``more``."""
    for number, arm in enumerate(summary.arms.values()):
        yield arm, {**more, **style().look(number)}


def _mean(
    axes: Axes,
    runs: list[ReportedRun],
    metric: str,
    look: Mapping[str, Any],
    axis: str = "",
    factor: float = 1.0,
) -> tuple[Line2D, Column]:
    """Draw the mean of runs with a band over seeds, and return its line and its values.

    Args:
        axis: smoothed curves over this cost; "": over the rounds, without smoothing.
    """
    rounds = [measured(run, metric)[0] for run in runs]
    common = np.array(sorted(set.intersection(*map(set, rounds))))
    # Runs that were measured in different rounds have no mean; then the first run is drawn.
    if not len(common):
        runs = runs[:1]
        common = rounds[0]
    curves = []
    spent = []
    for run, own in zip(runs, rounds, strict=False):
        values = measured(run, metric)[1]
        curves.append((smooth(values) if axis else values)[np.isin(own, common)])
        spent.append(spending(run, axis or "rounds")[np.isin(run.columns["round"], common)])
    x = np.mean(spent, axis=0)
    mean = np.mean(curves, axis=0) * factor
    # One point makes no line, and needs a marker.
    look = {**look, "marker": look.get("marker") or "o"} if len(x) == 1 else look
    (line,) = axes.plot(x, mean, markevery=marked(len(x)), **look)
    if len(runs) > 1:
        sd = np.std(curves, axis=0, ddof=1) * factor
        axes.fill_between(x, mean - sd, mean + sd, color=look["color"], alpha=0.15, linewidth=0)
    return line, mean


def marked(points: int) -> list[int]:
    """Return which points of a curve have its marker: at most nine, including the first and the
    last.
    """
    places = np.linspace(0, max(points - 1, 0), 9)
    return sorted({round(place) for place in places.tolist()})


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
            drawings.append(Drawing(key, f"{title}: {name}", caption, drawn))
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
        positive = True
        for arm, look in _looks(summary, linewidth=1.3):
            runs = [run for run in arm.runs if len(measured(run, name)[0])]
            if runs := [run for run in runs if run.status == "done"] or runs:
                handles[arm.name], mean = _mean(axes, runs, name, look)
                positive = positive and bool((mean > 0).all())
        if positive:
            logarithmic(axes)
        title = MEASUREMENTS[name].replace("val/loss", summary.called("val/loss"))
        axes.set_title(title, fontsize=points(9.5))
        whole_rounds(axes)
        if place > len(logged) - columns:
            axes.set_xlabel("rounds")
        plain(axes)
    legend(drawn, handles)
    return drawn
