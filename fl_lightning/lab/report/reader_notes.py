"""What a reader has to know to read the numbers correctly, before any pair is compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from fl_lightning.lab.report.chosen import choices, on_test_samples
from fl_lightning.lab.report.claims import ClaimsFile
from fl_lightning.lab.report.evidence import absent, logged
from fl_lightning.lab.report.fairness import after_last_round, measured_nobody, over_rounds
from fl_lightning.lab.report.runs import Found, ReportedRun, ReportedSweep, read_table
from fl_lightning.lab.report.scores import SCORES, has_lost


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
        notes += _on_clients(runs, metric)
    # Scores of runs with unequal numbers of rounds are allowed, but do not compare only the
    # methods.
    if len({run.rounds_done for run in found.runs if run.status == "done"}) > 1:
        notes.append("Runs differ in their number of rounds. Compare them at equal cost, below.")
    if waiting := Counter(status for _, _, status in found.waiting):
        counts = ", ".join(f"{number} {status}" for status, number in waiting.items())
        notes.append(f"Some runs of the sweep have no run.json: {counts}.")
    commits = dict.fromkeys(
        str(commit)[:12] for run in found.runs if (commit := run.record.get("commit"))
    )
    notes += _on_test(found)
    if len(commits) > 1:
        notes.append(f"The runs were made at different commits: {', '.join(commits)}.")
    for sweep in found.sweeps:
        notes += _on_candidates(sweep)
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


def _on_claims(found: Found, files: Sequence[ClaimsFile]) -> list[str]:
    notes = []
    for file in files:
        runs = [run for run in found.runs if not file.folders or run.folder in file.folders]
        if file.stated and (without := len(runs) - len(file.stated)) > 0:
            notes.append(
                f"{without} of {len(runs)} runs recorded no claims, although other runs recorded "
                "theirs."
            )
        # If a claim was changed after its runs began, it was not made before them.
        if file.changed:
            notes.append(
                f"{file.path} was edited after the runs started: no run recorded its present hash."
            )
        elif others := sum(stated != file.hash for stated in file.stated):
            notes.append(
                f"{others} of {len(file.stated)} runs recorded other claims than those in "
                f"{file.path}."
            )
    for stated, runs in _unread(found, {file.hash for file in files}).items():
        notes.append(
            f"{len(runs)} runs, such as {runs[0].folder}, recorded claims (SHA-256 "
            f"{stated[:12]}…), but claims.yaml was removed. So this report cannot judge what was "
            "claimed before the runs."
        )
    return notes


def _unread(found: Found, read: Set[str]) -> dict[str, list[ReportedRun]]:
    """Return hash of claims that runs recorded, and that the report has not read → these runs."""
    unread: dict[str, list[ReportedRun]] = {}
    if not read:
        for run in found.runs:
            if stated := run.record.get("claims_hash"):
                unread.setdefault(str(stated), []).append(run)
        return unread
    # If some claims were read, other sweeps may have lost theirs.
    for sweep in found.sweeps:
        runs = [run for run in found.runs if run.folder in sweep.runs]
        stating = [run for run in runs if run.record.get("claims_hash")]
        known = any(run.record["claims_hash"] in read for run in stating)
        if sweep.claims is None and stating and not known:
            unread.setdefault(str(stating[0].record["claims_hash"]), []).extend(stating)
    return unread


def _warnings(run: ReportedRun) -> list[str]:
    """Return the warnings of a run from its run.json."""
    given = run.record.get("notes")
    return [text for text in given if isinstance(text, str)] if isinstance(given, list) else []


def _on_arm(name: str, runs: Sequence[ReportedRun]) -> list[str]:
    notes = []
    if len({run.record.get("config_hash") for run in runs}) > 1:
        notes.append(f"Runs of {name} differ in their config by more than the seed.")
    for run in runs:
        table = run.folder / "metrics.csv"
        notes += [
            f"{table}: the run is {run.status}, but this file {fault}." for fault in run.faults
        ]
    # The card of a run has the warnings that only this run gave, such as a drawn seed.
    common = _warnings(runs[0])
    for run in runs[1:]:
        also = _warnings(run)
        common = [text for text in common if text in also]
    notes += [f"{name}: {text.rstrip('.')}." for text in common]
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


def _on_clients(runs: Sequence[ReportedRun], metric: str) -> list[str]:
    notes = []
    for run in runs:
        _, fault = after_last_round(run, metric)
        path = run.folder / "clients.csv"
        if fault and run.status == "done":
            notes.append(
                f"{path} {fault}. The file is damaged, so the fairness table leaves this run out."
            )
        elif run.status == "done" and measured_nobody(run):
            notes.append(f"{path} has no rows: no client was measured after the last round.")
        _, changed = over_rounds(run, metric)
        if changed:
            path = run.folder / "clients_rounds.csv"
            notes.append(
                f"{path}: the clients' mean differs from the mean that the run logged in "
                f"{len(changed)} of its rounds, first in round {changed[0]}. The file is damaged, "
                "so these rounds are not drawn."
            )
    return notes


def _on_candidates(sweep: ReportedSweep) -> list[str]:
    """Note if the arms of a sweep chose by test samples, or from unequal numbers of candidates."""
    metrics = {choice.metric for choice in choices(sweep)}
    notes = [
        f"The arms of {sweep.folder} chose by {metric}, which is measured on the clients' test "
        "samples. So their own scores on such samples may be too good."
        for metric in sorted(filter(on_test_samples, metrics))
    ]
    arms = [row.get("arm") or "" for row in read_table(sweep.folder / "select.csv")]
    counts = Counter(sweep.names.get(arm, arm) for arm in arms)
    if len(set(counts.values())) > 1:
        unequal = ", ".join(f"{arm} {number}" for arm, number in counts.items())
        notes.append(
            f"The arms of {sweep.folder} chose from different numbers of candidates: {unequal}."
        )
    return notes
