"""Methods beside each other: the accuracy of tuned arms, with what they cost, as tables and drawn.

The runs are those of sweeps with a setting per degree of heterogeneity, of which
``studies.methods keep`` keeps the tables.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes

from fl_lightning.lab.report.cells import NONE, PERCENT
from fl_lightning.lab.report.drawing import INK, figure, logarithmic, plain, saved, style, styled
from fl_lightning.lab.report.intervals import paired as interval_of
from fl_lightning.lab.report.runs import ReportedRun, find
from fl_lightning.lab.report.scores import summed
from fl_lightning.lab.report.summary import Arm, Summary, summarise
from fl_lightning.lab.report.verdicts import Comparison
from studies.chosen import Choice, choices

METRIC = "val/acc"
BASE = "fedavg"
COLUMNS = (
    "method",
    "accuracy, %",
    "more than FedAvg, points",
    "chosen",
    "bytes",
    "gradients",
    "processor time",
)
AXES = {"bytes": "bytes, × FedAvg's", "gradients": "gradients, × FedAvg's"}
# A difference whose p is below this, after Holm's correction, has a star.
LEVEL = 0.05


@dataclass(frozen=True)
class Costs:
    """The costs of a run of an arm, as means over its seeds.

    ``seconds`` are of the runs that had the fewest cores, since threads share their work at a
    price; None where they were not kept.
    """

    bytes: float
    gradients: float
    seconds: float | None

    def over(self, base: Costs) -> dict[str, float | None]:
        """Each cost as a multiple of ``base``'s."""
        seconds = None
        if self.seconds is not None and base.seconds is not None:
            seconds = self.seconds / base.seconds
        return {
            "bytes": self.bytes / base.bytes,
            "gradients": self.gradients / base.gradients,
            "seconds": seconds,
        }


@dataclass(frozen=True)
class Row:
    """An arm in its setting: its score, its difference from FedAvg, its choice and its costs."""

    method: str
    arm: Arm
    costs: Costs
    more: Comparison | None
    choice: Choice | None

    @property
    def accuracy(self) -> float:
        """The mean of the seeds' scores; no number is worse than every number."""
        mean = self.scores["mean"]
        return -1.0 if mean is None else float(mean)

    @property
    def scores(self) -> dict[str, Any]:
        scores: dict[str, Any] = self.arm.to_json()["scores"]["tail"]
        return scores

    def cells(self, base: Costs) -> list[str]:
        ratios = self.costs.over(base)
        return [
            f"**{self.method}**" if self.method == BASE else self.method,
            PERCENT.value(self.scores["mean"], self.scores["sd"]),
            difference(self.more),
            taken(self.choice),
            *(NONE if ratio is None else f"{ratio:.2g}" for ratio in ratios.values()),
        ]


def tables(rows: Mapping[str, Sequence[Row]], names: Sequence[str], settings: Sequence[str]) -> str:
    """A table per setting, the best arm first, and the names of the arms that have not run.

    Args:
        rows: setting → its arms that have run.
        names: the methods of the grid.
        settings: the settings of the grid.
    """
    made = []
    for setting in settings:
        found = rows.get(setting, [])
        base = next((row.costs for row in found if row.method == BASE), None)
        if base is not None:
            told = wrapped(f"**{setting}.** {of_base(base, found)}")
            cells = table(COLUMNS, [line(row.cells(base)) for row in found])
            said = [wrapped(text) for text in (told_apart(found), beside_the_first(found))]
            made.append("\n\n".join([told, cells + "\n" + said[0], said[1]]) + "\n")
        begun = {row.method for row in found}
        if waiting := [name for name in names if name not in begun]:
            made.append(wrapped(f"Not run yet with {setting}: {', '.join(waiting)}.") + "\n")
    return "\n".join(made)


