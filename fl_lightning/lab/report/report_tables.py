"""The tables of a report, made from its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from fl_lightning.lab.report import table_notes
from fl_lightning.lab.report.arm_settings import by_settings
from fl_lightning.lab.report.budgets import CPU, BudgetView, views
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
from fl_lightning.lab.report.chosen import choices, on_test_samples, short
from fl_lightning.lab.report.claims import Claim
from fl_lightning.lab.report.communication import over, papers_ratio, traffic, uncounted
from fl_lightning.lab.report.fairness import OF_METRIC, WORST_DOMAIN, column_of, titles
from fl_lightning.lab.report.intervals import mean_sd
from fl_lightning.lab.report.printed_results import setting
from fl_lightning.lab.report.scores import (
    FORMS,
    SCORE_TITLES,
    SCORES,
    forms,
    measured,
    over_time,
    window,
)
from fl_lightning.lab.report.summary import Arm, Summary, first_arms, group_of_arms, known
from fl_lightning.lab.report.verdicts import Comparison
from fl_lightning.metrics import is_accuracy

MAIN = SCORES[0]
SIGNS = {"greater": ">", "less": "<"}
_ONE = {"cores": "core", "threads": "thread", "processes": "process"}


def tables(summary: Summary) -> list[Table]:
    """Return every table that has rows, in the order of the page."""
    made = [
        claims(summary),
        evidence(summary),
        gains(summary),
        scores(summary),
        pivot(summary),
        pairs(summary),
        *targets(summary),
        *budgets(summary),
        communication(summary),
        fairness(summary),
        *consensus(summary),
        *beside_published(summary),
        chosen(summary),
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


def _interval(shown: Unit, said: Comparison) -> Cell:
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
    table = Table("claims", "Claims", columns.split("|"), rows, table_notes.CLAIMS)
    # The table of what the runs were made for is never folded.
    table.folded = False
    return table


def evidence(summary: Summary) -> Table:
    """Return the evidence for each verdict: every seed, both predictions, the setting."""
    columns = ["claim", "value by seed", "predicted", "setting"]
    rows: Rows = []
    for said in shown_first(summary.verdicts):
        claim = said.claim
        shown = difference_unit(summary, said)
        values = said.evidence.values
        seeds = [f"{seed}: {shown.difference(value)}" for seed, value in values.items()]
        predictions = {"the paper": claim.paper_predicts, "we": claim.we_predict}
        predicted = [f"{who}: {text}" for who, text in predictions.items() if text]
        run = next((run for run in summary.found.runs if run.arm in claim.arms), None)
        about = ""
        if run is not None:
            rounds = f"{run.record.get('rounds') or run.rounds_done} rounds"
            about = ", ".join(filter(None, (setting(run), rounds)))
        row = (claim.id, ", ".join(seeds), "; ".join(predicted), about)
        rows.append([text or NONE for text in row])
    title = "Each claim's values by seed, predictions and setting"
    return Table("claims-evidence", title, columns, rows, folded=True)


def gains(summary: Summary) -> Table:
    """Return differences next to those that papers printed for the same two arms."""
    columns = "claim|ours, a − b|95 % interval|published, a − b|printed|source"
    rows: Rows = []
    for said in shown_first(summary.verdicts):
        shown = difference_unit(summary, said)
        own = unit_of(summary, said.claim.metric)
        for gain in summary.gains.get(said.claim.id, []):
            sign = "−" if said.claim.scale == "difference" else "/"
            row: list[Any] = [f"{said.claim.id}: {said.claim.a} {sign} {said.claim.b}"]
            row += [cell(shown.difference, said.interval.mean), _interval(shown, said)]
            printed = f"{own.value(*gain.a)} {sign} {own.value(*gain.b)}"
            rows.append([*row, cell(shown.difference, gain.mean), printed, gain.source])
    title = "Published gains and ours"
    return Table("gains", title, columns.split("|"), rows, table_notes.GAINS)


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
        _interval(shown, said),
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
    """Return paired intervals with Holm's correction."""
    columns = ["a − b", "metric", "mean", "95 % interval", "sd", "n", "p", "p, Holm"]
    rows: Rows = []
    for pair in summary.pairs:
        claim = pair.claim
        between = pair.interval
        shown = difference_unit(summary, pair)
        plain = claim.unit == "difference"
        rows.append(
            [
                f"{claim.a} − {claim.b}" if plain else f"log {claim.a} / {claim.b}",
                f"{summary.called(claim.metric)}, {SCORE_TITLES[claim.score]}",
                Cell(shown.difference(between.mean, named=True), between.mean),
                _interval(shown, pair),
                Cell(shown.difference(between.sd).lstrip("+"), between.sd),
                cell(str, between.n),
                cell(p_value, between.p),
                cell(p_value, pair.p_holm),
            ]
        )
    over_what = "within the claim's family" if summary.verdicts else "over the rows of this table"
    note = f"{table_notes.PAIRS} {over_what}."
    # The table of claims above has the same numbers.
    folded = bool(summary.verdicts)
    return Table("pairs", "Paired differences in numbers", columns, rows, note, folded)


