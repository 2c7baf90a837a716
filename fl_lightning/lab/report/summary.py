"""All numbers of a report: the content of report.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_lightning.lab.report.claims import OF_TWO_ARMS, Claim, ClaimsFile, gather
from fl_lightning.lab.report.evidence import evidence, logged, named
from fl_lightning.lab.report.intervals import mean_sd
from fl_lightning.lab.report.reader_notes import notes_on, on_test
from fl_lightning.lab.report.runs import Found, ReportedRun
from fl_lightning.lab.report.scores import SCORES, of_clients, reached, score_of
from fl_lightning.lab.report.verdicts import Comparison, judge
from fl_lightning.metrics import without_prefix

BySeed = dict[int, float | None]
COSTS = ("rounds", "bytes", "seconds")


def known(values: Mapping[int, float | None]) -> list[float]:
    """Return the values of the seeds that have one."""
    return [value for value in values.values() if value is not None]


def _spread(values: BySeed) -> dict[str, Any]:
    """Return values of seeds in the form of report.json."""
    mean, sd = mean_sd(known(values))
    return {"mean": mean, "sd": sd, "values": values}


@dataclass
class Arm:
    """One arm: its runs, and the scores and costs of its finished runs by seed.

    ``reached``: target → seed → rounds, bytes and seconds until it. ``key``: its name in the sweep,
    if ``name`` is a label. ``clients``: measure → seed → value, if clients were measured.
    """

    name: str
    runs: list[ReportedRun]
    scores: dict[str, BySeed]
    reached: dict[str, dict[int, dict[str, Any]]]
    key: str
    clients: dict[str, BySeed] = field(default_factory=dict)

    @property
    def own(self) -> str:
        """Return the arm's key without the label of its sweep."""
        return self.key.removeprefix(f"{self.runs[0].label}/")

    @property
    def finished(self) -> list[ReportedRun]:
        return [run for run in self.runs if run.finished]

    @property
    def diverged(self) -> int:
        return sum(run.status == "diverged" for run in self.runs)

    @property
    def unfinished(self) -> int:
        return len(self.runs) - len(self.finished)

    def mean_sd(self, score: str) -> tuple[float | None, float | None]:
        """Return mean and deviation over the seeds that have this score."""
        return mean_sd(known(self.scores[score]))

    def to_json(self) -> dict[str, Any]:
        """Return the arm in the form of report.json."""
        scores = {score: _spread(values) for score, values in self.scores.items()}
        spreads = {measure: _spread(values) for measure, values in self.clients.items()}
        return {
            "n": len(self.finished),
            "diverged": self.diverged,
            "unfinished": self.unfinished,
            "runs": [str(run.folder) for run in self.runs],
            "scores": scores,
            **{f"{what}_to": self.until(what) for what in COSTS},
            **({"fairness": spreads} if spreads else {}),
        }

    def until(self, what: str) -> dict[str, BySeed]:
        """Return target → seed → the rounds, bytes or seconds until it."""
        spent: dict[str, BySeed] = {}
        for target, seeds in self.reached.items():
            spent[target] = {seed: cost[what] for seed, cost in seeds.items()}
        return spent

    def mean_until(self, target: str, what: str) -> float | None:
        """Return the mean over the seeds that reached it."""
        return mean_sd(known(self.until(what)[target]))[0]