def ranked(folders: Sequence[Path]) -> dict[str, list[Row]]:
    """Setting → its arms that have ended runs, the most accurate first."""
    if not folders:
        return {}
    found = find(folders)
    # With claims a summary compares only their arms, and here each is compared with FedAvg.
    found.sweeps = [replace(sweep, claims=None) for sweep in found.sweeps]
    summary = summarise(found, METRIC)
    chosen = {choice.arm: choice for sweep in found.sweeps for choice in choices(sweep)}
    made: dict[str, list[Row]] = {}
    for setting, arms in summary.settings.items():
        rows = [
            Row(method, summary.arms[arm], costs, paired(summary, arm), chosen.get(arm))
            for method, arm in arms.items()
            if (costs := spent(summary.arms[arm].runs))
        ]
        made[setting] = sorted(rows, key=lambda row: (-row.accuracy, row.method))
    return made


def spent(runs: Sequence[ReportedRun]) -> Costs | None:
    """The costs of an arm's runs that have ended well; None if none has."""
    done = [run for run in runs if run.status == "done"]
    if not done:
        return None
    fewest = min(run.machine["cores"] for run in done)
    timed = [r for r in done if r.machine["cores"] == fewest and "time/cpu" in r.columns]
    return Costs(
        fmean(float(run.column("communication/total_bytes")[-1]) for run in done),
        fmean(float(summed(run, "cost/gradients")[-1]) for run in done),
        fmean(float(summed(run, "time/cpu")[-1]) for run in timed) if timed else None,
    )


def paired(summary: Summary, arm: str) -> Comparison | None:
    """The comparison of an arm with FedAvg of its setting; None for FedAvg itself."""
    return next((pair for pair in summary.pairs if pair.claim.a == arm), None)


def difference(pair: Comparison | None) -> str:
    """A difference with its interval, and its star: ``+1.95 [+1.80, +2.11] *``.

    >>> difference(None)
    '–'
    """
    if pair is None or pair.interval.low is None:
        return "–"
    bounds = [PERCENT.difference(getattr(pair.interval, key)) for key in ("mean", "low", "high")]
    return "{} [{}, {}]".format(*bounds) + " *" * starred(pair)


def taken(choice: Choice | None) -> str:
    """What an arm chose; ↓ where it is the least value that was tried, ↑ where the greatest.

    >>> tried = {"model.learner.init_args.lr": ["0.1", "0.3"]}
    >>> taken(Choice("a", {"model.learner.init_args.lr": "0.3"}, tried, 2)), taken(None)
    ('lr 0.3↑', '')
    """
    if choice is None:
        return ""
    words = []
    for option, value in choice.taken.items():
        tried = choice.tried[option]
        end = {tried[0]: "↓", tried[-1]: "↑"}.get(value, "") if len(tried) > 1 else ""
        server = "server " * ("server_optimizer" in option)
        words.append(f"{server}{option.rpartition('.')[2]} {value}{end}")
    return ", ".join(words)


def of_base(base: Costs, rows: Sequence[Row]) -> str:
    """What the multiples are multiples of, and which arms have fewer runs than others."""
    text = f"A run of FedAvg sends {base.bytes / 1e6:.0f} MB and computes {base.gradients:,.0f} "
    text += "gradients of a batch"
    if base.seconds is not None:
        text += f" in {base.seconds:.0f} processor seconds"
    runs = {row.method: len(row.scores["values"]) for row in rows}
    most = max(runs.values())
    fewer = [f"{method} ({number})" for method, number in runs.items() if number < most]
    told = f" Fewer have run of {', '.join(fewer)}." if fewer else ""
    return f"{text}. Seeds: {most}.{told}"


def told_apart(rows: Sequence[Row]) -> str:
    """The arms with a star, ahead of FedAvg and behind it, and the number of the others."""
    pairs = {row.method: row.more for row in rows if row.more is not None}
    sure = {name: pair.interval.mean or 0.0 for name, pair in pairs.items() if starred(pair)}
    ahead = [name for name, mean in sure.items() if mean > 0]
    behind = [name for name, mean in sure.items() if mean < 0]
    rest = [pair.interval for name, pair in pairs.items() if name not in sure]
    near = sum(interval.p is not None and interval.p < LEVEL for interval in rest)
    text = f"Ahead of FedAvg with a star: {', '.join(ahead) or 'none'}. "
    text += f"Behind it with a star: {', '.join(behind) or 'none'}. "
    text += f"Without a star: {len(rest)} of {len(pairs)}; of these, the intervals of {near} "
    return f"{text}leave out 0."


