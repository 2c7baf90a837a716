"""Paired intervals, heat maps, consensus by layer, and the gap between test and training loss."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from fl_lightning.report.claimed import SIGNS, difference_unit, shown_first, unit_of
from fl_lightning.report.claims import Claim
from fl_lightning.report.drawing import (
    COLOURS,
    INK,
    VERDICT_COLOURS,
    Drawing,
    figure,
    legend,
    logarithmic,
    look,
    plain,
    styled,
)
from fl_lightning.report.layers import FORMS, forms, over_time
from fl_lightning.report.runs import Column, Run
from fl_lightning.report.scores import SCORES
from fl_lightning.report.summary import Pair, Summary, Verdict
from fl_lightning.report.wording import SCORE_TITLES, Unit

# A pair, and the verdict on the claim that it is about, where there is one.
Row = tuple[Pair, Verdict | None]


@styled
def intervals(summary: Summary) -> list[Drawing]:
    """Draw every pair as a row: a dot a seed, the mean, its interval, and the margin of a claim."""
    rows: list[Row] = [(verdict.pair, verdict) for verdict in shown_first(summary.verdicts)]
    rows = rows or [(pair, None) for pair in summary.pairs]
    rows = [row for row in rows if row[0].differences and not _of_shares(row[1])]
    if not rows:
        return []
    # Pairs of one metric and scale share an axis.
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((row[0].metric, row[0].scale), []).append(row)
    drawn = figure(9.2, 0.75 * len(panels) + 0.42 * len(rows) + 0.3)
    heights = [0.42 * len(panel) + 0.1 for panel in panels.values()]
    every_axes = drawn.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, ((metric, scale), panel) in zip(every_axes, panels.items(), strict=True):
        _panel(axes, summary, panel)
        unit = difference_unit(summary, panel[0][0])
        # Without claims every b is the first arm.
        b = "b" if summary.verdicts else panel[0][0].b
        label = {
            "difference": f"a − {b} in {metric}",
            "log_ratio": f"log of a / b in {metric}",
            "number": f"Spearman's ρ, {metric}",
        }[scale]
        if unit.percent:
            label += ", points"
        scores = " / ".join(dict.fromkeys(SCORE_TITLES[pair.score] for pair, _ in panel))
        axes.set_xlabel(f"{label} ({scores})")
    caption = "Line: mean and its 95 % interval, where there are two pairs or more. "
    caption += "Dots below: one a seed."
    if summary.verdicts:
        caption += " Dotted: the claim's margin. Green: reproduced, red: contradicted, "
        caption += "grey: not reproduced, amber: inconclusive."
    return [Drawing("intervals", "Paired intervals", caption, drawn)]


def _panel(axes: Axes, summary: Summary, rows: Sequence[Row]) -> None:
    """Draw the pairs that share an axis."""
    unit = difference_unit(summary, rows[0][0])
    axes.axvline(0, color=INK, linewidth=0.9)
    names = []
    for y, (pair, verdict) in enumerate(rows):
        if verdict is None:
            names.append(pair.a)
            _interval(axes, y, pair, unit, COLOURS[0])
            continue
        names.append(_claimed(verdict))
        _interval(axes, y, pair, unit, VERDICT_COLOURS[verdict.verdict])
        if verdict.claim.margin:
            for side in _sides(verdict.claim):
                margin = verdict.claim.margin * unit.factor * side
                dots = (0, (1, 2))
                heights = [y - 0.36, y + 0.36]
                axes.plot([margin, margin], heights, color=INK, linewidth=1.1, linestyle=dots)
    axes.set_yticks(range(len(rows)), names)
    # The first row is on top.
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    plain(axes, "x")
    axes.tick_params(axis="y", length=0)


def _sides(claim: Claim) -> tuple[int, ...]:
    """The sides of 0 on which a claim's margin lies."""
    if claim.kind == "equivalence":
        return (1, -1)
    if claim.direction == "less":
        return (-1,)
    return (1,)


def _claimed(verdict: Verdict) -> str:
    claim = verdict.claim
    if claim.kind not in ("difference", "equivalence"):
        return f"{claim.id}   {claim.kind.replace('_', ' ')}"
    sign = "≈" if claim.kind == "equivalence" else SIGNS[claim.direction]
    # A long name takes a line of its own, so that room is left for the intervals.
    long = len(claim.id) + len(claim.a) + len(claim.b) > 56
    return f"{claim.id}   {claim.a} {sign}{chr(10) if long else ' '}{claim.b}"


