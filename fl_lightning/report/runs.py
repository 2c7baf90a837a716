"""The folders that a report is about: runs, and sweeps full of runs."""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fl_lightning.cli.compose import parse_yaml
from fl_lightning.errors import UserError
from fl_lightning.metrics import Directions, read_rows

Column = np.ndarray[Any, np.dtype[np.float64]]

STATUSES = ("running", "done", "diverged", "stopped", "failed")
# Runs of the other statuses are shown, and kept out of scores.
FINISHED = ("done", "diverged")
# What is larger counts as infinite: the sum of two such numbers could not be told from infinity.
HUGE = 1e300
ASK = "Give report --mode (of --metric), or mode in the claim"


@dataclass(frozen=True, eq=False)
class Run:
    """One run as its folder tells it.

    ``columns`` are the metrics by name, NaN where nothing was measured. ``record`` is run.json.
    """

    folder: Path
    status: str
    seed: int
    arm: str
    record: Mapping[str, Any]
    columns: Mapping[str, Column]
    # All runs of a report share one: what one run knows of a metric holds for the others.
    directions: Directions = field(default_factory=lambda: Directions(ASK))
    # What is wrong with metrics.csv, where it can be read all the same.
    faults: tuple[str, ...] = ()

    @property
    def axes(self) -> dict[str, str]:
        """Key of its sweep's grid → value as named; empty if no sweep made the run."""
        axes = self.record.get("axes")
        if not isinstance(axes, dict):
            return {}
        return {str(key): str(value) for key, value in axes.items()}

    @property
    def finished(self) -> bool:
        """Whether it takes part in scores: it ended by itself, well or badly."""
        return self.status in FINISHED

    @property
    def rounds_done(self) -> int:
        """Rounds of which something was logged."""
        return _ended(self.columns["round"])

    def column(self, name: str) -> Column:
        """The metric ``name``; all NaN where it was never logged."""
        return self.columns.get(name, np.full(len(self.columns["round"]), math.nan))

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.yaml; empty where it is missing or cannot be read: a report does not need it."""
        return _mapping(self.folder / "config.yaml")


@dataclass(frozen=True)
class Sweep:
    """A folder of runs with what belongs to all of them.

    ``claims`` and ``spec`` are its claims.yaml and sweep.yaml. ``waiting`` lists (arm, seed,
    status) of the runs that have not begun. ``names`` says what the report calls an arm, where
    that is another name than the sweep's.
    """

    folder: Path
    claims: Path | None
    spec: Mapping[str, Any]
    runs: tuple[Path, ...]
    waiting: tuple[tuple[str, str, str], ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Found:
    """What the folders of a command line hold, in its order and the grid's.

    ``apart`` maps a run's folder to the label of its sweep, where that sweep is kept apart.
    """

    runs: list[Run] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    directions: Directions = field(default_factory=lambda: Directions(ASK))
    apart: dict[Path, str] = field(default_factory=dict)

    @property
    def waiting(self) -> list[tuple[str, str, str]]:
        """(arm, seed, status) of what has not begun."""
        waiting: list[tuple[str, str, str]] = []
        for sweep in self.sweeps:
            for arm, seed, status in sweep.waiting:
                waiting.append((sweep.names.get(arm, arm), seed, status))
        return waiting

    @property
    def arms(self) -> dict[str, list[Run]]:
        """Runs by arm, arms in the order in which they first come."""
        arms: dict[str, list[Run]] = {}
        for run in self.runs:
            arms.setdefault(run.arm, []).append(run)
        return arms

    def within(self, folders: Collection[Path]) -> Found:
        """The runs in ``folders``, which are resolved, and their sweeps alone."""

        def touches(sweep: Sweep) -> bool:
            return any(path.resolve() in folders for path in sweep.runs)

        runs = [run for run in self.runs if run.folder.resolve() in folders]
        return replace(self, runs=runs, sweeps=[sweep for sweep in self.sweeps if touches(sweep)])


def find(folders: Sequence[Path]) -> Found:
    """The runs in ``folders``: runs' own folders, sweeps, or any folder of runs.

    Raises:
        UserError: no run in a folder, a file that cannot be read, or two runs of one arm and seed.
    """
    found = Found()
    seen: set[Path] = set()
    for folder in folders:
        if (folder / "run.json").is_file():
            paths = [folder]
        else:
            sweep = _sweep(folder)
            found.sweeps.append(sweep)
            paths = list(sweep.runs)
        for path in paths:
            # A run may be named twice, or be part of a sweep that was named before.
            if path.resolve() not in seen:
                seen.add(path.resolve())
                found.runs.append(read_run(path, found.directions))
    _keep_apart(found)
    _refuse_twins(found.runs)
    return found


def _keep_apart(found: Found) -> None:
    """Call arms ``<sweep>/<arm>`` where sweeps with other claims have an arm of the same name.

    Sweeps with the same claims are reported as one: there, arms of one name are one arm.
    """
    kin_of_run: dict[Path, str] = {}
    folders: dict[str, Path] = {}
    # Backwards, so that of several sweeps the one named first gives its folder's name.
    for sweep in reversed(found.sweeps):
        kin = _kin(sweep)
        folders[kin] = sweep.folder.resolve()
        kin_of_run |= dict.fromkeys(sweep.runs, kin)
    labels = _labels(folders)
    kins_of_arm: dict[str, set[str]] = {}
    for run in found.runs:
        kins_of_arm.setdefault(run.arm, set()).add(kin_of_run.get(run.folder, ""))
    shared = {arm for arm, kins in kins_of_arm.items() if len(kins) > 1}
    parted = set[str]().union(*(kins_of_arm[arm] for arm in shared)) - {""}
    for run in found.runs:
        kin = kin_of_run.get(run.folder, "")
        if kin in parted:
            found.apart[run.folder] = labels[kin]
    for place, sweep in enumerate(found.sweeps):
        kin = _kin(sweep)
        if kin in parted:
            names = {arm: f"{labels[kin]}/{arm}" for arm in shared}
            found.sweeps[place] = replace(sweep, names=names)
    for place, run in enumerate(found.runs):
        if run.folder in found.apart and run.arm in shared:
            found.runs[place] = replace(run, arm=f"{found.apart[run.folder]}/{run.arm}")


def _labels(folders: Mapping[str, Path]) -> dict[str, str]:
    """Call each folder by its name, with its parent's where several have the same name."""
    names = [folder.name for folder in folders.values()]
    labels = {}
    for kin, folder in folders.items():
        labels[kin] = folder.name
        if names.count(folder.name) > 1:
            labels[kin] = f"{folder.parent.name}/{folder.name}"
    return labels


