"""Paired intervals, heat maps and consensus by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from fl_lightning.report.claimed import difference_unit, shown_first, unit_of
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
from fl_lightning.report.scores import SCORES
from fl_lightning.report.summary import Pair, Summary, Verdict
from fl_lightning.report.wording import SCORE_TITLES, Unit


@styled
def intervals(summary: Summary) -> list[Drawing]:
    """Every pair as a row: a dot a seed, the mean, its interval, and the margin of a claim."""
    shown: list[tuple[Pair, Verdict | None]] = [
        (said.pair, said) for said in shown_first(summary.verdicts)
    ]
    shown = shown or [(pair, None) for pair in summary.pairs]
    rows = [(pair, said) for pair, said in shown if pair.differences and not _of_shares(said)]
    if not rows:
        return []
    # what shares an axis
    kinds = list(dict.fromkeys((pair.metric, pair.scale) for pair, _ in rows))
    heights = [sum((pair.metric, pair.scale) == kind for pair, _ in rows) for kind in kinds]
    drawn = figure(9.2, 0.75 * len(kinds) + 0.42 * len(rows) + 0.3)
    panels = drawn.subplots(
        len(kinds), 1, squeeze=False, height_ratios=[0.42 * h + 0.1 for h in heights]
    )[:, 0]
    for axes, kind in zip(panels, kinds, strict=True):
        own = [(pair, said) for pair, said in rows if (pair.metric, pair.scale) == kind]
        unit = difference_unit(summary, own[0][0])
        axes.axvline(0, color=INK, linewidth=0.9)
        for y, (pair, said) in enumerate(own):
            colour = COLOURS[0] if said is None else VERDICT_COLOURS[said.verdict]
            _interval(axes, y, pair, unit, colour)
            if said is not None and said.claim.margin:
                for sign in (
                    (1, -1)
                    if said.claim.kind == "equivalence"
                    else (-1 if said.claim.direction == "less" else 1,)
                ):
                    margin = said.claim.margin * unit.factor * sign
                    axes.plot(
                        [margin, margin],
                        [y - 0.36, y + 0.36],
                        color=INK,
                        linewidth=1.1,
                        linestyle=(0, (1, 2)),
                    )
        # without claims b is the first arm
        names = [pair.a if said is None else _claimed(said) for pair, said in own]
        axes.set_yticks(range(len(own)), names)
        axes.set_ylim(len(own) - 0.5, -0.5)
        scores = " / ".join(dict.fromkeys(SCORE_TITLES[pair.score] for pair, _ in own))
        b = "b" if summary.verdicts else own[0][0].b
        what = {"log_ratio": f"log of a / b in {kind[0]}", "number": f"Spearman's ρ, {kind[0]}"}
        axes.set_xlabel(
            f"{what.get(kind[1], f'a − {b} in {kind[0]}')}{', points' if unit.percent else ''} ({scores})"
        )
        axes.spines["left"].set_visible(False)
        plain(axes, "x")
        axes.tick_params(axis="y", length=0)
    caption = "Line: mean and its 95 % interval, where there are two pairs or more. Dots below: one a seed."
    if summary.verdicts:
        caption += " Dotted: the claim's margin. Green: reproduced, red: contradicted, grey: not reproduced, "
        caption += "amber: inconclusive."
    return [Drawing("intervals", "Paired intervals", caption, drawn)]


def _claimed(said: Verdict) -> str:
    claim, sign = said.claim, ">" if said.claim.direction == "greater" else "<"
    sign = "≈" if claim.kind == "equivalence" else sign
    if claim.kind not in ("difference", "equivalence"):
        return f"{claim.id}   {claim.kind.replace('_', ' ')}"
    long = len(claim.id) + len(claim.a) + len(claim.b) > 56
    return f"{claim.id}   {claim.a} {sign}{chr(10) if long else ' '}{claim.b}"


def _of_shares(said: Verdict | None) -> bool:
    """Whether it is a claim without an interval."""
    return said is not None and said.claim.kind == "diverges"


def _interval(axes: Axes, y: int, pair: Pair, shown: Unit, colour: str) -> None:
    found = pair.interval
    seeds = [value * shown.factor for value in pair.differences.values()]
    axes.plot(
        seeds,
        [y + 0.22] * len(seeds),
        "o",
        markersize=4.5,
        color=colour,
        alpha=0.6,
        markeredgewidth=0,
    )
    if found.low is not None and found.high is not None:
        ends = [found.low * shown.factor, found.high * shown.factor]
        axes.plot(ends, [y, y], color=colour, linewidth=2.6, solid_capstyle="round")
    if found.mean is not None:
        axes.plot(
            [found.mean * shown.factor], [y], "D", markersize=7, color=colour, markeredgewidth=0
        )


@styled
def heat_map(summary: Summary) -> list[Drawing]:
    """Mean score over a grid of two axes; without one, arms by seeds."""
    shown, score = unit_of(summary), SCORES[0]
    grid = two_axes(list(summary.arms))
    if grid is not None:
        rows, columns, names = grid
        cells = [
            [summary.arms[names[row, column]].mean_sd(score)[0] for column in columns]
            for row in rows
        ]
        title, caption = (
            "Over the grid",
            f"Mean over seeds: {summary.metric}, {SCORE_TITLES[score]}.",
        )
    else:
        seeds = sorted({run.seed for run in summary.found.runs})
        rows, columns = list(summary.arms), [f"seed {seed}" for seed in seeds]
        cells = [[arm.scores[score].get(seed) for seed in seeds] for arm in summary.arms.values()]
        title = "Arms by seeds"
        caption = f"{summary.metric}, {SCORE_TITLES[score]}. Runs of one column have one seed: these are paired."
    values = np.array(
        [[np.nan if v is None else v * shown.factor for v in row] for row in cells], dtype=float
    )
    if min(values.shape) < 2 or not np.isfinite(values).any():
        return []
    drawn = figure(
        min(9.2, 1.6 + 0.09 * max(map(len, rows)) + 1.05 * len(columns)), 0.7 + 0.42 * len(rows)
    )
    axes = drawn.add_subplot()
    # a diverged run's 0 would leave one colour to all others
    positive = values[np.isfinite(values) & (values != 0)]
    norm = Normalize(positive.min(), positive.max()) if len(positive) else Normalize(0, 1)
    scored = [arm for arm in summary.arms.values() if arm.mean_sd(score)[0] is not None]
    # what is better, where there are arms to choose from
    brighter = len(scored) < 2 or summary.greater
    mesh = axes.pcolormesh(
        values, cmap="viridis" if brighter else "viridis_r", norm=norm, edgecolor="none"
    )
    for row, column in np.ndindex(values.shape):
        value = values[row, column]
        if not np.isfinite(value):
            axes.text(column + 0.5, row + 0.5, "–", ha="center", va="center")
            continue
        red, green, blue, _ = mesh.cmap(norm(value))
        colour = "#111418" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "#ffffff"
        text = f"{value:.2f}" if shown.percent else f"{value:.3g}"
        axes.text(
            column + 0.5, row + 0.5, text, ha="center", va="center", color=colour, fontsize=9.5
        )
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axes.set_ylim(len(rows), 0)
    axes.spines[:].set_visible(False)
    plain(axes, "")
    axes.tick_params(length=0)
    return [Drawing("heatmap", title, caption, drawn)]


def two_axes(arms: Sequence[str]) -> tuple[list[str], list[str], dict[tuple[str, str], str]] | None:
    """Rows, columns and arms of a full grid of two axes, whose arms are named ``<one>_<other>``; None: it is none.

    >>> two_axes(["a_1", "a_2", "b_1", "b_2"])[:2]
    (['a', 'b'], ['1', '2'])
    >>> two_axes(["fedavg", "fedinit-0.1"]) is None
    True
    """
    for cut in range(1, 1 + min((arm.count("_") for arm in arms), default=0)):
        pieces = [
            ("_".join(arm.split("_")[:-cut]), "_".join(arm.split("_")[-cut:])) for arm in arms
        ]
        rows, columns = (list(dict.fromkeys(side)) for side in zip(*pieces, strict=True))
        if min(len(rows), len(columns)) > 1 and len(set(pieces)) == len(rows) * len(columns):
            return rows, columns, dict(zip(pieces, arms, strict=True))
    return None


@styled
def layers(summary: Summary) -> list[Drawing]:
    """Consensus distance of each layer, averaged over time and seeds, in every form that was logged."""
    logged = forms(summary.found.runs)
    if not logged:
        return []
    longest = max(len(own) for own in logged.values())
    drawn = figure(min(11.0, 1.2 + max(3.2, 0.32 * longest + 1) * len(logged) + 1.4), 3.6)
    handles = {}
    for place, (form, own) in enumerate(logged.items(), start=1):
        axes = drawn.add_subplot(1, len(logged), place)
        for number, (name, arm) in enumerate(summary.arms.items()):
            means = np.array([over_time(arm.runs, form + layer) for layer in own], dtype=float)
            if np.isfinite(means).any():
                (handles[name],) = axes.plot(
                    means, marker="o", markersize=4, **{**look(number), "linewidth": 1.3}
                )
        logarithmic(axes)
        axes.set_xticks(
            range(len(own)), own, rotation=60 if longest > 4 else 25, ha="right", fontsize=8
        )
        axes.set_title(FORMS[form], fontsize=9.5)
        plain(axes)
    legend(drawn, list(handles.values()), list(handles))
    caption = "Averaged over all rounds and seeds; layers from the input on."
    caption += " The forms can rank layers differently." if len(logged) > 1 else ""
    return [Drawing("consensus", "Consensus distance by layer", caption, drawn)]