# ------------------------------------------------------------------------------- scores


def pivot(summary: Summary) -> Table:
    """Return methods by settings, if there are several of either."""
    shown = unit_of(summary)
    title = f"{by_settings(summary.found)}: {metric_title(summary)}, {SCORE_TITLES[MAIN]}"
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
    widths = windows(summary)
    curve = f"curve, which is smoothed by a Hanning window of {widths} values"
    if widths == "1":
        curve = "curve, which is not smoothed because there are too few rounds"
    few = ""
    if any(length < 10 for length in lengths(summary)):
        few = "Mean of last 10: of all values if a run has fewer than ten. "
    several = len(set(group_of_arms(summary).values())) > 1
    end = "lowest" if summary.found.directions.known(summary.metric) is False else "highest"
    note = (
        f"Mean ± sample standard deviation over seeds. Smoothed: the {end} of the last 50 values "
        f"of the {curve}. {few}{summary.losing}Unfinished runs are not included."
        f"{' Bold marks the best arm of each sweep.' * several}"
    )
    table = Table("scores", f"Scores: {metric_title(summary)}", columns, rows, note)
    return table.with_best(
        range(1, 1 + len(SCORES)), lambda: summary.greater, group_of_arms(summary)
    )


def lengths(summary: Summary) -> list[int]:
    """Return how many values of the metric the done runs have, each number once."""
    done = [run for run in summary.found.runs if run.status == "done"]
    found = {len(measured(run, summary.metric)[0]) for run in done}
    return sorted(found - {0})


def windows(summary: Summary) -> str:
    """Return over how many values curves are smoothed, in the done runs."""
    widths = sorted({max(1, window(length)) for length in lengths(summary)})
    return " or ".join(map(str, widths)) or NONE


# -------------------------------------------------------------------------------- costs


def targets(summary: Summary) -> list[Table]:
    """Return tables of rounds, bytes and seconds until each target, and of relative traffic.

    Traffic is counted by both conventions.
    """
    # If no run logs the metric, there is no target to reach.
    if not summary.scored:
        return []
    time = "time|" * summary.timed
    columns = (
        f"arm|rounds|sent|{time}reached by|sent, × first arm|sent as papers count, × first arm"
    )
    costs: dict[str, Callable[[float], str]] = {"rounds": _rounds, "bytes": size}
    if summary.timed:
        costs["seconds"] = seconds
    firsts = first_arms(summary)
    counts = {name: traffic(arm) for name, arm in summary.arms.items()}
    sign = "≥" if summary.greater else "≤"
    note = table_notes.TARGETS + uncounted(counts.values())
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
            a_round = papers_ratio(counts[arm.name], counts[first.name])
            rounds = arm.mean_until(target, "rounds")
            counted = None if a_round is None or rounds is None else a_round * rounds
            as_papers_count = _ratio(counted, first.mean_until(target, "rounds"))
            rows.append([*row, cell(times, sent), cell(times, as_papers_count)])
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
    return ours / theirs if ours is not None and theirs else None


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
    counted: list[tuple[int, int]] = []
    for name, arm in summary.arms.items() if made else ():
        numbers = [len(known(view.values[name])) for view in made]
        counted.append((min(filter(None, numbers), default=0), len(arm.finished)))
        rows.append([name, *(_mean(shown, view.values[name], arm) for view in made)])
    columns = ["arm", *map(_budget, made)]
    note = table_notes.BUDGETS + _add_runs(columns, rows, counted)
    if any(view.axis == "seconds" for view in made):
        note += table_notes.PROCESSOR_SECONDS
    key = f"budgets-{sweep}" if sweep else "budgets"
    title = f"{title}: {sweep}" if sweep else title
    table = Table(key, title, columns, rows, note)
    return table.with_best(range(1, 1 + len(made)), lambda: summary.greater, group_of_arms(summary))


def _mean(unit: Unit, values: Mapping[int, float | None], arm: Arm) -> Cell:
    """Return mean ± deviation over the seeds that have a value."""
    of_seeds = known(values)
    return replace(unit.cell(*mean_sd(of_seeds)), whole=len(of_seeds) == len(arm.finished))


def _add_runs(columns: list[str], rows: Rows, counted: Sequence[tuple[int, int]]) -> str:
    """Add a column with how many of each arm's runs count, and return a note on it.

    If every arm counts with all of its runs or with none of them, the table stays as it is.
    """
    if not any(0 < count < of for count, of in counted):
        return ""
    columns.append("runs")
    for row, (count, of) in zip(rows, counted, strict=True):
        row.append(Cell(f"{count} of {of}", count))
    return table_notes.RUNS