def beside_the_first(rows: Sequence[Row]) -> str:
    """The arms of which 0 lies in the uncorrected interval of the difference from the first."""
    first, *others = rows
    best = first.arm.scores["tail"]
    alike = []
    for row in others:
        scores = row.arm.scores["tail"]
        both = [(scores[seed], score) for seed, score in best.items() if seed in scores]
        high = interval_of([(a or 0.0) - (b or 0.0) for a, b in both]).high
        if high is None or high >= 0:
            alike.append(row.method)
    names = ", ".join(alike) or "none"
    text = f"The uncorrected interval of the difference from the first, {first.method}, "
    return f"{text}holds 0 for {names}."


def starred(pair: Comparison) -> bool:
    """Whether a difference has a star: its p is below the level after Holm's correction."""
    return pair.p_holm is not None and pair.p_holm < LEVEL


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(columns: Sequence[str], rows: Sequence[str]) -> str:
    return "\n".join([line(columns), "|" + "---|" * len(columns), *rows]) + "\n"


def wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False)


# --------------------------------------------------------------------------- drawn


def best(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The names that no other one beats, the cheapest first: none is as cheap and more accurate.

    >>> best({"a": (1.0, 0.8), "b": (2.0, 0.9), "c": (2.0, 0.7), "d": (1.0, 0.7)})
    ['a', 'b']
    """
    front: list[str] = []
    for name, (_, accuracy) in sorted(points.items(), key=lambda item: (item[1][0], -item[1][1])):
        if not front or accuracy > points[front[-1]][1]:
            front.append(name)
    return front


@styled
def drawn(rows: Mapping[str, Sequence[Row]]) -> bytes:
    """Accuracy against bytes and against gradients, a row of panels per setting, as PNG.

    A line joins the methods that no other one beats.
    """
    made = figure(11.0, 4.4 * len(rows), wide=True)
    panels = made.subplots(len(rows), len(AXES), squeeze=False)
    for (setting, found), line in zip(rows.items(), panels, strict=True):
        for (cost, title), axes in zip(AXES.items(), line, strict=True):
            panel(axes, dict(of_panel(found, cost)))
            axes.set_title(setting)
            axes.set_xlabel(title)
            axes.set_ylabel("test accuracy, %")
    return saved(made, "png")


def of_panel(rows: Sequence[Row], cost: str) -> Iterator[tuple[str, tuple[float, float]]]:
    base = next(row.costs for row in rows if row.method == BASE)
    for row in rows:
        yield row.method, (row.costs.over(base)[cost] or 0.0, 100 * row.accuracy)


def panel(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    front = best(points)
    colour = style().colours[0]
    low = min(y for _, y in points.values())
    high = max(y for _, y in points.values())
    # Arms far below all others would leave no room to tell the rest apart.
    floor = max(low, points[BASE][1] - 2 * (high - points[BASE][1]) - 2)
    right = max(x for x, _ in points.values())
    for name, (x, y) in points.items():
        if y < floor:
            continue
        on_front = name in front
        axes.plot(x, y, "o", color=colour if on_front else INK, alpha=1.0 if on_front else 0.45)
        if on_front or name == BASE:
            beside = {"ha": "right", "xytext": (-6, 4)} if x == right > 1 else {"xytext": (5, 4)}
            axes.annotate(name, (x, y), textcoords="offset points", fontsize=8.5, **beside)
    axes.step(*zip(*(points[name] for name in front), strict=True), where="post", color=colour)
    # Methods that compress send some hundredths of FedAvg's bytes.
    if right > 8 * min(x for x, _ in points.values()):
        logarithmic(axes, "x")
    plain(axes, "both")
