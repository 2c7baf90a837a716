"""What a reader has to know to read the numbers right, seen before any pair is looked at."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence

from fl_lightning.report.claims import ClaimsFile
from fl_lightning.report.evidence import absent, logged
from fl_lightning.report.runs import Found, Run, Sweep


def notes_on(found: Found, metric: str, files: Sequence[ClaimsFile]) -> list[str]:
    """The notes, those on all runs first."""
    notes = [] if logged(found, metric) else [absent(found, metric)]
    notes += _on_claims(found, files)
    for name, runs in found.arms.items():
        notes += _on_arm(name, runs)
    if len({run.rounds_done for run in found.runs if run.status == "done"}) > 1:
        notes.append("Runs differ in their number of rounds: compare them at equal cost below.")
    if waiting := Counter(status for _, _, status in found.waiting):
        counts = ", ".join(f"{number} {status}" for status, number in waiting.items())
        notes.append(f"Runs of the sweep that left no run.json: {counts}.")
    commits = dict.fromkeys(str(c)[:12] for run in found.runs if (c := run.record.get("commit")))
    if len(commits) > 1:
        notes.append(f"Runs were made at several commits: {', '.join(commits)}.")
    return notes + [note for sweep in found.sweeps if (note := _on_candidates(sweep))]


def _on_claims(found: Found, files: Sequence[ClaimsFile]) -> list[str]:
    notes = []
    for file in files:
        own = [run for run in found.runs if not file.folders or run.folder in file.folders]
        if file.stated and (without := len(own) - len(file.stated)) > 0:
            notes.append(
                f"{without} of {len(own)} runs recorded no claims, beside others that recorded theirs."
            )
        if file.changed:
            notes.append(
                f"{file.path} was edited after the runs started: its hash is none that a run recorded."
            )
        elif others := sum(stated != file.hash for stated in file.stated):
            notes.append(
                f"{others} of {len(file.stated)} runs recorded other claims than those in {file.path}."
            )
    read = {file.hash for file in files}
    gone: dict[str, list[Run]] = {}
    for run in found.runs:
        stated = run.record.get("claims_hash")
        if stated and not read and stated not in read:
            gone.setdefault(str(stated), []).append(run)
    for sweep in found.sweeps if read else ():
        stated = [
            run for run in found.runs if run.folder in sweep.runs and run.record.get("claims_hash")
        ]
        if (
            sweep.claims is None
            and stated
            and not any(r.record["claims_hash"] in read for r in stated)
        ):
            gone.setdefault(str(stated[0].record["claims_hash"]), []).extend(stated)
    for stated, runs in gone.items():
        notes.append(
            f"{len(runs)} runs, such as {runs[0].folder}, recorded claims (SHA-256 {str(stated)[:12]}…) that are not "
            "here: claims.yaml was removed, so what was claimed before the runs is not judged."
        )
    return notes


def _on_arm(name: str, runs: Sequence[Run]) -> list[str]:
    notes = []
    if len({run.record.get("config_hash") for run in runs}) > 1:
        notes.append(f"Runs of {name} differ in their config by more than the seed.")
    for run in runs:
        notes += [
            f"{run.folder / 'metrics.csv'} of a run that is {run.status} {fault}."
            for fault in run.faults
        ]
    if diverged := [str(run.seed) for run in runs if run.status == "diverged"]:
        notes.append(
            f"{name} diverged with seed {', '.join(diverged)}: counted as lost, never dropped."
        )
    for status in ("running", "stopped", "failed"):
        if seeds := [str(run.seed) for run in runs if run.status == status]:
            notes.append(
                f"{name}, seed {', '.join(seeds)}: {status}. Shown in the curves, kept out of every score."
            )
    return notes


def _on_candidates(sweep: Sweep) -> str | None:
    """Said where the arms of a sweep chose from unequal numbers of candidates."""
    try:
        rows = list(
            csv.DictReader((sweep.folder / "select.csv").read_text(encoding="utf-8").splitlines())
        )
    except (OSError, UnicodeDecodeError, csv.Error):
        return None
    counts = Counter(sweep.names.get(row.get("arm") or "", row.get("arm") or "") for row in rows)
    if len(set(counts.values())) < 2:
        return None
    told = ", ".join(f"{arm} {number}" for arm, number in counts.items())
    return f"The arms of {sweep.folder} chose from unequal numbers of candidates: {told}."
