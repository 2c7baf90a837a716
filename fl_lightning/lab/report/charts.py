"""Paired intervals, heat maps, consensus by layer, and the gap between test and training loss."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from fl_lightning.lab.report.arm_settings import sides
from fl_lightning.lab.report.cells import Unit
from fl_lightning.lab.report.claims import OF_TWO_ARMS, Claim
from fl_lightning.lab.report.drawing import (
    INK,
    VERDICT_COLOURS,
    Drawing,
    figure,
    legend,
    logarithmic,
    plain,
    points,
    style,
    styled,
    whole_rounds,
)
from fl_lightning.lab.report.fairness import column_of, over_rounds
from fl_lightning.lab.report.report_tables import MAIN, SIGNS, difference_unit, shown_first, unit_of
from fl_lightning.lab.report.runs import Column, ReportedRun
from fl_lightning.lab.report.scores import FORMS, SCORE_TITLES, forms, over_time
from fl_lightning.lab.report.summary import Arm, Summary
from fl_lightning.lab.report.verdicts import Comparison

# Quantiles over clients: all but a tenth at each end, the middle half, and the median.
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


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


@styled
def heat_map(summary: Summary) -> list[Drawing]:
    """Draw mean scores over a grid of two axes; without such a grid, scores of arms by seeds."""
    factor = unit_of(summary).factor
    title = "Scores over the grid"
    metric = summary.called(summary.metric)
    caption = f"Each cell is a mean over seeds: {metric}, {SCORE_TITLES[MAIN]}."
    scores: dict[tuple[str, str], float | None] = {}
    names = {arm.key: name for name, arm in summary.arms.items()}
    if grid := two_axes(list(names)):
        for place, key in grid.items():
            scores[place] = summary.arms[names[key]].mean_sd(MAIN)[0]
        swept = sides({place: summary.arms[names[key]].runs[0] for place, key in grid.items()})
    else:
        title = "Arms by seeds"
        caption = f"Each cell is one run: {metric}, {SCORE_TITLES[MAIN]}. "
        caption += "Runs in one column have the same seed, so they form pairs."
        for seed in sorted({run.seed for run in summary.found.runs}):
            for name, arm in summary.arms.items():
                scores[name, f"seed {seed}"] = arm.scores[MAIN].get(seed)
        swept = sides({(key, ""): summary.arms[name].runs[0] for key, name in names.items()})
    rows = list(dict.fromkeys(row for row, _ in scores))
    columns = list(dict.fromkeys(column for _, column in scores))
    values = np.full((len(rows), len(columns)), np.nan)
    for (row, column), score in scores.items():
        if score is not None:
            values[rows.index(row), columns.index(column)] = score * factor
    if min(values.shape) < 2 or not np.isfinite(values).any():
        return []
    width = 1.6 + 0.09 * max(map(len, rows)) + 1.05 * len(columns)
    drawn = figure(min(9.2, width), 0.7 + 0.42 * len(rows), wide=width > 5)
    axes = drawn.add_subplot()
    _paint(axes, values, summary)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axes.set_ylim(len(rows), 0)
    axes.set_ylabel(swept[0])
    axes.set_xlabel(swept[1])
    axes.spines[:].set_visible(False)
    plain(axes, "")
    axes.tick_params(length=0)
    return [Drawing("heatmap", title, caption, drawn)]


def _paint(axes: Axes, values: Column, summary: Summary) -> None:
    """Colour the cells of a heat map and write their numbers on them."""
    # A diverged run has the value 0, which would leave a single colour for all others.
    positive = values[np.isfinite(values) & (values != 0)]
    norm = Normalize(positive.min(), positive.max()) if len(positive) else Normalize(0, 1)
    # Ask which direction is better only if there are arms to choose from.
    scored = [arm for arm in summary.arms.values() if arm.mean_sd(MAIN)[0] is not None]
    brighter = len(scored) < 2 or summary.greater
    colours = style().shades if brighter else f"{style().shades}_r"
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
        axes.text(**place, s=f"{value:{form}}", color=colour, fontsize=points(9.5))


def two_axes(arms: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return (row, column) → arm of a full grid of two axes; empty if the arms form none.

    The arms of the grid are named ``<one>_<other>``.

    >>> list(two_axes(["a_1", "a_2", "b_1", "b_2"]))
    [('a', '1'), ('a', '2'), ('b', '1'), ('b', '2')]
    >>> two_axes(["fedavg", "fedinit-0.1"])
    {}
    """
    # Either name may contain underscores, so try each place to cut.
    for cut in range(1, 1 + min((arm.count("_") for arm in arms), default=0)):
        pieces = {}
        for arm in arms:
            words = arm.split("_")
            pieces["_".join(words[:-cut]), "_".join(words[-cut:])] = arm
        sides = [set(names) for names in zip(*pieces, strict=True)]
        if min(map(len, sides)) > 1 and len(pieces) == len(sides[0]) * len(sides[1]):
            return pieces
    return {}


