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
    """One arm: its runs, and its scores and costs by seed (finished runs alone)."""

    name: str
    runs: list[Run]
    scores: dict[str, BySeed]
    reached: dict[str, dict[int, dict[str, Any]]]  # target → seed → rounds, bytes, seconds

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
        """Of the seeds that have this score."""
        return mean_sd([value for value in self.scores[score].values() if value is not None])

    def to_json(self) -> dict[str, Any]:
        """As report.json has it."""
        scores = {}
        for score, values in self.scores.items():
            mean, sd = self.mean_sd(score)
            scores[score] = {"mean": mean, "sd": sd, "values": values}
        costs = {
            f"{what}_to": {
                target: {seed: at[what] for seed, at in seeds.items()}
                for target, seeds in self.reached.items()
            }
            for what in ("rounds", "bytes", "seconds")
        }
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
    """``a`` against ``b``, paired by seed; ``differences`` are those of the seeds that count."""

    a: str
    b: str
    metric: str
    score: str
    interval: Interval
    differences: dict[int, float] = field(default_factory=dict)
    scale: str = "difference"  # or log_ratio, or that of ρ and of shares: number
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
        return f"{self.verdict}, provisional" if self.provisional else self.verdict

    def to_json(self) -> dict[str, Any]:
        """As report.json has it."""
        found = self.pair.interval
        return {
            "id": self.claim.id,
            "verdict": self.verdict,
            "mean": found.mean,
            "low": found.low,
            "high": found.high,
            "margin": self.claim.margin,
            "n": found.n,
            "changed": self.changed,
            "kind": self.claim.kind,
            "family": self.claim.family,
            "primary": self.claim.primary,
            "p": found.p,
            "p_holm": self.pair.p_holm,
            "values": self.pair.differences,
            "left_out": self.left_out,
            "provisional": self.provisional,
        }


@dataclass
class Summary:
    """A report as numbers."""

    metric: str
    targets: tuple[str, ...]  # as typed
    arms: dict[str, Arm]
    pairs: list[Pair]
    verdicts: list[Verdict]
    notes: list[str]  # what a reader has to know to read it right
    found: Found
    settings: dict[str, dict[str, str]]  # setting → method → arm

    @property
    def greater(self) -> bool:
        """Whether more of the metric is better; asked for where it is not known."""
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
        UserError: a file of claims that is none, or runs that cannot be paired because they saw other partitions.
    """
    files = gather(found, claims)
    arms = {
        name: _arm(name, runs, metric, targets, logged(found, metric))
        for name, runs in found.arms.items()
    }
    notes, by_setting = notes_on(found, metric, files), settings(found)
    verdicts = [said for file in files for said in _judged(file, found, notes)]
    if files:
        pairs = [said.pair for said in verdicts if said.claim.kind in ("difference", "equivalence")]
    else:
        pairs = _within_settings(by_setting, metric, found, notes)
    return Summary(metric, tuple(targets), arms, pairs, verdicts, notes, found, by_setting)


def _judged(file: ClaimsFile, found: Found, notes: list[str]) -> list[Verdict]:
    """The verdicts on a file's claims, which mean its own sweeps' runs, corrected within each family."""
    own = found.within({folder.resolve() for folder in file.folders}) if file.folders else found
    claims = [named(claim, file.names) for claim in file.claims]
    measured = [evidence(claim, own, notes) for claim in claims]
    judged: dict[int, Verdict] = {}
    for family in dict.fromkeys(claim.family for claim in claims):
        places = [place for place, claim in enumerate(claims) if claim.family == family]
        provisional = any(measured[place].incomplete for place in places)
        for place, said in zip(
            places, judge([(claims[p], measured[p]) for p in places]), strict=True
        ):
            claim, seen = claims[place], measured[place]
            pair = Pair(
                claim.a,
                claim.b,
                claim.metric,
                claim.score,
                said.interval,
                seen.values,
                claim.unit,
                said.p_holm,
            )
            judged[place] = Verdict(
                claim, said.verdict, pair, file.changed, seen.left_out, provisional
            )
    return [judged[place] for place in range(len(claims))]


def _within_settings(
    by_setting: Mapping[str, Mapping[str, str]], metric: str, found: Found, notes: list[str]
) -> list[Pair]:
    """Without claims: every arm against its setting's first, corrected over all pairs."""
    pairs = []
    for own in by_setting.values():
        first, *others = own.values()
        for name in others:
            claim = Claim("", name, first, metric, "", 0.0)  # nothing is claimed
            seen = evidence(claim, found, notes)
            pairs.append(
                Pair(
                    name,
                    first,
                    metric,
                    claim.score,
                    paired(list(seen.values.values())),
                    seen.values,
                )
            )
    for pair, corrected in zip(pairs, holm([pair.interval.p for pair in pairs]), strict=True):
        pair.p_holm = corrected
    return pairs


def _score(run: Run, metric: str, score: str, any_logged: bool) -> float | None:
    # where no run has the metric nobody has lost in it
    return score_of(run, metric, score) if any_logged else None


def _arm(name: str, runs: list[Run], metric: str, targets: Sequence[str], any_logged: bool) -> Arm:
    finished = [run for run in runs if run.finished]
    scores = {
        score: {run.seed: _score(run, metric, score, any_logged) for run in finished}
        for score in SCORES
    }
    costs = {
        target: {run.seed: reached(run, metric, float(target)) for run in finished}
        for target in targets
    }
    return Arm(name, runs, scores, costs)