def _kin(sweep: Sweep) -> str:
    """The same text for sweeps that are reported as one.

    They have the same claims, or are folders of runs that no sweep made.
    """
    if sweep.claims is not None:
        return hashlib.sha256(sweep.claims.read_bytes()).hexdigest()
    if (sweep.folder / "sweep.yaml").is_file():
        return str(sweep.folder.resolve())
    return ""


def read_run(folder: Path, directions: Directions | None = None) -> Run:
    """The run in ``folder``.

    ``directions`` take what it recorded of its metrics, beside what other runs did.

    Raises:
        UserError: run.json is not one, or metrics.csv of a finished run is missing or broken.
    """
    path = folder / "run.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"report {folder}: cannot read {path} ({error}). It is written by `fl-lightning fit`."
        ) from None
    # JSON knows other documents than objects; a bool would pass for the integer of a seed.
    status = seed = None
    if isinstance(record, dict):
        status = record.get("status")
        seed = record.get("seed")
    if status not in STATUSES or isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(
            f"report {folder}: {path} has status {status!r} and seed {seed!r}. "
            f"Accepted: a status of {', '.join(STATUSES)}, and an integer as seed."
        )
    _check_kinds(path, record)
    arm = record.get("arm") or record.get("title") or folder.name
    directions = directions or Directions(ASK)
    # Older runs recorded no modes.
    directions.record(record.get("modes"))
    columns = _columns(folder, status)
    faults = _faults(folder, status, record, columns["round"])
    return Run(folder, status, seed, str(arm), record, columns, directions, faults)


def _check_kinds(path: Path, record: Mapping[str, Any]) -> None:
    """Refuse what a hand wrote into run.json that no run writes there."""
    for name in ("arm", "title", "partition_hash", "config_hash", "claims_hash"):
        value = record.get(name)
        if value is not None and not (
            isinstance(value, str) and len(value) <= 500 and value.isprintable()
        ):
            raise UserError(
                f"report {path.parent}: {path} has {name} {str(value)[:80]!a}. "
                "Accepted: a line of text."
            )
    # JSON can write half of a character, which a report could not be encoded with.
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"report {path.parent}: {path} holds text that no file can (a lone surrogate)."
        ) from None
    if not isinstance(record.get("command") or [], list):
        raise UserError(
            f"report {path.parent}: {path} has command {record['command']!r}. "
            "Accepted: a list of words."
        )


def _faults(
    folder: Path, status: str, record: Mapping[str, Any], rounds: Column
) -> tuple[str, ...]:
    """Say how metrics.csv of a finished run shows that it has lost something."""
    if status not in FINISHED:
        return ()
    faults = []
    asked = record.get("rounds")
    ended = _ended(rounds)
    if absent := ended - len(rounds):
        faults.append(f"lacks {absent} of the rounds 0 to {ended - 1}")
    if status == "done" and isinstance(asked, int) and ended < asked:
        faults.append(f"ends after {ended} of {asked} rounds")
    path = folder / "metrics.csv"
    if len(rounds) and path.is_file() and not path.read_bytes().endswith(b"\n"):
        faults.append("has a last line without an end, which may have been cut")
    return tuple(faults)