@dataclass
class Summary:
    """A report as numbers.

    ``targets`` are as typed. ``notes`` are remarks that a reader needs to read the numbers
    correctly. ``settings``: setting → method → arm. ``timed``: whether seconds are
    shown. ``on_test``: whether validation was on the test set.
    """

    metric: str
    targets: tuple[str, ...]
    arms: dict[str, Arm]
    pairs: list[Comparison]
    verdicts: list[Comparison]
    notes: list[str]
    found: Found
    settings: dict[str, dict[str, str]]
    timed: bool = True
    on_test: bool = False

    @property
    def greater(self) -> bool:
        """Return whether greater is better for the metric; if that is needed and not known,
        raise an error.
        """
        return self.found.directions.greater(self.metric)

    def called(self, metric: str) -> str:
        """Return the metric's name for readers: ``test acc`` if validation was on the test set."""
        bare = without_prefix(metric)
        return f"test {bare}" if self.on_test and bare != metric else metric

    @property
    def by_sweep(self) -> dict[str, Summary]:
        """Return the name of each sweep → the summary of its arms; one entry if there is one
        sweep.
        """
        names = {sweep.group: sweep.folder.name for sweep in reversed(self.found.sweeps)}
        parts: dict[str, Summary] = {}
        for group in dict.fromkeys(sweep.group for sweep in self.found.sweeps):
            arms = {name: arm for name, arm in self.arms.items() if arm.runs[0].sweep == group}
            parts[names[group]] = replace(self, arms=arms, found=self.found.of(group))
        # Runs outside of all sweeps, or of two sweeps with one name, are drawn together.
        whole = sum(len(part.found.runs) for part in parts.values()) == len(self.found.runs)
        return parts if whole and len(parts) == len(names) else {"": self}

    @property
    def scored(self) -> bool:
        """Return whether any run logs the metric."""
        return logged(self.found, self.metric)

    def to_json(self) -> dict[str, Any]:
        """report.json."""
        return {
            "metric": self.metric,
            "arms": {name: arm.to_json() for name, arm in self.arms.items()},
            "pairs": [pair.to_pair() for pair in self.pairs],
            "claims": [verdict.to_claim() for verdict in self.verdicts],
            "settings": self.settings,
        }


def summarise(
    found: Found,
    metric: str = "val/acc",
    targets: Sequence[str] = (),
    claims: Path | None = None,
) -> Summary:
    """Return scores, costs, intervals and verdicts of the runs that were ``found``.

    Args:
        found: runs and sweeps.
        metric: the metric to score; claims name their own.
        targets: numbers as typed.
        claims: a file of claims, instead of the sweeps' own.

    Raises:
        UserError: a file does not hold claims, or runs cannot be paired because their partitions
            differ.
    """
    files = gather(found, claims)
    any_logged = logged(found, metric)
    arms = {}
    for name, runs in found.arms.items():
        arms[name] = _arm(name, runs, metric, targets, any_logged)
    # Notes about the runs come before notes about a claim.
    notes = notes_on(found, metric, files)
    by_setting = settings(found)
    verdicts: list[Comparison] = []
    for file in files:
        verdicts += _judged(file, found, notes)
    pairs = [each for each in verdicts if each.claim.kind in OF_TWO_ARMS]
    if not files:
        pairs = _within_settings(by_setting, metric, found, notes)
    notes = list(dict.fromkeys(notes))
    made = Summary(metric, tuple(targets), arms, pairs, verdicts, notes, found, by_setting)
    made.on_test = on_test(found) == {True}
    return made


def relabelled(summary: Summary, labels: Mapping[str, str]) -> Summary:
    """Return the report with other names of arms, given as arm → label; no number changes."""

    def called(arm: str) -> str:
        return labels.get(arm, arm)

    def compared(found: Comparison) -> Comparison:
        return replace(found, claim=named(found.claim, labels))

    arms = {}
    for name, arm in summary.arms.items():
        runs = [replace(run, arm=called(name)) for run in arm.runs]
        arms[called(name)] = replace(arm, name=called(name), runs=runs)
    by_setting = {}
    for setting, members in summary.settings.items():
        by_setting[setting] = {method: called(arm) for method, arm in members.items()}
    runs = [replace(run, arm=called(run.arm)) for run in summary.found.runs]
    return replace(
        summary,
        arms=arms,
        pairs=[compared(pair) for pair in summary.pairs],
        verdicts=[compared(verdict) for verdict in summary.verdicts],
        found=replace(summary.found, runs=runs),
        settings=by_setting,
    )


def _judged(file: ClaimsFile, found: Found, notes: list[str]) -> list[Comparison]:
    """Return the verdicts on a file's claims, corrected within each family.

    The claims are about the runs of the file's own sweeps.
    """
    # Sweeps that are reported together keep their own claims.
    if file.group:
        found = found.of(file.group)
    claims = [named(claim, file.names) for claim in file.claims]
    measured = [(claim, evidence(claim, found, notes)) for claim in claims]
    verdicts: dict[str, Comparison] = {}
    for family in dict.fromkeys(claim.family for claim in claims):
        members = [(claim, values) for claim, values in measured if claim.family == family]
        for compared in judge(members):
            compared.changed = file.changed
            # A run that is still missing may change the p of the whole family.
            compared.provisional = any(values.incomplete for _, values in members)
            verdicts[compared.claim.id] = compared
    return [verdicts[claim.id] for claim in claims]