@styled
def layers(summary: Summary) -> list[Drawing]:
    """Draw the consensus distance of each layer, averaged over time and seeds.

    Each form that was logged has its panel.
    """
    logged = forms(summary.found)
    if not logged:
        return []
    longest = max(len(layers) for layers in logged.values())
    width = min(11.0, 1.2 + max(3.2, 0.32 * longest + 1) * len(logged) + 1.4)
    drawn = figure(width, 3.6, wide=len(logged) > 1)
    handles = {}
    for place, (form, names) in enumerate(logged.items(), start=1):
        axes = drawn.add_subplot(1, len(logged), place)
        for arm, look in looks(summary, linewidth=1.3, marker="o", markersize=4):
            means = np.array([over_time(arm.runs, form + name) for name in names], dtype=float)
            if np.isfinite(means).any():
                (handles[arm.name],) = axes.plot(means, **look)
        logarithmic(axes)
        angle = 60 if longest > 4 else 25
        size = points(8)
        axes.set_xticks(range(len(names)), names, rotation=angle, ha="right", fontsize=size)
        axes.set_title(FORMS[form], fontsize=points(9.5))
        plain(axes)
    legend(drawn, handles)
    caption = "Mean over all rounds and seeds. Layers are in order from the input on."
    if len(logged) > 1:
        caption += " The forms of the distance can rank layers differently."
    return [Drawing("consensus", "Consensus distance by layer", caption, drawn)]


@styled
def generalisation(summary: Summary) -> list[Drawing]:
    """Draw the gap between test and training loss over the training loss.

    An arm with a smaller gap at the same training loss generalises better. If claims are about
    these losses, only their arms are drawn, because one that fails would hide the others.
    """
    claims = [each.claim for each in summary.verdicts if each.claim.metric.startswith("global/")]
    claimed = {claim.a for claim in claims} | {claim.b for claim in claims}
    drawn = figure(6.4, 3.6)
    axes = drawn.add_subplot()
    handles = {}
    for arm, look in looks(summary, linewidth=1.3, marker="o", markersize=3.5):
        losses = mean_over_runs(arm.runs, "global/train_loss")
        gaps = mean_over_runs(arm.runs, "global/gap")
        both = np.isfinite(losses) & np.isfinite(gaps)
        if both.any() and (not claimed or arm.name in claimed):
            (handles[arm.name],) = axes.plot(losses[both], gaps[both], **look)
    if not handles:
        return []
    logarithmic(axes, "x")
    axes.invert_xaxis()
    axes.set_xlabel("training loss of the global model")
    axes.set_ylabel("test loss − training loss")
    plain(axes, "both")
    legend(drawn, handles)
    caption = (
        "Each point is the mean over seeds in a round that measured both the loss and the gap. "
        "Training goes from left to right. At the same training loss, a smaller gap means better "
        "generalisation."
    )
    return [Drawing("generalisation", "Generalisation gap over training loss", caption, drawn)]


