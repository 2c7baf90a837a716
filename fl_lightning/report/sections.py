"""The tables of a report, worded from its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from fl_lightning.report.budgets import CPU, View, views
from fl_lightning.report.claimed import claims, difference_unit, interval, unit_of
from fl_lightning.report.communication import Traffic, over, papers_ratio, to_target, traffic
from fl_lightning.report.intervals import mean_sd
from fl_lightning.report.layers import FORMS, forms, over_time
from fl_lightning.report.published import published
from fl_lightning.report.runs import Run
from fl_lightning.report.scores import SCORES, measured, window
from fl_lightning.report.summary import Arm, Summary
from fl_lightning.report.tables import Cell, Table, mark_best
from fl_lightning.report.wording import NONE, SCORE_TITLES, p_value, seconds, size, times


def tables(summary: Summary) -> list[Table]:
    """Every table that has something to say, in the order of the page."""
    made = [
        claims(summary),
        scores(summary),
        pivot(summary),
        pairs(summary),
        *targets(summary),
        budgets(summary),
        communication(summary),
        *consensus(summary),
        *beside_published(summary),
        runs(summary),
    ]
    return [table for table in made if table.rows]


def metric_title(summary: Summary) -> str:
    """The report's metric with its unit."""
    if unit_of(summary).percent:
        return f"{summary.metric}, %"
    return summary.metric


def pivot(summary: Summary) -> Table:
    """Methods by settings, where there are several of either."""
    shown = unit_of(summary)
    title = f"Methods by settings: {metric_title(summary)}, {SCORE_TITLES[SCORES[0]]}"
    table = Table("pivot", title, ["method", *summary.settings])
    if len(summary.settings) < 2:
        return table
    methods: dict[str, str] = {}
    for arms in summary.settings.values():
        methods |= arms
    for method in methods:
        cells = []
        for arms in summary.settings.values():
            mean = sd = None
            if method in arms:
                mean, sd = summary.arms[arms[method]].mean_sd(SCORES[0])
            cells.append(Cell(shown.value(mean, sd), mean))
        table.add(method, *cells)
    for column in range(1, 1 + len(summary.settings)):
        mark_best(table, column, lambda: summary.greater)
    table.note = (
        "Mean ± sample deviation over seeds. Arms are compared within a setting, with its first."
    )
    return table


def scores(summary: Summary) -> Table:
    """Mean ± deviation of each arm by each score."""
    shown = unit_of(summary)
    columns = ["arm", *(SCORE_TITLES[score] for score in SCORES), "runs", "diverged", "unfinished"]
    table = Table("scores", f"Scores: {metric_title(summary)}", columns)
    for arm in summary.arms.values():
        means = [arm.mean_sd(score) for score in SCORES]
        counts = (len(arm.finished), arm.diverged, arm.unfinished)
        table.add(
            arm.name,
            *(Cell(shown.value(mean, sd), mean) for mean, sd in means),
            *(Cell(str(count), count) for count in counts),
        )
    for column in range(1, 1 + len(SCORES)):
        mark_best(table, column, lambda: summary.greater)
    widths = windows(summary)
    curve = f"curve under a Hanning window of {widths}"
    if widths == "1":
        curve = "unsmoothed curve, as there are too few rounds"
    table.note = (
        f"Mean ± sample deviation over seeds. Smoothed: highest of the last 50 of the {curve}. "
        f"{_lost(summary)}Unfinished runs are kept out."
    )
    return table


def _lost(summary: Summary) -> str:
    """Say what a diverged run has, where one lost a score."""
    if not summary.scored or not any(arm.diverged for arm in summary.arms.values()):
        return ""
    return "A diverged run scores 0. " if summary.greater else "A diverged run has no score. "


def windows(summary: Summary) -> str:
    """How many values are smoothed over, in the runs that are done."""
    done = [run for run in summary.found.runs if run.status == "done"]
    lengths = {len(measured(run, summary.metric)[0]) for run in done}
    widths = sorted({max(1, window(length)) for length in lengths if length})
    return " or ".join(map(str, widths)) or NONE


