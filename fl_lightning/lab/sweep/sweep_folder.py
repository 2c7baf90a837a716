"""A sweep's folder: lock, sweep.yaml, claims.yaml, runs.csv, and the state of each run in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fl_lightning.errors import UserError, cannot_write
from fl_lightning.lab.report import runs as reading
from fl_lightning.lab.sweep.grid import PlannedArm, PlannedRun
from fl_lightning.lab.sweep.sweep_file import Spec, check_known
from fl_lightning.metrics import comma_separated, read_record, read_rows, write_record
from fl_lightning.storage.atomic_files import written_aside
from fl_lightning.storage.lock import hold

WAITING = "waiting"
RUNNING = "running"
DONE = "done"
DIVERGED = "diverged"
FAILED = "failed"


def make(folder: Path) -> None:
    """Make a folder of a sweep, if it does not exist.

    Raises:
        UserError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a sweep's folder against other sweeps until the block or this process ends.

    Raises:
        UserError: a running process holds the folder.
    """
    make(folder)
    lock = hold(folder)
    lock.use()
    try:
        yield
    finally:
        lock.release()


def keep_files(folder: Path, spec: Spec, arms: Sequence[PlannedArm]) -> str | None:
    """Write sweep.yaml and claims.yaml, and return the hash of the claims, None if there are none.

    Raises:
        UserError: there are claims about arms that the grid lacks, or claims were changed or
            removed after runs of this sweep began.
    """
    claims_hash = None
    # The runs that select show which arm does well, just as the sweep's own runs do.
    records = [*folder.glob("*/seed-*/run.json"), *folder.glob("select/*/*/seed-*/run.json")]
    check_claims(spec, arms)
    kept = folder / "claims.yaml"
    data = spec.claims.read_bytes() if spec.claims else None
    if data is None:
        changed = any(read_record(path.parent).get("claims_hash") for path in records)
    else:
        claims_hash = hashlib.sha256(data).hexdigest()
        changed = bool(records) and not (kept.is_file() and kept.read_bytes() == data)
    if changed:
        raise UserError(
            f"sweep {spec.name}: its claims ({spec.claims or 'none'}) differ from those of the "
            f"runs that were made already ({kept}), and claims have to come before the runs. "
            "Restore the old claims, or start again in another folder with --out."
        )
    if data is not None:
        with written_aside(kept) as file:
            file.write(data)
    note = f"\n# over it: {' '.join(spec.overrides)}\n" if spec.overrides else ""
    with written_aside(folder / "sweep.yaml") as file:
        file.write((spec.text + note).encode())
    return claims_hash


def check_claims(spec: Spec, arms: Sequence[PlannedArm]) -> None:
    """Refuse claims about arms, axes or methods that the grid does not have."""
    path = spec.claims
    if path is None:
        return
    # Import here: this module is slow to import, and most sweeps have no claims.
    from fl_lightning.lab.report.claims import read_claims

    names = [arm.name for arm in arms]
    methods = list(dict.fromkeys(arm.axes.get("method", "") for arm in arms))
    for claim in read_claims(path, ()).claims:
        check_known(f"sweep {spec.name}: claim {claim.id} of {path}: arm ", claim.arms, names)
        if claim.kind == "trend" and claim.over != "layers":
            known = claim.over in spec.grid and (not claim.arm or claim.arm in methods)
            # With several methods a trend has to name the arm that it is about.
            if not known or (len(methods) > 1 and not claim.arm and claim.over != "method"):
                raise UserError(
                    f"sweep {spec.name}: claim {claim.id} of {path} is a trend over "
                    f"{claim.over!r}, arm {claim.arm!r}. Accepted: layers or an axis of the grid "
                    f"({', '.join(spec.grid)}), and as arm a value of method if several are swept "
                    f"({', '.join(methods)})."
                )


def set_status(run: PlannedRun, status: str) -> None:
    """Correct run.json of a run whose process could not write its end."""
    if content := read_record(run.folder):
        write_record(run.folder, content | {"status": status})


def standing(run: PlannedRun, before: Mapping[str, str], rounds: int | None = None) -> str:
    """Return the status of ``run`` while no worker runs it: waiting, done, diverged or failed.

    Args:
        before: the states in runs.csv, by place.
        rounds: number of rounds that are asked for now; None: what the run's own options ask for.
    """
    rounds = run.rounds if rounds is None else rounds
    content = read_record(run.folder)
    status = content.get("status")
    done = content.get("rounds")
    # A finished run has more to do if you ask for more rounds.
    if status == DONE and rounds is not None and isinstance(done, int) and 0 <= done < rounds:
        return WAITING
    if status in (DONE, DIVERGED, FAILED):
        return str(status)
    return FAILED if not content and before.get(run.place) == FAILED else WAITING


def read_states(folder: Path) -> dict[str, str]:
    """Return place → status, from runs.csv."""
    # A broken runs.csv is rebuilt from the runs' own files.
    states = reading.read_states(folder)
    return {f"{arm}/seed-{seed}": status for (arm, seed), status in states.items()}


def write_states(folder: Path, states: Mapping[PlannedRun, str]) -> None:
    """Write runs.csv whole; it names a run's folder relative to the folder in which the sweep
    was started.
    """
    rows = [[run.arm, run.seed, status, str(run.folder)] for run, status in states.items()]
    with written_aside(folder / "runs.csv", durable=False) as file:
        file.write(comma_separated([["arm", "seed", "status", "folder"], *rows]).encode())


def progress(run: PlannedRun, metric: str) -> tuple[int, float | None]:
    """Return (rounds done, the newest value of ``metric``); (0, None) if its table is damaged."""
    try:
        _, rows = read_rows(run.folder / "metrics.csv", complete=False)
        values = [float(row[metric]) for row in rows if row.get(metric)]
        done = int(rows[-1]["round"]) + 1 if rows else 0
    except (UserError, ValueError):
        return 0, None
    return done, (values[-1] if values else None)


def shown_of(run: PlannedRun) -> list[str]:
    """Return the metrics that a run shows, from its run.json; empty for an older run."""
    shown = read_record(run.folder).get("shown")
    if not isinstance(shown, list):
        return []
    return [name for name in shown if isinstance(name, str)]


def why_failed(run: PlannedRun) -> str:
    """Return the last line of a failed run's output."""
    try:
        text = (run.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
