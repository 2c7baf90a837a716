"""Everything a report states as numbers: what report.json holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fl_lightning.report.claims import Claim, ClaimsFile, gather
from fl_lightning.report.evidence import evidence, logged, named
from fl_lightning.report.intervals import Interval, holm, mean_sd, paired
from fl_lightning.report.notes import notes_on
from fl_lightning.report.runs import Found, Run
from fl_lightning.report.scores import SCORES, reached, score_of
from fl_lightning.report.settings import settings
from fl_lightning.report.verdicts import judge

BySeed = dict[int, float | None]


@dataclass
class Arm:
    """One arm: its runs, and the scores and costs of its finished runs by seed.

    ``reached``: target → seed → rounds, bytes and seconds until it.
    """

    name: str
    runs: list[Run]
    scores: dict[str, BySeed]
    reached: dict[str, dict[int, dict[str, Any]]]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished]

    @property
    def diverged(self) -> int:
        return sum(run.status == "diverged" for run in self.runs)

    @property
    def unfinished(self) -> int:
        return len(self.runs) - len(self.finished)

    def mean_sd(self, score: str) -> tuple[float | None, float | None]:
        """Mean and deviation over the seeds that have this score."""
        return mean_sd([value for value in self.scores[score].values() if value is not None])

    def to_json(self) -> dict[str, Any]:
        """As report.json has it."""
        scores = {}
        for score, values in self.scores.items():
            mean, sd = self.mean_sd(score)
            scores[score] = {"mean": mean, "sd": sd, "values": values}
        costs: dict[str, dict[str, dict[int, Any]]] = {}
        for what in ("rounds", "bytes", "seconds"):
            until = costs[f"{what}_to"] = {}
            for target, seeds in self.reached.items():
                until[target] = {seed: cost[what] for seed, cost in seeds.items()}
        return {
            "n": len(self.finished),
            "diverged": self.diverged,
            "unfinished": self.unfinished,
            "runs": [str(run.folder) for run in self.runs],
            "scores": scores,
            **costs,
        }


@dataclass
class Pair:
    """``a`` against ``b``, paired by seed; ``differences`` are those of the seeds that count.

    ``scale``: difference, log_ratio, or number (of ρ and of shares).
    """

    a: str
    b: str
    metric: str
    score: str
    interval: Interval
    differences: dict[int, float] = field(default_factory=dict)
    scale: str = "difference"
    p_holm: float | None = None

    def to_json(self) -> dict[str, Any]:
        """As report.json has it."""
        head = {"a": self.a, "b": self.b, "metric": self.metric, "score": self.score}
        return {**head, **asdict(self.interval), "p_holm": self.p_holm}


@dataclass
class Verdict:
    """What the runs say about a claim; ``provisional`` while runs of its family are missing."""

    claim: Claim
    verdict: str
    pair: Pair
    changed: bool | None
    left_out: int = 0
    provisional: bool = False

    @property
    def printed(self) -> str:
        """The verdict as a reader sees it."""
        if self.provisional:
            return f"{self.verdict}, provisional"
        return self.verdict

    def to_json(self) -> dict[str, Any]:
        """As report.json has it."""
        interval = self.pair.interval
        return {
            "id": self.claim.id,
            "verdict": self.verdict,
            "mean": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "margin": self.claim.margin,
            "n": interval.n,
            "changed": self.changed,
            "kind": self.claim.kind,
            "family": self.claim.family,
            "primary": self.claim.primary,
            "p": interval.p,
            "p_holm": self.pair.p_holm,
            "values": self.pair.differences,
            "left_out": self.left_out,
            "provisional": self.provisional,
        }


@dataclass
class Summary:
    """A report as numbers.

    ``targets`` are as typed. ``notes`` say what a reader has to know to read the numbers right.
    ``settings``: setting → method → arm.
    """

    metric: str
    targets: tuple[str, ...]
    arms: dict[str, Arm]
    pairs: list[Pair]
    verdicts: list[Verdict]
    notes: list[str]
    found: Found
    settings: dict[str, dict[str, str]]

    @property
    def greater(self) -> bool:
        """Whether more of the metric is better; whoever needs it and cannot know it is refused."""
        return self.found.directions.greater(self.metric)

    @property
    def scored(self) -> bool:
        """Whether any run logs the metric."""
        return logged(self.found, self.metric)

    def to_json(self) -> dict[str, Any]:
        """report.json."""
        return {
            "metric": self.metric,
            "arms": {name: arm.to_json() for name, arm in self.arms.items()},
            "pairs": [pair.to_json() for pair in self.pairs],
            "claims": [verdict.to_json() for verdict in self.verdicts],
            "settings": self.settings,
        }


def summarise(
    found: Found, metric: str = "val/acc", targets: Sequence[str] = (), claims: Path | None = None
) -> Summary:
    """Scores, costs, intervals and verdicts of the runs that were ``found``.

    Args:
        found: runs and sweeps.
        metric: what is scored; claims name their own.
        targets: numbers as typed.
        claims: a file of claims, in place of those of the sweeps.

    Raises:
        UserError: a file of claims that is none, or runs that cannot be paired because they saw
            other partitions.
    """
    files = gather(found, claims)
    any_logged = logged(found, metric)
    arms = {}
    for name, runs in found.arms.items():
        arms[name] = _arm(name, runs, metric, targets, any_logged)
    # What stands out in the runs is noted before what stands out in a claim.
    notes = notes_on(found, metric, files)
    by_setting = settings(found)
    verdicts = []
    for file in files:
        verdicts += _judged(file, found, notes)
    if files:
        kinds = ("difference", "equivalence")
        pairs = [verdict.pair for verdict in verdicts if verdict.claim.kind in kinds]
    else:
        pairs = _within_settings(by_setting, metric, found, notes)
    return Summary(metric, tuple(targets), arms, pairs, verdicts, notes, found, by_setting)


def _judged(file: ClaimsFile, found: Found, notes: list[str]) -> list[Verdict]:
    """The verdicts on a file's claims, corrected within each family.

    The claims mean the runs of the file's own sweeps.
    """
    # Sweeps that are reported together keep their own claims.
    if file.folders:
        found = found.within({folder.resolve() for folder in file.folders})
    claims = [named(claim, file.names) for claim in file.claims]
    measured = [evidence(claim, found, notes) for claim in claims]
    verdicts: dict[int, Verdict] = {}
    for family in dict.fromkeys(claim.family for claim in claims):
        places = [place for place, claim in enumerate(claims) if claim.family == family]
        # A run that is still missing changes the p of the whole family.
        provisional = any(measured[place].incomplete for place in places)
        judged = judge([(claims[place], measured[place]) for place in places])
        for place, outcome in zip(places, judged, strict=True):
            claim = claims[place]
            pair = Pair(
                claim.a,
                claim.b,
                claim.metric,
                claim.score,
                outcome.interval,
                measured[place].values,
                claim.unit,
                outcome.p_holm,
            )
            left_out = measured[place].left_out
            verdicts[place] = Verdict(
                claim, outcome.verdict, pair, file.changed, left_out, provisional
            )
    return [verdicts[place] for place in range(len(claims))]


def _within_settings(
    by_setting: Mapping[str, Mapping[str, str]], metric: str, found: Found, notes: list[str]
) -> list[Pair]:
    """Without claims: pair every arm with its setting's first, corrected over all pairs."""
    pairs = []
    for arms in by_setting.values():
        first, *others = arms.values()
        for name in others:
            # Nothing is claimed: the claim only says what is compared.
            claim = Claim("", name, first, metric, "", 0.0)
            values = evidence(claim, found, notes).values
            interval = paired(list(values.values()))
            pairs.append(Pair(name, first, metric, claim.score, interval, values))
    # Every pair that is looked at is a chance to be wrong, so all are one family.
    for pair, corrected in zip(pairs, holm([pair.interval.p for pair in pairs]), strict=True):
        pair.p_holm = corrected
    return pairs


def _arm(name: str, runs: list[Run], metric: str, targets: Sequence[str], any_logged: bool) -> Arm:
    scores: dict[str, BySeed] = {score: {} for score in SCORES}
    costs: dict[str, dict[int, dict[str, Any]]] = {target: {} for target in targets}
    for run in [run for run in runs if run.finished]:
        # Where no run logs the metric nobody has lost in it, not even by diverging.
        for score in SCORES:
            scores[score][run.seed] = score_of(run, metric, score) if any_logged else None
        for target in targets:
            costs[target][run.seed] = reached(run, metric, float(target))
    return Arm(name, runs, scores, costs)