def _of_shares(verdict: Verdict | None) -> bool:
    """Whether it is a claim without an interval."""
    return verdict is not None and verdict.claim.kind == "diverges"


def _interval(axes: Axes, y: int, pair: Pair, shown: Unit, colour: str) -> None:
    interval = pair.interval
    seeds = [value * shown.factor for value in pair.differences.values()]
    dots: dict[str, Any] = {"color": colour, "markeredgewidth": 0}
    axes.plot(seeds, [y + 0.22] * len(seeds), "o", markersize=4.5, alpha=0.6, **dots)
    if interval.low is not None and interval.high is not None:
        ends = [interval.low * shown.factor, interval.high * shown.factor]
        axes.plot(ends, [y, y], color=colour, linewidth=2.6, solid_capstyle="round")
    if interval.mean is not None:
        axes.plot([interval.mean * shown.factor], [y], "D", markersize=7, **dots)


@styled
def heat_map(summary: Summary) -> list[Drawing]:
    """Draw mean scores over a grid of two axes; without one, scores of arms by seeds."""
    score = SCORES[0]
    grid = two_axes(list(summary.arms))
    if grid is not None:
        rows, columns, names = grid
        title = "Over the grid"
        caption = f"Mean over seeds: {summary.metric}, {SCORE_TITLES[score]}."
    else:
        rows = list(summary.arms)
        seeds = sorted({run.seed for run in summary.found.runs})
        columns = [f"seed {seed}" for seed in seeds]
        title = "Arms by seeds"
        caption = f"{summary.metric}, {SCORE_TITLES[score]}. "
        caption += "Runs of one column have one seed: these are paired."
    factor = unit_of(summary).factor
    values = np.full((len(rows), len(columns)), np.nan)
    for row, column in np.ndindex(values.shape):
        if grid is not None:
            value = summary.arms[names[rows[row], columns[column]]].mean_sd(score)[0]
        else:
            value = summary.arms[rows[row]].scores[score].get(seeds[column])
        if value is not None:
            values[row, column] = value * factor
    if min(values.shape) < 2 or not np.isfinite(values).any():
        return []
    width = 1.6 + 0.09 * max(map(len, rows)) + 1.05 * len(columns)
    drawn = figure(min(9.2, width), 0.7 + 0.42 * len(rows))
    axes = drawn.add_subplot()
    _paint(axes, values, summary)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axes.set_ylim(len(rows), 0)
    axes.spines[:].set_visible(False)
    plain(axes, "")
    axes.tick_params(length=0)
    return [Drawing("heatmap", title, caption, drawn)]


def _paint(axes: Axes, values: Column, summary: Summary) -> None:
    """Colour the cells of a heat map and write their numbers on them."""
    # A diverged run's 0 would leave one colour to all others.
    positive = values[np.isfinite(values) & (values != 0)]
    norm = Normalize(0, 1)
    if len(positive):
        norm = Normalize(positive.min(), positive.max())
    # Which way is better is asked for only where there are arms to choose from.
    scored = [arm for arm in summary.arms.values() if arm.mean_sd(SCORES[0])[0] is not None]
    brighter = len(scored) < 2 or summary.greater
    colours = "viridis" if brighter else "viridis_r"
    mesh = axes.pcolormesh(values, cmap=colours, norm=norm, edgecolor="none")
    form = ".2f" if unit_of(summary).percent else ".3g"
    for row, column in np.ndindex(values.shape):
        value = values[row, column]
        place: dict[str, Any] = {"x": column + 0.5, "y": row + 0.5, "ha": "center", "va": "center"}
        if not np.isfinite(value):
            axes.text(**place, s="–")
            continue
        # The luminance of the colour decides whether dark or light text is read on it.
        red, green, blue, _ = mesh.cmap(norm(value))
        bright = 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
        colour = "#111418" if bright else "#ffffff"
        axes.text(**place, s=f"{value:{form}}", color=colour, fontsize=9.5)


