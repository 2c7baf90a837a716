"""The tables of a report, made from its numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from fl_lightning.lab.report.cells import (
    NONE,
    PERCENT,
    Cell,
    Rows,
    Table,
    Unit,
    cell,
    p_value,
    seconds,
    size,
    times,
)
from fl_lightning.lab.report.claims import Claim
from fl_lightning.lab.report.intervals import mean_sd
from fl_lightning.lab.report.runs import differing
from fl_lightning.lab.report.scores import (
    FORMS,
    OF_CLIENTS,
    SCORE_TITLES,
    SCORES,
    BudgetView,
    forms,
    measured,
    over_time,
    views,
)
from fl_lightning.lab.report.summary import Arm, Summary, first_arms, group_of_arms, known
from fl_lightning.lab.report.verdicts import Comparison
from fl_lightning.metrics import is_accuracy

MAIN = SCORES[0]
SIGNS = {"greater": ">", "less": "<"}
_ONE = {"cores": "core", "threads": "thread", "processes": "process"}

# The longer notes below tables.
CLAIMS_NOTE = (
    "Reproduced: the interval excludes 0 in the claimed direction, p after Holm's correction "
    "within the claim's family is below 0.05, and the mean is at least the margin. "
    "Contradicted: the interval lies on the other side of 0, and p after Holm's correction is "
    "below 0.05. No margin applies here. "
    "Not reproduced: the interval's upper end, counted in the claimed direction, is below the "
    "margin. "
    "Inconclusive: all other cases, and always if there are fewer than five pairs, or if a seed "
    "that is left out because its run has lost would speak against the verdict. "
    "Equivalence (≈) is tested by two one-sided tests against ± margin, which correspond to the "
    "90 % interval: p before Holm's correction is below 0.05 if this interval lies within "
    "± margin. Equivalence is reproduced if p after Holm's correction is below 0.05, and "
    "contradicted if the 95 % interval lies outside ± margin. "
    "Divergence is reproduced if the claim holds in every seed. It needs at least three seeds. "
    "Provisional: some runs of the claim's family are missing. "
    "These runs say nothing about a number that was published for another network, other data or "
    "another number of rounds."
)
PAIRS_NOTE = (
    "Each difference is between two runs with the same seed, and so with the same partition. "
    "Intervals and p come from Student's t, two-sided. The last column is p after Holm's step-down "
    "correction over the rows of this table."
)
SCORES_NOTE = (
    "Mean ± sample standard deviation over seeds. Smoothed: the {end} of the last 50 values of the "
    "curve, which is smoothed by a Hann window over at most a fifth of its values. A run has "
    "lost if it diverged, or if a value that counts is not finite. A lost run scores 0 if greater "
    "is better and no run has a value below 0, and otherwise has no score. Unfinished runs are not "
    "included."
)
TARGETS_NOTE = (
    "A run reaches the target in the first round in which its smoothed curve is {sign} {target}. "
    "Means are over the seeds that reached it, so an arm looks better than it is if some of its "
    "seeds never did. Bytes are counted from the messages, in both directions."
)
BUDGETS_NOTE = (
    "The head of each column is its budget: the total cost of the run that spent least. Every run "
    "is scored by its mean over the last third of this budget. Rounds after the budget was "
    "spent do not count."
)
SECONDS_NOTE = (
    " Seconds are processor seconds of all threads and processes (time/cpu). Other work on the "
    "machine still lengthens them."
)
SETTINGS_NOTE = (
    "Differences between the first runs of the arms, besides their methods. A difference between "
    "scores may have these reasons, too."
)
CLIENTS_NOTE = (
    "Each client is measured on its own test samples, in the last round that measured them. "
    "Numbers are the mean ± sample standard deviation over seeds. Deviation over clients: the "
    "standard deviation between the clients of a run. Worst 10 %: the mean over the "
    "worst tenth of the clients. Worst domain: the mean of its clients, weighted by their numbers "
    "of test samples."
)


def tables(summary: Summary) -> list[Table]:
    """Return every table that has rows, in the order of the page."""
    made = [
        claims(summary),
        evidence(summary),
        scores(summary),
        pivot(summary),
        *([] if summary.verdicts else [pairs(summary)]),
        *targets(summary),
        *budgets(summary),
        communication(summary),
        clients(summary),
        *consensus(summary),
        settings(summary),
        runs(summary),
    ]
    return [table for table in made if table.rows]


def unit_of(summary: Summary, metric: str | None = None) -> Unit:
    """Return how this report shows values of ``metric`` (None: the report's own metric)."""
    name = metric or summary.metric
    # Some accuracies are logged in percent already; their highest value is above 1.
    values = [measured(run, name)[1] for run in summary.found.runs]
    highest = max((float(v.max()) for v in values if len(v)), default=1.0)
    return PERCENT if is_accuracy(name) and highest <= 1.0 else Unit()


def metric_title(summary: Summary) -> str:
    """Return the report's metric with its unit."""
    name = summary.called(summary.metric)
    return f"{name}, %" if unit_of(summary).percent else name


# ----------------------------------------------------------------------- claims and pairs


def difference_unit(summary: Summary, compared: Comparison) -> Unit:
    """Return the unit in which a claim's differences are shown."""
    plain = compared.claim.unit == "difference"
    return unit_of(summary, compared.claim.metric) if plain else Unit()


def interval_cell(shown: Unit, said: Comparison) -> Cell:
    """Return the interval of the test, or the reason why there is no interval."""
    if said.ends is None:
        return Cell("needs 2 pairs" if said.interval.n == 1 else NONE)
    low, high = said.ends
    text = f"{shown.difference(low)} to {shown.difference(high)}"
    return Cell(f"{text} (90 %)" if said.percent == 90 else text, low)


def claims(summary: Summary) -> Table:
    """Return the claims and their verdicts, each family's primary claim first."""
    columns = "claim|verdict|a − b|95 % interval|p, Holm|margin|n"
    rows = [_claim(summary, said) for said in shown_first(summary.verdicts)]
    table = Table("claims", "Claims", columns.split("|"), rows, CLAIMS_NOTE)
    # The table of what the runs were made for is never folded.
    table.folded = False
    return table


def evidence(summary: Summary) -> Table:
    """Return the evidence for each verdict: every seed, and both predictions."""
    columns = ["claim", "value by seed", "predicted"]
    rows: Rows = []
    for said in shown_first(summary.verdicts):
        claim = said.claim
        shown = difference_unit(summary, said)
        values = said.evidence.values
        seeds = [f"{seed}: {shown.difference(value)}" for seed, value in values.items()]
        predictions = {"the paper": claim.paper_predicts, "we": claim.we_predict}
        predicted = [f"{who}: {text}" for who, text in predictions.items() if text]
        row = (claim.id, ", ".join(seeds), "; ".join(predicted))
        rows.append([text or NONE for text in row])
    title = "Each claim's values by seed, and predictions"
    return Table("claims-evidence", title, columns, rows, folded=True)


def _claim(summary: Summary, said: Comparison) -> list[Any]:
    """Return the row of one claim."""
    claim = said.claim
    between = said.interval
    shown = difference_unit(summary, said)
    if claim.kind == "diverges":
        # The margin is a factor between two scores, and a seed diverges or does not.
        margin = f"× {claim.factor:g}"
        diverged = sum(said.evidence.values.values())
        mean = Cell(f"{diverged:g} of {between.n} diverged" if between.n else NONE, between.mean)
    else:
        margin = shown.difference(claim.margin, named=True).lstrip("+")
        mean = cell(shown.difference, between.mean)
    n = f"{between.n}"
    if said.evidence.left_out:
        n += f" ({said.evidence.left_out} left out)"
    return [
        f"{claim.id}: {sentence(claim, summary.called)}{' (primary)' * claim.primary}",
        Cell(said.printed, mark="verdict " + said.verdict.replace(" ", "-")),
        mean,
        interval_cell(shown, said),
        cell(p_value, said.p_holm),
        Cell(margin, claim.margin),
        Cell(n, between.n),
    ]


def shown_first(verdicts: Sequence[Comparison]) -> list[Comparison]:
    """Return families in their order, each with its primary claim first."""
    families = list(dict.fromkeys(said.claim.family for said in verdicts))
    return sorted(
        verdicts, key=lambda said: (families.index(said.claim.family), not said.claim.primary)
    )


def sentence(claim: Claim, called: Callable[[str], str] = str) -> str:
    """Return a claim in words: ``fedinit-0.1 > fedavg in val/acc (last third of gradients)``.

    ``called``: names of metrics.
    """
    metric = called(claim.metric)
    sign = SIGNS[claim.direction]
    score = SCORE_TITLES[claim.score]
    where = f"in {metric} ({score}{', log ratio' * (claim.scale == 'log_ratio')})"
    if claim.kind == "equivalence":
        return f"{claim.a} ≈ {claim.b} {where}"
    if claim.kind == "interaction":
        return f"({claim.a} − {claim.b}) {sign} ({claim.c} − {claim.d}) {where}"
    if claim.kind == "to_target":
        target = f"{claim.target:g}"
        if claim.target_arm:
            target = f"{claim.target_arm}'s {SCORE_TITLES[claim.target_score]}"
        until = f"until {metric} reaches {target}"
        return f"{claim.a} {sign} {claim.b} in {claim.cost} {until} (log ratio)"
    if claim.kind == "trend":
        of_arm = f" of {claim.arm}" if claim.arm else ""
        turns = {"greater": "rises", "less": "falls"}[claim.direction]
        return f"{metric}{of_arm} {turns} over {claim.over} (Spearman's ρ)"
    if claim.kind == "diverges":
        diverges = {"greater": "diverges", "less": "does not diverge"}[claim.direction]
        least = f"{metric} ≥ {claim.factor:g} × that of {claim.against}"
        return f"{claim.arm} {diverges} ({least}, {score})"
    seeds = " in every seed" * (claim.kind == "every_seed")
    return f"{claim.a} {sign} {claim.b} {where}{seeds}"


def pairs(summary: Summary) -> Table:
    """Return paired intervals with Holm's correction, for a report without claims."""
    columns = ["a − b", "metric", "mean", "95 % interval", "sd", "n", "p", "p, Holm"]
    rows: Rows = []
    for pair in summary.pairs:
        claim = pair.claim
        between = pair.interval
        shown = difference_unit(summary, pair)
        rows.append(
            [
                f"{claim.a} − {claim.b}",
                f"{summary.called(claim.metric)}, {SCORE_TITLES[claim.score]}",
                Cell(shown.difference(between.mean, named=True), between.mean),
                interval_cell(shown, pair),
                Cell(shown.difference(between.sd).lstrip("+"), between.sd),
                cell(str, between.n),
                cell(p_value, between.p),
                cell(p_value, pair.p_holm),
            ]
        )
    return Table("pairs", "Paired differences in numbers", columns, rows, PAIRS_NOTE)


# ------------------------------------------------------------------------------- scores


def pivot(summary: Summary) -> Table:
    """Return methods by settings, if there are several of either."""
    shown = unit_of(summary)
    title = f"Methods by settings: {metric_title(summary)}, {SCORE_TITLES[MAIN]}"
    methods: dict[str, str] = {}
    if len(summary.settings) > 1:
        for arms in summary.settings.values():
            methods |= arms
    rows: Rows = []
    for method in methods:
        row: list[Any] = [method]
        for arms in summary.settings.values():
            arm = summary.arms.get(arms.get(method, ""))
            row.append(_mean(shown, arm.scores[MAIN], arm) if arm else Cell(NONE))
        rows.append(row)
    note = "Mean ± sample standard deviation over seeds."
    if summary.verdicts:
        note += " Only the claims are tested."
    elif summary.pairs:
        note += " Each arm is compared with the first arm of its setting."
    table = Table("pivot", title, ["method", *summary.settings], rows, note)
    return table.with_best(range(1, len(table.columns)), lambda: summary.greater)


def scores(summary: Summary) -> Table:
    """Return mean ± deviation of each arm by each score."""
    shown = unit_of(summary)
    columns = ["arm", *SCORE_TITLES.values(), "runs", "diverged", "unfinished"]
    rows: Rows = []
    for arm in summary.arms.values():
        means = [_mean(shown, arm.scores[score], arm) for score in SCORES]
        counts = (len(arm.finished), arm.diverged, arm.unfinished)
        rows.append([arm.name, *means, *(cell(str, count) for count in counts)])
    several = len(set(group_of_arms(summary).values())) > 1
    end = "lowest" if summary.found.directions.known(summary.metric) is False else "highest"
    note = SCORES_NOTE.format(end=end) + " Bold marks the best arm of each sweep." * several
    table = Table("scores", f"Scores: {metric_title(summary)}", columns, rows, note)
    return table.with_best(
        range(1, 1 + len(SCORES)), lambda: summary.greater, group_of_arms(summary)
    )


# -------------------------------------------------------------------------------- costs


def targets(summary: Summary) -> list[Table]:
    """Return tables of rounds, bytes and seconds until each target."""
    # If no run logs the metric, there is no target to reach.
    if not summary.scored:
        return []
    time = "time|" * summary.timed
    columns = f"arm|rounds|sent|{time}reached by|sent, × first arm"
    costs: dict[str, Callable[[float], str]] = {"rounds": _rounds, "bytes": size}
    if summary.timed:
        costs["seconds"] = seconds
    firsts = first_arms(summary)
    sign = "≥" if summary.greater else "≤"
    note = TARGETS_NOTE
    if summary.timed:
        note += " Time is wall-clock time, which other work on the machine lengthens."
    made = []
    for target in summary.targets:
        rows: Rows = []
        for arm in summary.arms.values():
            first = summary.arms[firsts[arm.name]]
            reached = arm.reached[target].values()
            hits = [cost for cost in reached if cost["rounds"] is not None]
            row: list[Any] = [arm.name]
            for what, wording in costs.items():
                values = [hit[what] for hit in hits]
                mean = None if None in values or not values else fmean(values)
                row.append(replace(cell(wording, mean), whole=len(hits) == len(reached)))
            row.append(Cell(f"{len(hits)} of {len(reached)}", len(hits)))
            sent = _ratio(arm.mean_until(target, "bytes"), first.mean_until(target, "bytes"))
            rows.append([*row, cell(times, sent)])
        title = f"Until {summary.called(summary.metric)} {sign} {target}"
        told = note.format(sign=sign, target=target)
        table = Table(f"target-{target}", title, columns.split("|"), rows, told)
        # For any metric, reaching the target at lower cost is better.
        made.append(
            table.with_best(range(1, 1 + len(costs)), lambda: False, group_of_arms(summary))
        )
    return made


def _rounds(count: float) -> str:
    return f"{count:.1f}".removesuffix(".0")


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None


def budgets(summary: Summary) -> list[Table]:
    """Return the smoothed metric at equal rounds, gradients, bytes and seconds, of each sweep."""
    parts = summary.by_sweep
    return [_budgets(part, name if len(parts) > 1 else "") for name, part in parts.items()]


def _budgets(summary: Summary, sweep: str) -> Table:
    """Return the arms of one sweep at equal cost, with its name if there are others."""
    shown = unit_of(summary)
    arms = {name: arm.runs for name, arm in summary.arms.items()}
    made = views(arms, summary.metric, summary.timed)
    if sweep:
        # If all runs spent the same, this table repeats the scores.
        made = [view for view in made if not view.alike]
    title = f"At equal cost: {metric_title(summary)}, mean over last third of the budget"
    rows: Rows = []
    for name, arm in summary.arms.items() if made else ():
        rows.append([name, *(_mean(shown, view.values[name], arm) for view in made)])
    columns = ["arm", *map(_budget, made)]
    note = BUDGETS_NOTE
    if any(view.axis == "seconds" for view in made):
        note += SECONDS_NOTE
    key = f"budgets-{sweep}" if sweep else "budgets"
    title = f"{title}: {sweep}" if sweep else title
    table = Table(key, title, columns, rows, note)
    return table.with_best(range(1, 1 + len(made)), lambda: summary.greater, group_of_arms(summary))


def _mean(unit: Unit, values: Mapping[int, float | None], arm: Arm) -> Cell:
    """Return mean ± deviation over the seeds that have a value."""
    of_seeds = known(values)
    return replace(unit.cell(*mean_sd(of_seeds)), whole=len(of_seeds) == len(arm.finished))


def _budget(view: BudgetView) -> str:
    return {
        "rounds": f"{view.budget:.0f} rounds",
        "gradients": f"{view.budget:,.0f} gradients",
        "bytes": f"{size(view.budget)} sent",
        "virtual": f"{seconds(view.budget)} of simulated devices",
        "seconds": f"{seconds(view.budget)} of processor time",
    }[view.axis]


def communication(summary: Summary) -> Table:
    """Return the communication per round; no rows if no run sent anything."""
    sent = {}
    for name, arm in summary.arms.items():
        runs = [run for run in arm.runs if run.status == "done" and run.rounds_done]
        # The column is a running total, and runs may have different numbers of rounds.
        totals = [float(run.column("communication/total_bytes")[-1]) for run in runs]
        rates = [total / run.rounds_done for total, run in zip(totals, runs, strict=True)]
        sent[name] = mean_sd(rates)[0] if all(map(math.isfinite, rates)) else None
    firsts = first_arms(summary)
    rows: Rows = []
    for name, own in sent.items() if any(sent.values()) else ():
        rows.append([name, cell(size, own), cell(times, _ratio(own, sent[firsts[name]]))])
    note = "Sent: the bytes of all messages in both directions, without buffers."
    columns = ["arm", "sent per round", "× first arm"]
    return Table("communication", "Communication per round", columns, rows, note)


# ------------------------------------------------------------------------- what else there is


def consensus(summary: Summary) -> list[Table]:
    """Return a table for each form of the consensus distance of layers that was logged."""
    made = []
    note = "Mean over all rounds and seeds. Layers are in order from the input on."
    for form, layers in forms(summary.found).items():
        rows: Rows = []
        for layer in layers:
            means = [over_time(arm.runs, form + layer) for arm in summary.arms.values()]
            rows.append([layer, *(cell("{:.3g}".format, mean) for mean in means)])
        key = f"consensus-{form.strip('/')}"
        title = f"Consensus distance by layer, {FORMS[form]}"
        made.append(Table(key, title, ["layer", *summary.arms], rows, note, folded=True))
    return made


def clients(summary: Summary) -> Table:
    """Return how evenly clients are served, for runs that measured each client."""
    shown = unit_of(summary)
    names = ["mean of clients", "deviation over clients", "worst 10 %", "worst domain"]
    found = dict(zip(OF_CLIENTS, names, strict=True))
    logged = set[str]().union(*(arm.clients for arm in summary.arms.values()))
    measures = [measure for measure in found if measure in logged]
    rows: Rows = []
    for arm in summary.arms.values():
        if arm.clients:
            means = [_mean(shown, arm.clients.get(measure, {}), arm) for measure in measures]
            rows.append([arm.name, *means])
    title = f"Fairness: {summary.metric.rpartition('/')[2]} of clients{', %' * shown.percent}"
    columns = ["arm", *(found[measure] for measure in measures)]
    table = Table("fairness", title, columns, rows, CLIENTS_NOTE)
    own = group_of_arms(summary)
    places = range(1, len(columns))
    apart = [place for place in places if measures[place - 1] == "std"]
    table.with_best(sorted({*places} - {*apart}), lambda: summary.greater, own)
    return table.with_best(apart, lambda: False, own)


def settings(summary: Summary) -> Table:
    """Return the settings in which arms differ, except those of their methods."""
    every = {name: arm.runs[0].settings for name, arm in summary.arms.items()}
    known = [each for each in every.values() if each]
    rows: Rows = []
    for place in differing(known):
        if place.partition("/")[0] != "method":
            rows.append([place, *(str(each.get(place, NONE)) for each in every.values())])
    columns = ["setting", *summary.arms]
    return Table("settings", "Other settings that differ", columns, rows, SETTINGS_NOTE)


def runs(summary: Summary) -> Table:
    """Return every run and its folder."""
    shown = unit_of(summary)
    columns = ["arm", "seed", "status", "rounds", SCORE_TITLES[MAIN], "folder"]
    rows: Rows = []
    for arm in summary.arms.values():
        for run in arm.runs:
            asked = run.record.get("rounds")
            rounds = f"{run.rounds_done}"
            if asked and asked != run.rounds_done:
                rounds += f" of {asked}"
            status = Cell(run.status, mark=f"status {run.status}")
            score = shown.cell(arm.scores[MAIN].get(run.seed))
            row = [arm.name, cell(str, run.seed), status, Cell(rounds, run.rounds_done)]
            rows.append([*row, score, str(run.folder)])
    note = machines([run.record for run in summary.found.runs])
    return Table("runs", "Runs", columns, rows, note)


def machines(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the machines of the runs, from their run.json."""
    counts = Counter(_machine(record.get("machine")) for record in records)
    told = [f"{_runs(number)} made on {text}." for text, number in counts.items() if text]
    if unknown := counts[""]:
        told.append(f"{_runs(unknown)} made on a machine that was not recorded.")
    return " ".join(told)


def _runs(number: int) -> str:
    return "1 run was" if number == 1 else f"{number} runs were"


def _machine(machine: Any) -> str:
    """Return the description of a machine for the reader; "" if nothing was recorded."""
    if not isinstance(machine, dict):
        return ""
    texts = [machine.get("gpu"), machine.get("processor") or machine.get("system")]
    for key in ("cores", "threads", "processes"):
        if number := machine.get(key):
            texts.append(f"{number} {key}" if number != 1 else f"1 {_ONE[key]}")
    if type(memory := machine.get("memory")) is int:
        texts.append(f"{memory / 2**30:.0f} GiB")
    return ", ".join(str(text) for text in texts if text)