def pairs(summary: Summary) -> Table:
    """Paired intervals with Holm's correction."""
    columns = ["a − b", "metric", "mean", "95 % interval", "sd", "n", "p", "p, Holm"]
    table = Table("pairs", "Paired differences in numbers", columns)
    for pair in summary.pairs:
        between = pair.interval
        shown = difference_unit(summary, pair)
        name = f"log {pair.a} / {pair.b}"
        if pair.scale == "difference":
            name = f"{pair.a} − {pair.b}"
        mean = shown.difference(between.mean)
        if between.mean is not None:
            mean += f" {shown.of_difference}"
        table.add(
            name,
            f"{pair.metric}, {SCORE_TITLES[pair.score]}",
            Cell(mean, between.mean),
            interval(shown, pair),
            Cell(shown.difference(between.sd).lstrip("+"), between.sd),
            Cell(str(between.n), between.n),
            Cell(p_value(between.p), between.p),
            Cell(p_value(pair.p_holm), pair.p_holm),
        )
    table.note = (
        "Differences of runs with the same seed, and so the same partition; Student's t, "
        "two-sided; p also by Holm's step-down correction over the rows of this table."
    )
    return table


def targets(summary: Summary) -> list[Table]:
    """Tables of rounds, bytes and seconds until each target, and of traffic against the first arm.

    Traffic is counted by both conventions.
    """
    # Where no run logs the metric there is nothing to reach.
    if not summary.scored:
        return []
    made = []
    for target in summary.targets:
        sign = "≥" if summary.greater else "≤"
        columns = [
            "arm",
            "rounds",
            "sent",
            "time",
            "reached by",
            "sent, × first arm",
            "as papers count, × first arm",
        ]
        table = Table(f"target-{target}", f"Until {summary.metric} {sign} {target}", columns)
        first = next(iter(summary.arms.values()))
        for arm in summary.arms.values():
            costs = list(arm.reached[target].values())
            hits = [cost for cost in costs if cost["rounds"] is not None]
            sent = _ratio_sent(arm, first, target)
            as_papers_count = _ratio_papers(arm, first, target)
            table.add(
                arm.name,
                _mean_cell([hit["rounds"] for hit in hits], _rounds),
                _mean_cell([hit["bytes"] for hit in hits], size),
                _mean_cell([hit["seconds"] for hit in hits], seconds),
                Cell(f"{len(hits)} of {len(costs)}", len(hits)),
                Cell(times(sent), sent),
                Cell(times(as_papers_count), as_papers_count),
            )
        # Whatever the metric, to spend less until the target is better.
        for column in (1, 2, 3):
            mark_best(table, column, lambda: False)
        table.note = (
            f"First round in which the smoothed curve is {sign} {target}; means over the seeds "
            "that reached it, which flatters an arm that some seeds never took there. Bytes are "
            "counted from messages, both directions. The papers count one vector a client and "
            "round, two for SCAFFOLD, FedCM, MoFedSAM, FedGamma and FedSMOO; FedALS counts "
            "parameters sent one way."
        )
        made.append(table)
    return made


def _rounds(count: float) -> str:
    return f"{count:.1f}".removesuffix(".0")


def _mean_cell(values: Sequence[Any], wording: Any) -> Cell:
    if not values or any(value is None for value in values):
        return Cell(NONE)
    return Cell(wording(fmean(values)), fmean(values))


def _ratio_sent(arm: Arm, first: Arm, target: str) -> float | None:
    ours = to_target(arm, target, "bytes")
    theirs = to_target(first, target, "bytes")
    return ours / theirs if ours is not None and theirs else None


def _ratio_papers(arm: Arm, first: Arm, target: str) -> float | None:
    ours = to_target(arm, target, "rounds")
    theirs = to_target(first, target, "rounds")
    a_round = papers_ratio(traffic(arm), traffic(first))
    return a_round * ours / theirs if a_round is not None and ours is not None and theirs else None


def budgets(summary: Summary) -> Table:
    """The smoothed metric at equal rounds, gradients, bytes and seconds."""
    shown = unit_of(summary)
    made = views(by_arm(summary), summary.metric)
    title = f"At equal cost: {metric_title(summary)}, last third of what was spent"
    table = Table("budgets", title, ["arm", *(_budget(view) for view in made)])
    if not made:
        return table
    for name in summary.arms:
        cells = []
        for view in made:
            mean, sd = mean_sd([value for value in view.values[name].values() if value is not None])
            cells.append(Cell(shown.value(mean, sd), mean))
        table.add(name, *cells)
    for column in range(1, 1 + len(made)):
        mark_best(table, column, lambda: summary.greater)
    table.note = (
        "Each column is what the run that spent least spent in all: every run is scored by its "
        "mean over the last third of that, and by nothing later. Seconds are the processor's, all "
        "threads and processes; on a GPU the clock's, of runs that did not overlap."
    )
    return table