def two_axes(arms: Sequence[str]) -> tuple[list[str], list[str], dict[tuple[str, str], str]] | None:
    """Rows, columns and arms of a full grid of two axes; None: the arms make none.

    Its arms are named ``<one>_<other>``.

    >>> two_axes(["a_1", "a_2", "b_1", "b_2"])[:2]
    (['a', 'b'], ['1', '2'])
    >>> two_axes(["fedavg", "fedinit-0.1"]) is None
    True
    """
    # Either name may hold underscores itself, so each place to cut is tried.
    for cut in range(1, 1 + min((arm.count("_") for arm in arms), default=0)):
        pieces = {}
        for arm in arms:
            words = arm.split("_")
            pieces["_".join(words[:-cut]), "_".join(words[-cut:])] = arm
        rows = list(dict.fromkeys(row for row, _ in pieces))
        columns = list(dict.fromkeys(column for _, column in pieces))
        if min(len(rows), len(columns)) > 1 and len(pieces) == len(rows) * len(columns):
            return rows, columns, pieces
    return None


@styled
def layers(summary: Summary) -> list[Drawing]:
    """Draw the consensus distance of each layer, averaged over time and seeds.

    There is a panel for every form that was logged.
    """
    logged = forms(summary.found.runs)
    if not logged:
        return []
    longest = max(len(layers) for layers in logged.values())
    drawn = figure(min(11.0, 1.2 + max(3.2, 0.32 * longest + 1) * len(logged) + 1.4), 3.6)
    handles = {}
    for place, (form, names) in enumerate(logged.items(), start=1):
        axes = drawn.add_subplot(1, len(logged), place)
        for number, (arm, own) in enumerate(summary.arms.items()):
            means = np.array([over_time(own.runs, form + name) for name in names], dtype=float)
            if np.isfinite(means).any():
                style = {**look(number), "linewidth": 1.3}
                (handles[arm],) = axes.plot(means, marker="o", markersize=4, **style)
        logarithmic(axes)
        angle = 60 if longest > 4 else 25
        axes.set_xticks(range(len(names)), names, rotation=angle, ha="right", fontsize=8)
        axes.set_title(FORMS[form], fontsize=9.5)
        plain(axes)
    legend(drawn, list(handles.values()), list(handles))
    caption = "Averaged over all rounds and seeds; layers from the input on."
    if len(logged) > 1:
        caption += " The forms can rank layers differently."
    return [Drawing("consensus", "Consensus distance by layer", caption, drawn)]


@styled
def generalisation(summary: Summary) -> list[Drawing]:
    """Draw the gap between test and training loss over the training loss.

    An arm that has less of a gap at the same training loss generalises better. Where claims are
    about these losses, their arms alone are drawn: one that fails would hide the others.
    """
    claimed: set[str] = set()
    for verdict in summary.verdicts:
        if verdict.claim.metric.startswith("global/"):
            claimed |= {verdict.claim.a, verdict.claim.b}
    drawn = figure(6.4, 3.6)
    axes = drawn.add_subplot()
    handles = {}
    for number, (arm, own) in enumerate(summary.arms.items()):
        if claimed and arm not in claimed:
            continue
        losses = mean_over_runs(own.runs, "global/train_loss")
        gaps = mean_over_runs(own.runs, "global/gap")
        both = np.isfinite(losses) & np.isfinite(gaps)
        if both.any():
            style = {**look(number), "linewidth": 1.3}
            (handles[arm],) = axes.plot(
                losses[both], gaps[both], marker="o", markersize=3.5, **style
            )
    if not handles:
        return []
    logarithmic(axes, "x")
    axes.invert_xaxis()
    axes.set_xlabel("training loss of the global model")
    axes.set_ylabel("test loss − training loss")
    plain(axes, "both")
    legend(drawn, list(handles.values()), list(handles))
    caption = (
        "A point for each round that measured both, averaged over seeds; training goes to the "
        "right. Lower at the same training loss is better generalisation."
    )
    return [Drawing("generalisation", "Generalisation gap over training loss", caption, drawn)]


def mean_over_runs(runs: Sequence[Run], name: str) -> Column:
    """The mean of a column over the runs that are done, round by round; NaN where none has it."""
    columns = [run.column(name) for run in runs if run.status == "done"]
    shortest = min(map(len, columns), default=0)
    together = np.array([column[:shortest] for column in columns]).reshape(len(columns), shortest)
    with warnings.catch_warnings():
        # Rounds without a measurement are empty in all runs.
        warnings.filterwarnings("ignore", "Mean of empty slice")
        return np.nanmean(together, axis=0) if columns else np.empty(0)
