"""Claims in words and as a table, and how values and differences are shown."""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning.report.claims import Claim
from fl_lightning.report.published import setting
from fl_lightning.report.scores import measured
from fl_lightning.report.summary import Pair, Summary, Verdict
from fl_lightning.report.tables import Cell, Table
from fl_lightning.report.wording import NONE, SCORE_TITLES, Unit, p_value, unit


def unit_of(summary: Summary, metric: str | None = None) -> Unit:
    """How this report shows values of ``metric`` (None: the report's own metric)."""
    name = metric or summary.metric
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
        claim, found, shown = said.claim, said.pair.interval, difference_unit(summary, said.pair)
        run = next((r for r in summary.found.runs if r.arm in claim.arms), None)
        rounds = "" if run is None else f"{run.record.get('rounds') or run.rounds_done} rounds"
        percent = f" {shown.of_difference}" if shown.percent else ""
        seeds = (
            f"{seed}: {shown.difference(value)}" for seed, value in said.pair.differences.items()
        )
        predicted = [f"paper: {claim.paper_predicts}"] * bool(claim.paper_predicts)
        predicted += [f"we: {claim.we_predict}"] * bool(claim.we_predict)
        margin = (
            f"× {claim.factor:g}"
            if claim.kind == "diverges"
            else shown.difference(claim.margin).lstrip("+") + percent
        )
        n = f"{found.n}" + (f" ({said.left_out} left out)" if said.left_out else "")
        table.add(
            f"{claim.id}: {sentence(claim)}" + (" (primary)" if claim.primary else ""),
            Cell(said.printed, mark="verdict " + said.verdict.replace(" ", "-")),
            Cell(shown.difference(found.mean), found.mean),
            interval(shown, said.pair),
            Cell(p_value(said.pair.p_holm), said.pair.p_holm),
            Cell(margin, claim.margin),
            Cell(n, found.n),
            ", ".join(seeds) or NONE,
            "; ".join(predicted) or NONE,
            ", ".join(text for text in ("" if run is None else setting(run), rounds) if text)
            or NONE,
        )
    table.note = (
        "Reproduced: the interval excludes 0 in the claimed direction, Holm's p within the family is below 0.05, and "
        "the mean is at least the margin. Contradicted: the same the other way, margin aside. Not reproduced: the "
        "interval's upper end is below the margin. Inconclusive: else, and with fewer than five pairs. "
        "Equivalence (≈): two one-sided tests against ± margin; contradicted where the interval lies outside. "
        "Divergence: in every seed, at least three. Provisional: runs of its family are missing. "
        "These runs say nothing of a number published for another network, data or number of rounds."
    )
    return table


def shown_first(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Families in their order, each with its primary claim first."""
    families = list(dict.fromkeys(said.claim.family for said in verdicts))
    return sorted(
        verdicts, key=lambda said: (families.index(said.claim.family), not said.claim.primary)
    )


def sentence(claim: Claim) -> str:
    """A claim in words: ``fedinit-0.1 > fedavg in val/acc (last third of gradients)``."""
    sign, score = ">" if claim.direction == "greater" else "<", SCORE_TITLES[claim.score]
    ratio = ", log ratio" if claim.scale == "log_ratio" else ""
    if claim.kind == "equivalence":
        return f"{claim.a} ≈ {claim.b} in {claim.metric} ({score}{ratio})"
    if claim.kind == "interaction":
        return f"({claim.a} − {claim.b}) {sign} ({claim.c} − {claim.d}) in {claim.metric} ({score}{ratio})"
    if claim.kind == "to_target":
        target = (
            f"{claim.target_arm}'s {SCORE_TITLES[claim.target_score]}"
            if claim.target_arm
            else f"{claim.target:g}"
        )
        return f"{claim.a} {sign} {claim.b} in {claim.cost} until {claim.metric} is {target} (log ratio)"
    if claim.kind == "trend":
        of, rises = (
            f" of {claim.arm}" if claim.arm else "",
            "rises" if claim.direction == "greater" else "falls",
        )
        return f"{claim.metric}{of} {rises} over {claim.over} (Spearman's ρ)"
    if claim.kind == "diverges":
        what = "diverges" if claim.direction == "greater" else "does not diverge"
        return f"{claim.arm} {what} ({claim.metric} ≥ {claim.factor:g} × that of {claim.against}, {score})"
    return f"{claim.a} {sign} {claim.b} in {claim.metric} ({score}{ratio})"
