"""From the measurements of a claim, one number per seed, to its interval, its p and its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fl_lightning.lab.report.claims import Claim
from fl_lightning.lab.report.intervals import (
    Interval,
    chance_of_orders,
    equivalent,
    holm,
    mean_sd,
    paired,
)

# Pairs needed for a verdict, and seeds needed for one about divergence.
MIN_PAIRS = 5
MIN_SEEDS = 3
LEVEL = 0.05


@dataclass
class Evidence:
    """The evidence about a claim; ``values`` has one value for each seed that counts.

    ``lost``: a seed that would count against the claim is left out, so nothing can be reproduced.
    ``won``: one that would count for it is left out, so nothing can be refuted. ``left_out``: the
    number of such seeds and others. ``incomplete``: runs are still missing.
    ``places``: the number of values on a trend's axis, or of layers if all seeds have the same ρ;
    0 in all other cases.
    """

    values: dict[int, float] = field(default_factory=dict)
    lost: bool = False
    won: bool = False
    left_out: int = 0
    incomplete: bool = False
    places: int = 0

    def take(self, seed: int, value: float | None, lost: bool = False, won: bool = False) -> None:
        """Count a seed; without a value it would count against the claim (``lost``) or for it
        (``won``), or both if that is not known.
        """
        if value is None:
            self.left_out += 1
            self.lost |= lost
            self.won |= won
        else:
            self.values[seed] = value


@dataclass
class Comparison:
    """A claim with its evidence, interval and verdict.

    ``p_holm`` is corrected over its family; ``changed``: whether the claims were edited after the
    runs began; ``provisional`` while runs of its family are missing.
    """

    claim: Claim
    evidence: Evidence
    interval: Interval
    p_holm: float | None
    verdict: str
    changed: bool | None = None
    provisional: bool = False

    @property
    def percent(self) -> int:
        """Return the coverage of its test's interval in percent.

        Two one-sided tests at 5 % correspond to the question whether the 90 % interval lies within
        the margin.
        """
        return 90 if self.claim.kind == "equivalence" else 95

    @property
    def ends(self) -> tuple[float, float] | None:
        """Return the interval that belongs to its test; None if there is none."""
        return None if self.interval.low is None else self.interval.ends(self.percent)

    @property
    def printed(self) -> str:
        """Return the verdict as text for readers."""
        counted = f" ({self.interval.n} seeds, no test)" * (self.claim.kind == "every_seed")
        return f"{self.verdict}{counted}{', provisional' * self.provisional}"

    def to_pair(self) -> dict[str, Any]:
        """Return the comparison as one of report.json's pairs."""
        head = {key: getattr(self.claim, key) for key in ("a", "b", "metric", "score")}
        return {**head, **vars(self.interval), "p_holm": self.p_holm}

    def to_claim(self) -> dict[str, Any]:
        """Return the comparison as one of report.json's claims."""
        tested = {}
        if self.claim.kind == "equivalence":
            low, high = self.ends or (None, None)
            tested = {"low_90": low, "high_90": high}
        return {
            "id": self.claim.id,
            "verdict": self.verdict,
            "mean": self.interval.mean,
            "low": self.interval.low,
            "high": self.interval.high,
            **tested,
            # A claim that an arm diverges has a factor and no margin.
            "margin": None if self.claim.kind == "diverges" else self.claim.margin,
            "n": self.interval.n,
            "changed": self.changed,
            "kind": self.claim.kind,
            "family": self.claim.family,
            "primary": self.claim.primary,
            "p": self.interval.p,
            "p_holm": self.p_holm,
            "values": self.evidence.values,
            "left_out": self.evidence.left_out,
            "provisional": self.provisional,
        }


def judge(family: Sequence[tuple[Claim, Evidence]]) -> list[Comparison]:
    """Return the verdicts on all claims of one family, which are corrected together."""
    intervals = [interval(claim, evidence) for claim, evidence in family]
    corrected = holm([measured.p for measured in intervals])
    judged = []
    for (claim, evidence), measured, p_holm in zip(family, intervals, corrected, strict=True):
        outcome = _by_kind(claim, evidence, measured, p_holm)
        judged.append(Comparison(claim, evidence, measured, p_holm, outcome))
    return judged


