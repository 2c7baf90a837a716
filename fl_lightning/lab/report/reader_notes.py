"""What a reader has to know to read the numbers correctly, before any pair is compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fl_lightning.lab.report.claims import ClaimsFile
from fl_lightning.lab.report.evidence import absent, logged
from fl_lightning.lab.report.runs import Found, ReportedRun
from fl_lightning.lab.report.scores import SCORES, has_lost
from fl_lightning.metrics import without_prefix


def notes_on(found: Found, metric: str, files: Sequence[ClaimsFile]) -> list[str]:
    """Return the notes; those about all runs come first."""
    notes = [] if logged(found, metric) else [absent(found, metric)]
    notes += _on_claims(found, files)
    scored = {metric: None}
    for file in files:
        scored |= dict.fromkeys(claim.metric for claim in file.claims)
    for name, runs in found.arms.items():
        notes += _on_arm(name, runs)
        for each in scored:
            notes += _on_infinite(name, runs, each)
    notes += _warnings_of_arms(found)
    # Scores of runs with unequal numbers of rounds are allowed, but do not compare only the
    # methods.
    if len({run.rounds_done for run in found.runs if run.status == "done"}) > 1:
        notes.append("Runs differ in their number of rounds. Compare them at equal cost, below.")
    if waiting := Counter(status for _, _, status in found.waiting):
        counts = ", ".join(f"{number} {status}" for status, number in waiting.items())
        notes.append(f"Some runs of the sweep have no run.json: {counts}.")
    notes += _on_own_models(found, metric)
    commits = dict.fromkeys(
        str(commit)[:12] for run in found.runs if (commit := run.record.get("commit"))
    )
    notes += _on_test(found)
    if len(commits) > 1:
        notes.append(f"The runs were made at different commits: {', '.join(commits)}.")
    return notes


def on_test(found: Found) -> set[bool]:
    """Return whether arms were validated on their test set; both values if they differ."""
    return {runs[0].on_test for runs in found.arms.values()}


def _on_test(found: Found) -> list[str]:
    if not any(name.startswith("val") for name in found.metrics):
        return []
    answers = on_test(found)
    if len(answers) > 1:
        return [
            "Some arms validated on the test set and others did not: do not compare their val/…."
        ]
    if True in answers:
        return [
            "Validation used the test set, so this report writes test acc for val/acc, and "
            "likewise for other columns val/…."
        ]
    return []


def _on_own_models(found: Found, metric: str) -> list[str]:
    """Note the arms whose clients use their own models, if the metric measures the server's."""
    own = f"clients/{without_prefix(metric)}"
    arms = []
    for name, runs in found.arms.items():
        shown = [run.record.get("shown") or [] for run in runs]
        if own != f"clients/{metric}" and any(own in each and metric not in each for each in shown):
            arms.append(name)
    if not arms:
        return []
    note = (
        f"{metric} measures the server's model, but the clients of {', '.join(arms)} use their own "
        f"models, which {own} measures. Do not compare arms by {metric}."
    )
    if all(own in run.columns for run in found.runs if run.finished):
        return [f"{note} All arms log {own}: give report --metric {own}."]
    return [f"{note} Add PerClientEvaluation to all arms, and compare them by {own}."]


def _on_claims(found: Found, files: Sequence[ClaimsFile]) -> list[str]:
    notes = []
    for file in files:
        # If a claim was changed after its runs began, it was not made before them.
        if file.changed:
            notes.append(
                f"{file.path} was edited after the runs started: no run recorded its present hash."
            )
    stating = [run for run in found.runs if run.record.get("claims_hash")]
    if stating and not files:
        notes.append(
            f"{len(stating)} runs, such as {stating[0].folder}, recorded claims, but claims.yaml "
            "was removed. So this report cannot judge what was claimed before the runs."
        )
    return notes


def _warnings(run: ReportedRun) -> list[str]:
    """Return the warnings of a run from its run.json."""
    given = run.record.get("notes")
    return [text for text in given if isinstance(text, str)] if isinstance(given, list) else []


def _warnings_of_arms(found: Found) -> list[str]:
    """Return each warning once, after the names of the arms all of whose runs gave it."""
    arms: dict[str, list[str]] = {}
    for name, runs in found.arms.items():
        # The card of a run has the warnings that only this run gave, such as a drawn seed.
        others = [_warnings(run) for run in runs[1:]]
        for text in _warnings(runs[0]):
            if all(text in also for also in others):
                arms.setdefault(text, []).append(name)
    return [f"{', '.join(names)}: {text.rstrip('.')}." for text, names in arms.items()]


def _on_arm(name: str, runs: Sequence[ReportedRun]) -> list[str]:
    notes = []
    if len({run.record.get("config_hash") for run in runs}) > 1:
        notes.append(f"Runs of {name} differ in their config by more than the seed.")
    for run in runs:
        table = run.folder / "metrics.csv"
        notes += [
            f"{table}: the run is {run.status}, but this file {fault}." for fault in run.faults
        ]
    if diverged := [str(run.seed) for run in runs if run.status == "diverged"]:
        notes.append(
            f"{name} diverged with seed {', '.join(diverged)}. A diverged run counts as lost. It "
            "is not dropped."
        )
    # A diverged run is a result; these runs may still become one.
    for status in ("running", "stopped", "failed"):
        if seeds := [str(run.seed) for run in runs if run.status == status]:
            notes.append(
                f"{name}, seed {', '.join(seeds)}: {status}. The curves show such runs, but no "
                "score includes them."
            )
    return notes


def _on_infinite(name: str, runs: Sequence[ReportedRun], metric: str) -> list[str]:
    """Note which done runs have nevertheless lost, and in which scores."""
    seeds: dict[str, list[str]] = {}
    for run in runs:
        scores = [score for score in SCORES if has_lost(run, metric, score)]
        if run.status == "done" and scores:
            seeds.setdefault(", ".join(scores), []).append(str(run.seed))
    return [
        f"{name}, seed {', '.join(which)}: {metric} is not finite in a round that counts. Each "
        f"such run has lost, as if it had diverged, in {scores}."
        for scores, which in seeds.items()
    ]