@styled
def clients(summary: Summary) -> list[Drawing]:
    """Draw the values of clients, round by round, one panel per arm.

    The panel has lines for the first run's clients, and shows how far apart the clients of all runs
    are.
    """
    tables: dict[str, list[dict[int, dict[str, float]]]] = {}
    for arm in summary.arms.values():
        read = [over_rounds(run, summary.metric)[0] for run in arm.runs if run.finished]
        if any(read):
            tables[arm.name] = [table for table in read if table]
    # A single round gives no curve, and the table of fairness has its numbers.
    if all(len(table) < 2 for table in chain.from_iterable(tables.values())):
        return []
    columns = 2 if len(tables) in (2, 4) else min(3, len(tables))
    rows = -(-len(tables) // columns)
    drawn = figure(9.6 if columns > 1 else 6.0, 2.6 * rows + 0.3, wide=columns > 1)
    every = list(drawn.subplots(rows, columns, squeeze=False, sharey=True, sharex=True).flat)
    shown = unit_of(summary, summary.metric)
    for axes, (name, of_arm) in zip(every, tables.items(), strict=False):
        _clients(axes, of_arm, shown.factor)
        axes.set_title(name, fontsize=points(9.5))
        whole_rounds(axes)
        plain(axes)
    for axes in every[len(tables) :]:
        axes.set_visible(False)
    drawn.supxlabel("rounds", fontsize=points(10))
    label = f"{column_of(summary.metric)} of each client{', %' * shown.percent}"
    drawn.supylabel(label, fontsize=points(10))
    caption = "Each thin line is a client of the first run; at most 40 are drawn. The thick line "
    caption += "is the median over all clients and seeds. The dark band has the middle half of "
    caption += "them, and the light band all except the worst and the best tenth."
    return [Drawing("clients", "Clients over time", caption, drawn)]


def _clients(axes: Axes, tables: Sequence[dict[int, dict[str, float]]], factor: float) -> None:
    first = tables[0]
    names = sorted(set[str]().union(*first.values()), key=_natural)
    # Too many lines would merge into one grey area.
    for name in names[:: -(-len(names) // 40)]:
        own = {t + 1: values[name] * factor for t, values in first.items() if name in values}
        axes.plot(list(own), list(own.values()), color=INK, linewidth=0.5, alpha=0.25)
    # If the runs were measured in different rounds, draw only the first run.
    rounds = sorted(set.intersection(*(set(table) for table in tables)))
    if not rounds:
        tables = tables[:1]
        rounds = sorted(first)
    rows = []
    for t in rounds:
        pooled = [list(table[t].values()) for table in tables]
        rows.append(np.quantile(np.concatenate(pooled), QUANTILES))
    quantiles = np.array(rows).T * factor
    at = [t + 1 for t in rounds]
    colour = style().colours[2] if style().markers else style().colours[0]
    axes.fill_between(at, quantiles[0], quantiles[-1], color=colour, alpha=0.18, linewidth=0)
    axes.fill_between(at, quantiles[1], quantiles[-2], color=colour, alpha=0.3, linewidth=0)
    axes.plot(at, quantiles[2], color=colour, linewidth=1.8 * points(1))


def _natural(name: str) -> tuple[int, str]:
    return (int(name) if name.isdecimal() else -1, name)


def looks(summary: Summary, **more: Any) -> Iterator[tuple[Arm, dict[str, Any]]]:
    """Return each arm with its looks; a style's entries take precedence over ``more``."""
    for number, arm in enumerate(summary.arms.values()):
        yield arm, {**more, **style().look(number)}


def mean_over_runs(runs: Sequence[ReportedRun], name: str) -> Column:
    """Return the mean of a column over the done runs, round by round; NaN if no run has it."""
    columns = [run.column(name) for run in runs if run.status == "done"]
    shortest = min(map(len, columns), default=0)
    together = np.array([column[:shortest] for column in columns]).reshape(len(columns), shortest)
    with warnings.catch_warnings():
        # Rounds without a measurement are empty in all runs.
        warnings.filterwarnings("ignore", "Mean of empty slice")
        return np.nanmean(together, axis=0) if columns else np.empty(0)