def _budget(view: BudgetView) -> str:
    kind = "of processor time" if view.what == CPU else "of wall-clock time"
    return {
        "rounds": f"{view.budget:.0f} rounds",
        "gradients": f"{view.budget:,.0f} gradients",
        "bytes": f"{size(view.budget)} sent",
        "virtual": f"{seconds(view.budget)} of simulated devices",
        "seconds": f"{seconds(view.budget)} {kind}",
    }[view.axis]


def communication(summary: Summary) -> Table:
    """Return the communication per round, by both conventions; no rows if no run sent anything."""
    columns = (
        "arm|sent per round|× first arm|vectors per client, as papers count|"
        "× first arm, as papers count"
    )
    counted = {name: traffic(arm) for name, arm in summary.arms.items()}
    firsts = first_arms(summary)
    rows: Rows = []
    for name, each in counted.items():
        first = counted[firsts[name]]
        vectors = NONE if each.papers is None else str(each.papers)
        if each.partial and each.papers is not None:
            vectors = "part of a vector"
        sent = cell(times, over(each.bytes, first.bytes))
        as_papers_count = cell(times, papers_ratio(each, first))
        rows.append(
            [name, cell(size, each.bytes), sent, Cell(vectors, each.papers), as_papers_count]
        )
    note = table_notes.COMMUNICATION + uncounted(counted.values())
    sending = any(each.bytes for each in counted.values())
    title = "Communication per round"
    return Table("communication", title, columns.split("|"), rows if sending else [], note)


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


def fairness(summary: Summary) -> Table:
    """Return how evenly clients are served, for runs that measured each client."""
    shown = unit_of(summary)
    rows: Rows = []
    counted: list[tuple[int, int]] = []
    measures = titles(arm.fairness for arm in summary.arms.values())
    for arm in (arm for arm in summary.arms.values() if arm.fairness):
        row: list[Any] = [arm.name]
        for measure in measures:
            unit = shown if measure in OF_METRIC else Unit()
            row.append(_mean(unit, arm.fairness.get(measure, {}), arm))
        rows.append(row)
        counted.append((len(arm.fairness["mean"]), len(arm.finished)))
    title = f"Fairness: {column_of(summary.metric)} of clients{', %' * shown.percent}"
    note = table_notes.FAIRNESS
    if WORST_DOMAIN in measures:
        note += " Worst domain: the mean of its clients, weighted by their numbers of test samples."
    columns = ["arm", *measures.values()]
    note += _add_runs(columns, rows, counted)
    table = Table("fairness", title, columns, rows, note)
    own = group_of_arms(summary)
    table.with_best((1, 2, 3, *range(6, len(measures) + 1)), lambda: summary.greater, own)
    return table.with_best((4,), lambda: True, own).with_best((5,), lambda: False, own)


def beside_published(summary: Summary) -> list[Table]:
    """Return the published numbers of ``--published`` next to ours.

    Each row lists the differences in the setting.
    """
    made = []
    shown = unit_of(summary)
    for number, (printed, folders) in enumerate(summary.published, start=1):
        ours = f"ours ({SCORE_TITLES[printed.score]})"
        columns = ["arm", "published", ours, "what differs: ours (published)"]
        rows: Rows = []
        for arm in summary.arms.values():
            theirs = printed.of(arm.own) if arm.runs[0].folder in folders else None
            if theirs is None or printed.metric != summary.metric:
                continue
            config = arm.runs[0].config
            differs = "no config.yaml to compare"
            if config:
                differs = "; ".join(printed.differences(arm.own, config)) or "nothing"
            mean = shown.cell(*arm.mean_sd(printed.score))
            rows.append([arm.name, shown.cell(*theirs), mean, differs])
        note = f"{printed.note} Smaller runs say nothing about the published number."
        title = f"Compared with {printed.source}"
        made.append(Table(f"published-{number}", title, columns, rows, note))
    return made


def chosen(summary: Summary) -> Table:
    """Return the choices of sweeps before their runs, and choices at an end of the tried values."""
    columns = ["arm", "chosen", "tried", "at an end", "candidates"]
    labels = {arm.key: name for name, arm in summary.arms.items()}
    rows: Rows = []
    title, samples = "Chosen on held-out data", table_notes.HELD_OUT
    for sweep in summary.found.sweeps:
        for choice in choices(sweep):
            if on_test_samples(choice.metric):
                title, samples = "Chosen before the runs", table_notes.CLIENTS_TEST
            row: list[Any] = [labels.get(choice.arm, choice.arm)]
            row.append("; ".join(f"{short(key)} {value}" for key, value in choice.taken.items()))
            row.append("; ".join(f"{short(key)} {', '.join(v)}" for key, v in choice.tried.items()))
            row.append(", ".join(map(short, choice.at_end)) or "no")
            rows.append([*row, cell(str, choice.candidates)])
    return Table("chosen", title, columns, rows, table_notes.CHOSEN.format(samples=samples))


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
