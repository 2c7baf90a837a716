"""Claims in words and as a table, and how values and differences are shown."""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning.report.claims import Claim
from fl_lightning.report.published import setting
from fl_lightning.report.scores import measured
from fl_lightning.report.summary import Pair, Summary, Verdict
from fl_lightning.report.tables import Cell, Table
from fl_lightning.report.wording import NONE, SCORE_TITLES, Unit, p_value, unit

SIGNS = {"greater": ">", "less": "<"}
_NOTE = (
    "Reproduced: the interval excludes 0 in the claimed direction, Holm's p within the family is "
    "below 0.05, and the mean is at least the margin. Contradicted: the same the other way, margin "
    "aside. Not reproduced: the interval's upper end is below the margin. Inconclusive: else, and "
    "with fewer than five pairs. Equivalence (≈): two one-sided tests against ± margin; "
    "contradicted where the interval lies outside. Divergence: in every seed, at least three. "
    "Provisional: runs of its family are missing. These runs say nothing of a number published "
    "for another network, data or number of rounds."
)


def unit_of(summary: Summary, metric: str | None = None) -> Unit:
    """How this report shows values of ``metric`` (None: the report's own metric)."""
    name = metric or summary.metric
    # Some accuracies are logged in percent already: then the highest is above 1.
    values = [measured(run, name)[1] for run in summary.found.runs]
    return unit(name, max((float(v.max()) for v in values if len(v)), default=1.0))


def interval(shown: Unit, pair: Pair) -> Cell:
    """The interval, or why there is none."""
    found = pair.interval
    if found.low is None:
        return Cell("needs 2 pairs" if found.n == 1 else NONE)
    return Cell(f"{shown.difference(found.low)} to {shown.difference(found.high)}", found.low)


def difference_unit(summary: Summary, pair: Pair) -> Unit:
    """How differences of ``pair`` are shown."""
    return unit_of(summary, pair.metric) if pair.scale == "difference" else Unit()


def claims(summary: Summary) -> Table:
    """The claims and their verdicts, each family's primary one first."""
    columns = [
        "claim",
        "verdict",
        "a − b",
        "95 % interval",
        "p, Holm",
        "margin",
        "n",
        "each seed",
        "predicted",
        "setting",
    ]
    table = Table("claims", "Claims", columns)
    for said in shown_first(summary.verdicts):
        _add_claim(table, summary, said)
    table.note = _NOTE
    return table


def _add_claim(table: Table, summary: Summary, said: Verdict) -> None:
    """Add the row of one claim."""
    claim = said.claim
    interval_found = said.pair.interval
    shown = difference_unit(summary, said.pair)
    title = f"{claim.id}: {sentence(claim)}"
    if claim.primary:
        title += " (primary)"
    # The margin of a divergence is a factor between two scores.
    if claim.kind == "diverges":
        margin = f"× {claim.factor:g}"
    else:
        margin = shown.difference(claim.margin).lstrip("+")
        if shown.percent:
            margin += f" {shown.of_difference}"
    n = f"{interval_found.n}"
    if said.left_out:
        n += f" ({said.left_out} left out)"
    seeds = [f"{seed}: {shown.difference(value)}" for seed, value in said.pair.differences.items()]
    predicted = []
    if claim.paper_predicts:
        predicted.append(f"paper: {claim.paper_predicts}")
    if claim.we_predict:
        predicted.append(f"we: {claim.we_predict}")
    table.add(
        title,
        Cell(said.printed, mark="verdict " + said.verdict.replace(" ", "-")),
        Cell(shown.difference(interval_found.mean), interval_found.mean),
        interval(shown, said.pair),
        Cell(p_value(said.pair.p_holm), said.pair.p_holm),
        Cell(margin, claim.margin),
        Cell(n, interval_found.n),
        ", ".join(seeds) or NONE,
        "; ".join(predicted) or NONE,
        _setting(summary, claim) or NONE,
    )


def _setting(summary: Summary, claim: Claim) -> str:
    """Network, data and rounds of the first run that the claim is about."""
    run = next((run for run in summary.found.runs if run.arm in claim.arms), None)
    if run is None:
        return ""
    rounds = f"{run.record.get('rounds') or run.rounds_done} rounds"
    return ", ".join(text for text in (setting(run), rounds) if text)


def shown_first(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Families in their order, each with its primary claim first."""
    families = list(dict.fromkeys(said.claim.family for said in verdicts))
    return sorted(
        verdicts, key=lambda said: (families.index(said.claim.family), not said.claim.primary)
    )


def sentence(claim: Claim) -> str:
    """A claim in words: ``fedinit-0.1 > fedavg in val/acc (last third of gradients)``."""
    sign = SIGNS[claim.direction]
    score = SCORE_TITLES[claim.score]
    where = f"in {claim.metric} ({score}{', log ratio' if claim.scale == 'log_ratio' else ''})"
    if claim.kind == "equivalence":
        return f"{claim.a} ≈ {claim.b} {where}"
    if claim.kind == "interaction":
        return f"({claim.a} − {claim.b}) {sign} ({claim.c} − {claim.d}) {where}"
    if claim.kind == "to_target":
        target = f"{claim.target:g}"
        if claim.target_arm:
            target = f"{claim.target_arm}'s {SCORE_TITLES[claim.target_score]}"
        until = f"until {claim.metric} is {target}"
        return f"{claim.a} {sign} {claim.b} in {claim.cost} {until} (log ratio)"
    if claim.kind == "trend":
        measured_in = claim.metric
        if claim.arm:
            measured_in += f" of {claim.arm}"
        turns = {"greater": "rises", "less": "falls"}[claim.direction]
        return f"{measured_in} {turns} over {claim.over} (Spearman's ρ)"
    if claim.kind == "diverges":
        diverges = {"greater": "diverges", "less": "does not diverge"}[claim.direction]
        least = f"{claim.metric} ≥ {claim.factor:g} × that of {claim.against}"
        return f"{claim.arm} {diverges} ({least}, {score})"
    return f"{claim.a} {sign} {claim.b} {where}"