def _within_settings(
    by_setting: Mapping[str, Mapping[str, str]], metric: str, found: Found, notes: list[str]
) -> list[Comparison]:
    """Without claims: pair every arm with its setting's first arm, corrected over all pairs."""
    members = []
    for arms in by_setting.values():
        first, *others = arms.values()
        for name in others:
            # This is not a claim: the object only names the arms that are compared.
            claim = Claim("", name, first, metric, "greater", 0.0)
            members.append((claim, evidence(claim, found, notes)))
    # Each comparison is another chance of a false positive, so all pairs form one family.
    return judge(members)


def _arm(
    name: str, runs: list[ReportedRun], metric: str, targets: Sequence[str], any_logged: bool
) -> Arm:
    scores: dict[str, BySeed] = {score: {} for score in SCORES}
    costs: dict[str, dict[int, dict[str, Any]]] = {target: {} for target in targets}
    for run in filter(lambda run: run.finished, runs):
        # If no run logs the metric, no run has lost in it, not even one that diverged.
        for score in SCORES:
            scores[score][run.seed] = score_of(run, metric, score) if any_logged else None
        for target in targets:
            costs[target][run.seed] = reached(run, metric, float(target))
    clients: dict[str, BySeed] = {}
    for run in filter(lambda run: run.status == "done", runs):
        for measure, value in of_clients(run, metric).items():
            clients.setdefault(measure, {})[run.seed] = value
    return Arm(name, runs, scores, costs, name, clients)


def group_of_arms(summary: Summary) -> dict[str, str]:
    """Return arm → the group of its sweep, because arms of other sweeps have other settings."""
    return {name: arm.runs[0].sweep for name, arm in summary.arms.items()}


def first_arms(summary: Summary) -> dict[str, str]:
    """Return arm → the first one of its sweep, relative to which its costs are measured."""
    first: dict[str, str] = {}
    return {name: first.setdefault(group, name) for name, group in group_of_arms(summary).items()}


# ------------------------------------------------------------------- arms that are compared

# The name of the only setting, if runs differ only in their methods.
ALL = "all"


def settings(found: Found) -> dict[str, dict[str, str]]:
    """Return setting → method → arm, in the order of the runs.

    A setting's name has the values of the grid's axes other than the method. If a sweep has only
    one method, options that change the data are the setting, and the other axes take the method's
    place.
    """
    placed = []
    for group, runs in _groups(found).items():
        placed += [(group, *_placed(run, _axes(runs))) for run in runs]
    of_setting: dict[str, set[str]] = {}
    # Two sweeps may have settings with the same name.
    for group, setting, _, _ in placed:
        of_setting.setdefault(setting, set()).add(group)
    made: dict[str, dict[str, str]] = {}
    for group, setting, method, arm in placed:
        # If a setting's name occurs in several groups, prefix it with its group.
        name = setting
        if group and len(of_setting[setting]) > 1:
            name = f"{group}/{setting}"
        methods = made.setdefault(name, {})
        methods[arm if method in methods else method] = arm
    return made


def _groups(found: Found) -> dict[str, list[ReportedRun]]:
    """Return a run of each arm; sweeps whose arms were kept apart are groups, and all others
    are one group.
    """
    groups: dict[str, dict[str, ReportedRun]] = {}
    for run in found.runs:
        groups.setdefault(run.label, {}).setdefault(run.arm, run)
    return {group: list(arms.values()) for group, arms in groups.items()}


def _axes(runs: list[ReportedRun]) -> tuple[list[str], list[str]]:
    """Return the axes with several values, in two groups: axes of the setting, and axes of the
    method.
    """
    values: dict[str, set[str]] = {}
    for run in runs:
        for key, value in run.axes.items():
            values.setdefault(key, set()).add(value)
    keys = [key for key, swept in values.items() if len(swept) > 1]
    if "method" in keys:
        return [key for key in keys if key != "method"], ["method"]
    of_data = [key for key in keys if key.split(".")[0] == "data"]
    return of_data, [key for key in keys if key not in of_data]


def _placed(run: ReportedRun, axes: tuple[list[str], list[str]]) -> tuple[str, str, str]:
    """Return (setting, method, arm) of a run."""
    setting = _values(run, axes[0])
    method = _values(run, axes[1])
    return setting or ALL, method or run.axes.get("method") or run.arm, run.arm


def _values(run: ReportedRun, keys: list[str]) -> str:
    return "_".join(run.axes[key] for key in keys if key in run.axes)