def _ended(rounds: Column) -> int:
    return int(rounds[-1]) + 1 if len(rounds) else 0


def _columns(folder: Path, status: str) -> dict[str, Column]:
    path = folder / "metrics.csv"
    packed = folder / "metrics.csv.gz"
    # A run that was stopped or failed before its first round ended has no metrics.
    if status != "done" and not path.is_file() and not packed.is_file():
        return {"round": np.empty(0)}
    names, rows = read_rows(path, complete=status in FINISHED)
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UserError(
            f"report {folder}: {path} has two columns {twice[0]!r}, and which is meant is not "
            "known. Remove one."
        )
    try:
        columns = {name: _numbers(rows, name) for name in names}
    except ValueError as error:
        raise UserError(
            f"report {folder}: {path} holds what is no number ({error}). Mend or remove the file."
        ) from None
    for column in columns.values():
        column[np.abs(column) > HUGE] = math.inf
    # What sums over rounds and looks up a round relies on their order.
    columns = {"round": np.empty(0), **columns}
    if (np.diff(columns["round"]) <= 0).any() or np.isinf(columns["round"]).any():
        raise UserError(
            f"report {folder}: the rounds in {path} do not ascend, one row each. "
            "Mend or remove the file."
        )
    return columns


def _numbers(rows: Sequence[Mapping[str, str]], name: str) -> Column:
    # An empty cell: nothing was measured in that round.
    return np.array([float(row[name] or "nan") for row in rows], dtype=float)


def _sweep(folder: Path) -> Sweep:
    """The runs of a sweep in its grid's order (that of runs.csv), of another folder by name."""
    if not folder.is_dir():
        raise UserError(
            f"report {folder}: there is no such folder. "
            "Give folders of runs or of sweeps, such as runs/x."
        )
    records = {*folder.glob("*/run.json"), *folder.glob("*/seed-*/run.json")}
    paths = sorted(record.parent for record in records)
    order = _grid_order(folder)

    def by_grid(path: Path) -> tuple[int, Any]:
        return order.get(_place(path, folder), len(order)), _natural(path)

    begun = {_place(path, folder) for path in paths}
    states = _states(folder)
    waiting = []
    for (arm, seed), status in states.items():
        if f"{arm}/seed-{seed}" not in begun:
            waiting.append((arm, seed, status))
    if not paths:
        reason = "neither it nor its subfolders have a run.json"
        if states:
            reason = f"none of its {len(states)} runs has begun"
        raise UserError(
            f"report {folder}: no run is here: {reason}. Give the folder of a run that "
            "`fl-lightning fit` made, or of a sweep."
        )
    claims = folder / "claims.yaml"
    return Sweep(
        folder,
        claims if claims.is_file() else None,
        _mapping(folder / "sweep.yaml"),
        tuple(sorted(paths, key=by_grid)),
        tuple(waiting),
    )


def _place(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _natural(path: Path) -> tuple[tuple[str, ...], str, int]:
    """Sort seed-2 before seed-10."""
    stem, _, number = path.name.rpartition("-")
    if number.isdecimal():
        return path.parent.parts, stem, int(number)
    return path.parent.parts, path.name, -1


def _states(folder: Path) -> dict[tuple[str, str], str]:
    """(arm, seed) → status, as runs.csv lists them."""
    try:
        rows = list(csv.DictReader((folder / "runs.csv").read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error):
        return {}
    return {(row.get("arm") or "", row.get("seed") or ""): row.get("status") or "" for row in rows}


def _grid_order(folder: Path) -> dict[str, int]:
    """Place of each run in the grid: arms as they first come in runs.csv, their seeds likewise."""
    states = list(_states(folder))
    first: dict[str, int] = {}
    for place, (arm, _) in enumerate(states):
        first.setdefault(arm, place)
    # Sorting is stable, so seeds of one arm stay in the file's order.
    ordered = sorted(states, key=lambda state: first[state[0]])
    return {f"{arm}/seed-{seed}": rank for rank, (arm, seed) in enumerate(ordered)}


def _mapping(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            return {}
        document = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return document if isinstance(document, dict) else {}


def _refuse_twins(runs: Iterable[Run]) -> None:
    first: dict[tuple[str, int], Run] = {}
    for run in runs:
        other = first.setdefault((run.arm, run.seed), run)
        if other is not run:
            raise UserError(
                f"report: {other.folder} and {run.folder} are both {run.arm!r} with seed "
                f"{run.seed}. An arm has one run a seed. Leave one of them out, or compare two "
                "settings by a sweep, which names its arms."
            )