def interval(claim: Claim, evidence: Evidence) -> Interval:
    """Return mean, 95 % interval and p of a claim; an equivalence has the p of its two
    one-sided tests.
    """
    values = list(evidence.values.values())
    if claim.kind == "diverges":
        return Interval(len(values), mean_sd(values)[0])
    measured = paired(values)
    if claim.kind == "every_seed":
        # It counts seeds, so it has no p, and takes none from its family.
        return replace(measured, p=None)
    if claim.kind == "equivalence":
        return replace(measured, p=equivalent(measured, claim.margin))
    if evidence.places and measured.p is not None:
        # Over few places seeds often agree by chance, and then t would be certain.
        by_chance = chance_of_orders(sum(values), len(values), evidence.places)
        return replace(measured, p=max(measured.p, by_chance))
    return measured


def _by_kind(claim: Claim, evidence: Evidence, measured: Interval, p_holm: float | None) -> str:
    if claim.kind == "diverges":
        outcome = _on_divergence(claim.direction, list(evidence.values.values()))
    elif claim.kind == "every_seed":
        outcome = _on_every_seed(claim.direction, claim.margin, list(evidence.values.values()))
    elif claim.kind == "equivalence":
        outcome = _on_equivalence(claim.margin, measured, p_holm)
    else:
        outcome = verdict(claim.direction, claim.margin, measured, p_holm)
    # A seed was left out because an arm diverged or never reached the target, and it would have
    # counted against this verdict.
    refuted = outcome in ("contradicted", "not reproduced")
    hidden = evidence.lost if outcome == "reproduced" else evidence.won and refuted
    return "inconclusive" if hidden else outcome


def verdict(direction: str, margin: float, measured: Interval, p_holm: float | None) -> str:
    """Return the verdict on a claim ``greater``, or mirrored ``less``, from its paired interval.

    >>> clear = Interval(5, 0.02, 0.01, 0.01, 0.03, 0.01)
    >>> verdict("greater", 0.005, clear, 0.02), verdict("less", 0.005, clear, 0.02)
    ('reproduced', 'contradicted')
    >>> verdict("greater", 0.005, clear, 0.06)
    'inconclusive'
    >>> small = Interval(5, 0.001, 0.001, -0.001, 0.003, 0.3)
    >>> verdict("greater", 0.005, small, 0.3), verdict("greater", 0.002, small, 0.3)
    ('not reproduced', 'inconclusive')
    """
    mean = measured.mean
    low = measured.low
    high = measured.high
    if mean is None or low is None or high is None or measured.n < MIN_PAIRS:
        return "inconclusive"
    # Judge "less" as "greater" of the negated interval, whose ends change places.
    if direction == "less":
        mean = -mean
        low, high = -high, -low
    # The interval is for one claim, and p is corrected for the whole family, so both have to agree.
    sure = p_holm is not None and p_holm < LEVEL
    if sure and low > 0 and mean >= margin:
        return "reproduced"
    if sure and high < 0:
        return "contradicted"
    return "not reproduced" if high < margin else "inconclusive"


def _on_equivalence(margin: float, measured: Interval, p_holm: float | None) -> str:
    if measured.low is None or measured.high is None or measured.n < MIN_PAIRS:
        return "inconclusive"
    # Both one-sided tests reject: the mean lies within the margin.
    if p_holm is not None and p_holm < LEVEL:
        return "reproduced"
    outside = measured.low > margin or measured.high < -margin
    return "contradicted" if outside else "inconclusive"


def _on_every_seed(direction: str, margin: float, values: Sequence[float]) -> str:
    """Return the verdict on a claim that holds only if it holds in each of the seeds.

    >>> _on_every_seed("greater", 0.005, [0.01, 0.02, 0.03])
    'reproduced'
    >>> _on_every_seed("greater", 0.005, [-0.01, -0.02, -0.03])
    'contradicted'
    >>> _on_every_seed("greater", 0.005, [-0.01, 0.004, 0.004])
    'not reproduced'
    >>> _on_every_seed("greater", 0.005, [0.02, 0.02, 0.004])
    'inconclusive'
    """
    if len(values) < MIN_SEEDS:
        return "inconclusive"
    if direction == "less":
        values = [-value for value in values]
    reached = [value >= margin and value > 0 for value in values]
    if all(reached):
        return "reproduced"
    if max(values) < 0:
        return "contradicted"
    return "inconclusive" if any(reached) else "not reproduced"


def _on_divergence(direction: str, values: Sequence[float]) -> str:
    if len(values) < MIN_SEEDS:
        return "inconclusive"
    # With "less" the claim is that the arm does not diverge.
    if direction == "less":
        values = [1 - value for value in values]
    # Every seed counts: a method that only sometimes diverges does not reproduce the claim.
    if all(values):
        return "reproduced"
    return "not reproduced" if any(values) else "contradicted"
