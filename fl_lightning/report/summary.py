"""Everything a report states as numbers: what report.json holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fl_lightning.errors import UserError, suggest
from fl_lightning.report.claims import Claim, ClaimsFile, differences, gather, verdict
from fl_lightning.report.intervals import Interval, holm, mean_sd, paired
from fl_lightning.report.runs import Found, Run
from fl_lightning.report.scores import SCORES, measured, reached, score_of

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
                target: {seed: at[what] for seed, at in seeds.items()} for target, seeds in self.reached.items()
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
    """``a`` against ``b``, paired by seed; ``differences`` are those of the seeds that both have."""

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
    """What the runs say about a claim."""

    claim: Claim
    verdict: str
    pair: Pair
    changed: bool | None

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

    @property
    def greater(self) -> bool:
        """Whether more of the metric is better; asked for where it is not known."""
        return self.found.directions.greater(self.metric)

    @property
    def scored(self) -> bool:
        """Whether any run logs the metric."""
        return _logged(self.found, self.metric)

    def to_json(self) -> dict[str, Any]:
        """report.json."""
        return {
            "metric": self.metric,
            "arms": {name: arm.to_json() for name, arm in self.arms.items()},
            "pairs": [pair.to_json() for pair in self.pairs],
            "claims": [verdict.to_json() for verdict in self.verdicts],
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
    by_arm = found.arms
    arms = {name: _arm(name, runs, metric, targets, _logged(found, metric)) for name, runs in by_arm.items()}
    notes = _notes(found, metric, files)
    verdicts: list[Verdict] = []
    if files:
        for file in files:
            for claim in file.claims:
                pair, lost = _pair(claim, by_arm, found, notes)
                interval = pair.interval
                said = verdict(claim.direction, claim.margin, interval.mean, interval.low, interval.high, lost)
                verdicts.append(Verdict(claim, said, pair, file.changed))
        pairs = [v.pair for v in verdicts]
    else:
        first, *others = by_arm
        against = [Claim("", name, first, metric, "", 0.0) for name in others]  # nothing is claimed
        pairs = [_pair(claim, by_arm, found, notes)[0] for claim in against]
    for pair, corrected in zip(pairs, holm([pair.interval.p for pair in pairs]), strict=True):
        pair.p_holm = corrected
    return Summary(metric, tuple(targets), arms, pairs, verdicts, notes, found)


def _logged(found: Found, metric: str) -> bool:
    return any(len(measured(run, metric)[0]) for run in found.runs)


def _score(run: Run, metric: str, score: str, logged: bool, mode: str | None = None) -> float | None:
    return score_of(run, metric, score, mode) if logged else None  # where no run has the metric nobody has lost in it


def _arm(name: str, runs: list[Run], metric: str, targets: Sequence[str], logged: bool) -> Arm:
    finished = [run for run in runs if run.finished]
    scores = {score: {run.seed: _score(run, metric, score, logged) for run in finished} for score in SCORES}
    costs = {target: {run.seed: reached(run, metric, float(target)) for run in finished} for target in targets}
    return Arm(name, runs, scores, costs)


def _pair(claim: Claim, by_arm: Mapping[str, list[Run]], found: Found, notes: list[str]) -> tuple[Pair, bool]:
    """The paired interval, and whether a pair was left out because one of its runs diverged."""
    a, b = ({run.seed: run for run in by_arm.get(name, []) if run.finished} for name in (claim.a, claim.b))
    for name in (claim.a, claim.b):
        if name not in by_arm:
            hint = suggest(name, by_arm) or f" There are: {', '.join(by_arm)}."
            _add(notes, f"Claim {claim.id} is about the arm {name}, of which there is no run.{hint}")
    seeds = sorted(a.keys() & b.keys())
    for seed in seeds:
        _refuse_other_partition(a[seed], b[seed])
    for name, own, other in ((claim.a, a, b), (claim.b, b, a)):
        if alone := sorted(own.keys() - other.keys()):
            other_name = claim.b if name == claim.a else claim.a
            numbers = ", ".join(map(str, alone))
            which = "seed" if len(alone) == 1 else "seeds"
            _add(notes, f"{which.capitalize()} {numbers} of {name}: no finished run of {other_name} to pair with.")
    logged = _logged(found, claim.metric)
    if not logged:
        _add(notes, _absent(found, claim.metric))
    scored = [
        tuple(_score(arm[seed], claim.metric, claim.score, logged, claim.mode or None) for arm in (a, b))
        for seed in seeds
    ]
    between = dict(zip(seeds, differences(claim, [(x, y) for x, y in scored]), strict=True))
    lost = any(between[s] is None and "diverged" in (a[s].status, b[s].status) for s in seeds)
    if out := [s for s in seeds if between[s] is None and logged]:
        why = "diverged, so it has no score to compare" if lost else "has no score to compare"
        _add(notes, f"{claim.a} − {claim.b} in {claim.metric}: a run with seed {', '.join(map(str, out))} {why}.")
    kept = {seed: value for seed, value in between.items() if value is not None}
    pair = Pair(claim.a, claim.b, claim.metric, claim.score, paired(list(kept.values())), kept, claim.scale)
    return pair, lost


def _refuse_other_partition(a: Run, b: Run) -> None:
    ours, theirs = (run.record.get("partition_hash") for run in (a, b))
    if ours != theirs:
        raise UserError(
            f"report: {a.folder} and {b.folder} both have seed {a.seed} but other partitions of the data ({ours} and "
            f"{theirs}), so they are no pair: the split, not the method, could make the difference. Compare runs with "
            "the same --data options and seed."
        )


def _add(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)


def _absent(found: Found, metric: str) -> str:
    names = dict.fromkeys(name for run in found.runs for name in run.columns if name != "round")
    return f"No run logs {metric}, so nothing is scored by it.{suggest(metric, names)}"


def _notes(found: Found, metric: str, files: list[ClaimsFile]) -> list[str]:
    """What stands out before any pair is looked at."""
    notes: list[str] = []
    if not _logged(found, metric):
        notes.append(_absent(found, metric))
    for file in files:
        if file.changed:
            notes.append(f"{file.path} was edited after the runs started: its hash is none that a run recorded.")
        elif others := sum(stated != file.hash for stated in file.stated):
            notes.append(f"{others} of {len(file.stated)} runs recorded other claims than those in {file.path}.")
    for name, runs in found.arms.items():
        if len({run.record.get("config_hash") for run in runs}) > 1:
            notes.append(f"Runs of {name} differ in their config by more than the seed.")
        if diverged := [str(run.seed) for run in runs if run.status == "diverged"]:
            notes.append(f"{name} diverged with seed {', '.join(diverged)}: counted as lost, never dropped.")
        for status in ("running", "stopped", "failed"):
            if seeds := [str(run.seed) for run in runs if run.status == status]:
                notes.append(
                    f"{name}, seed {', '.join(seeds)}: {status}. Shown in the curves, kept out of every score."
                )
    if len({run.rounds_done for run in found.runs if run.status == "done"}) > 1:
        notes.append("Runs differ in their number of rounds: compare them at equal rounds below.")
    absent = Counter(status for _, _, status in found.waiting)
    if absent:
        counts = ", ".join(f"{number} {status}" for status, number in absent.items())
        notes.append(f"Runs of the sweep that left no run.json: {counts}.")
    return notes