def by_arm(summary: Summary) -> dict[str, list[Run]]:
    """Runs by arm."""
    return {name: arm.runs for name, arm in summary.arms.items()}


def _budget(view: View) -> str:
    whose = "of processors" if view.what == CPU else "of rounds"
    return {
        "rounds": f"{view.budget:.0f} rounds",
        "gradients": f"{view.budget:,.0f} gradients",
        "bytes": f"{size(view.budget)} sent",
        "seconds": f"{seconds(view.budget)} {whose}",
    }[view.axis]


def communication(summary: Summary) -> Table:
    """What a round sends, by both conventions."""
    columns = [
        "arm",
        "sent a round",
        "× first arm",
        "vectors a client, as papers count",
        "× first arm, as papers count",
    ]
    table = Table("communication", "Communication a round", columns)
    counted = {name: traffic(arm) for name, arm in summary.arms.items()}
    first = next(iter(counted.values()))
    # Where no run sent anything there is no table.
    if not any(each.bytes for each in counted.values()):
        return table
    for name, each in counted.items():
        ours = over(each.bytes, first.bytes)
        theirs = papers_ratio(each, first)
        table.add(
            name,
            Cell(size(each.bytes), each.bytes),
            Cell(times(ours), ours),
            Cell(_vectors(each), each.papers),
            Cell(times(theirs), theirs),
        )
    table.note = (
        "Sent: counted from the messages of every round, both directions, buffers apart. The "
        "papers count FedCM and MoFedSAM twice, but only what goes down doubles: 1.5 times FedAvg."
    )
    return table


def _vectors(each: Traffic) -> str:
    if each.papers is None:
        return NONE
    return "by part" if each.partial else str(each.papers)


def consensus(summary: Summary) -> list[Table]:
    """A table for each form of the consensus distance of layers that was logged."""
    made = []
    for form, layers in forms(summary.found.runs).items():
        title = f"Consensus distance by layer, {FORMS[form]}"
        table = Table(f"consensus-{form.strip('/')}", title, ["layer", *summary.arms], folded=True)
        for layer in layers:
            cells = []
            for arm in summary.arms.values():
                mean = over_time(arm.runs, form + layer)
                cells.append(Cell(NONE if mean is None else f"{mean:.3g}", mean))
            table.add(layer, *cells)
        table.note = "Averaged over all rounds and seeds; layers from the input on."
        made.append(table)
    return made


def beside_published(summary: Summary) -> list[Table]:
    """The published numbers of the experiments that the runs name, beside ours.

    Each row says what differs in the setting.
    """
    made = []
    shown = unit_of(summary)
    for number, printed in enumerate(published(summary.found), start=1):
        columns = [
            "arm",
            "published",
            f"ours ({SCORE_TITLES[printed.score]})",
            "what differs: ours (published)",
        ]
        table = Table(f"published-{number}", f"Beside {printed.source}", columns)
        for arm in summary.arms.values():
            theirs = printed.of(arm.name)
            if theirs is None or printed.metric != summary.metric:
                continue
            mean, sd = arm.mean_sd(printed.score)
            config = arm.runs[0].config
            differs = "no config.yaml to compare"
            if config:
                differs = "; ".join(printed.differences(config)) or "nothing"
            table.add(
                arm.name,
                Cell(shown.value(*theirs), theirs[0]),
                Cell(shown.value(mean, sd), mean),
                differs,
            )
        table.note = f"{printed.note} A smaller twin says nothing of the published number."
        made.append(table)
    return made


def runs(summary: Summary) -> Table:
    """Every run and where it is."""
    shown = unit_of(summary)
    columns = ["arm", "seed", "status", "rounds", SCORE_TITLES[SCORES[0]], "folder"]
    table = Table("runs", "Runs", columns)
    for arm in summary.arms.values():
        for run in arm.runs:
            score = arm.scores[SCORES[0]].get(run.seed)
            asked = run.record.get("rounds")
            rounds = f"{run.rounds_done}"
            if asked and asked != run.rounds_done:
                rounds += f" of {asked}"
            table.add(
                arm.name,
                Cell(str(run.seed), run.seed),
                Cell(run.status, mark=f"status {run.status}"),
                Cell(rounds, run.rounds_done),
                Cell(shown.value(score), score),
                str(run.folder),
            )
    return table
