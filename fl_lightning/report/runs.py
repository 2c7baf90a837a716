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
FINISHED = ("done", "diverged")  # the others are shown and kept out of scores
HUGE = 1e300  # what is larger counts as infinite
ASK = "Give report --mode (of --metric), or mode in the claim"


@dataclass(frozen=True, eq=False)
class Run:
    """One run as its folder tells it; ``columns`` are metrics by name, NaN where nothing was measured."""

    folder: Path
    status: str
    seed: int
    arm: str
    record: Mapping[str, Any]  # run.json
    columns: Mapping[str, Column]
    # of all that are looked at together
    directions: Directions = field(default_factory=lambda: Directions(ASK))
    faults: tuple[str, ...] = ()  # of metrics.csv, where it can be read all the same

    @property
    def axes(self) -> dict[str, str]:
        """Key of its sweep's grid → value as named; empty of a run that no sweep made."""
        axes = self.record.get("axes")
        return (
            {str(key): str(value) for key, value in axes.items()} if isinstance(axes, dict) else {}
        )

    @property
    def finished(self) -> bool:
        """Whether it takes part in scores: it ended by itself, well or badly."""
        return self.status in FINISHED

    @property
    def rounds_done(self) -> int:
        """Rounds of which something was logged."""
        rounds = self.columns["round"]
        return int(rounds[-1]) + 1 if len(rounds) else 0

    def column(self, name: str) -> Column:
        """The metric ``name``; all NaN where it was never logged."""
        return self.columns.get(name, np.full(len(self.columns["round"]), math.nan))

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.yaml; empty where it is missing or cannot be read: a report does not need it."""
        return _mapping(self.folder / "config.yaml")


@dataclass(frozen=True)
class Sweep:
    """A folder of runs with what belongs to all of them."""

    folder: Path
    claims: Path | None  # its claims.yaml
    spec: Mapping[str, Any]  # its sweep.yaml
    runs: tuple[Path, ...]
    waiting: tuple[tuple[str, str, str], ...] = ()  # (arm, seed, status) without a run yet
    # arm → what the report calls it, where that differs
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Found:
    """What the folders of a command line hold, in its order and the grid's."""

    runs: list[Run] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    # which way is better in a metric
    directions: Directions = field(default_factory=lambda: Directions(ASK))
    # a run's folder → its sweep, where that is kept apart
    apart: dict[Path, str] = field(default_factory=dict)

    @property
    def waiting(self) -> list[tuple[str, str, str]]:
        """(arm, seed, status) of what has not begun."""
        return [
            (own.names.get(arm, arm), seed, status)
            for own in self.sweeps
            for arm, seed, status in own.waiting
        ]

    @property
    def arms(self) -> dict[str, list[Run]]:
        """Runs by arm, arms in the order in which they first come."""
        arms: dict[str, list[Run]] = {}
        for run in self.runs:
            arms.setdefault(run.arm, []).append(run)
        return arms

    def within(self, folders: Collection[Path]) -> Found:
        """The runs in ``folders``, which are resolved, and their sweeps alone."""
        runs = [run for run in self.runs if run.folder.resolve() in folders]
        sweeps = [
            sweep for sweep in self.sweeps if any(path.resolve() in folders for path in sweep.runs)
        ]
        return replace(self, runs=runs, sweeps=sweeps)


def find(folders: Sequence[Path]) -> Found:
    """The runs in ``folders``: runs' own folders, sweeps, or any folder of runs.

    Raises:
        UserError: no run in a folder, a file that cannot be read, or two runs of one arm and seed.
    """
    found, seen = Found(), set[Path]()
    for folder in folders:
        if (folder / "run.json").is_file():
            paths = [folder]
        else:
            sweep = _sweep(folder)
            found.sweeps.append(sweep)
            paths = list(sweep.runs)
        for path in paths:
            if path.resolve() not in seen:  # named twice, or also part of a sweep named before
                seen.add(path.resolve())
                found.runs.append(read_run(path, found.directions))
    _keep_apart(found)
    _refuse_twins(found.runs)
    return found


def _keep_apart(found: Found) -> None:
    """Arms of one name are one arm in sweeps with the same claims; in others they are called ``<sweep>/<arm>``."""
    keys = {path: _kin(sweep) for sweep in reversed(found.sweeps) for path in sweep.runs}
    names = {_kin(sweep): sweep.folder.resolve() for sweep in reversed(found.sweeps)}
    short = [folder.name for folder in names.values()]
    labels = {
        key: folder.name if short.count(folder.name) == 1 else f"{folder.parent.name}/{folder.name}"
        for key, folder in names.items()
    }
    of_arm: dict[str, set[str]] = {}
    for run in found.runs:
        of_arm.setdefault(run.arm, set()).add(keys.get(run.folder, ""))
    twice = {arm for arm, its in of_arm.items() if len(its) > 1}
    parted = {key for arm in twice for key in of_arm[arm] if key}
    found.apart = {
        run.folder: labels[key] for run in found.runs if (key := keys.get(run.folder, "")) in parted
    }
    found.sweeps = [
        replace(
            sweep,
            names={arm: f"{labels[_kin(sweep)]}/{arm}" for arm in twice}
            if _kin(sweep) in parted
            else {},
        )
        for sweep in found.sweeps
    ]
    found.runs = [
        replace(run, arm=f"{found.apart[run.folder]}/{run.arm}")
        if run.folder in found.apart and run.arm in twice
        else run
        for run in found.runs
    ]


def _kin(sweep: Sweep) -> str:
    """The same for sweeps that are reported as one: with the same claims, or folders of runs that no sweep made."""
    if sweep.claims is not None:
        return hashlib.sha256(sweep.claims.read_bytes()).hexdigest()
    return str(sweep.folder.resolve()) if (sweep.folder / "sweep.yaml").is_file() else ""


def read_run(folder: Path, directions: Directions | None = None) -> Run:
    """The run in ``folder``; ``directions`` take what it recorded of its metrics, beside that of others.

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
    status, seed = (
        (record.get("status"), record.get("seed")) if isinstance(record, dict) else (None, None)
    )
    if status not in STATUSES or isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(
            f"report {folder}: {path} has status {status!r} and seed {seed!r}. "
            f"Accepted: a status of {', '.join(STATUSES)}, and an integer as seed."
        )
    _check_kinds(path, record)
    arm = record.get("arm") or record.get("title") or folder.name
    directions = directions or Directions(ASK)
    directions.record(record.get("modes"))  # older runs have none
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
                f"report {path.parent}: {path} has {name} {str(value)[:80]!a}. Accepted: a line of text."
            )
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"report {path.parent}: {path} holds text that no file can (a lone surrogate)."
        ) from None
    if not isinstance(record.get("command") or [], list):
        raise UserError(
            f"report {path.parent}: {path} has command {record['command']!r}. Accepted: a list of words."
        )


def _faults(
    folder: Path, status: str, record: Mapping[str, Any], rounds: Column
) -> tuple[str, ...]:
    """What says that metrics.csv of a finished run has lost something."""
    if status not in FINISHED:
        return ()
    found = []
    ended, asked = int(rounds[-1]) + 1 if len(rounds) else 0, record.get("rounds")
    if absent := ended - len(rounds):
        found.append(f"lacks {absent} of the rounds 0 to {ended - 1}")
    if status == "done" and isinstance(asked, int) and ended < asked:
        found.append(f"ends after {ended} of {asked} rounds")
    path = folder / "metrics.csv"
    if len(rounds) and path.is_file() and not path.read_bytes().endswith(b"\n"):
        found.append("has a last line without an end, which may have been cut")
    return tuple(found)


def _columns(folder: Path, status: str) -> dict[str, Column]:
    path = folder / "metrics.csv"
    packed = folder / "metrics.csv.gz"
    # it ended before its first round did
    if status != "done" and not path.is_file() and not packed.is_file():
        return {"round": np.empty(0)}
    names, rows = read_rows(path, complete=status in FINISHED)
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UserError(
            f"report {folder}: {path} has two columns {twice[0]!r}, and which is meant is not known. Remove one."
        )
    try:
        columns = {
            n: np.array([float(row[n]) if row[n] else math.nan for row in rows], dtype=float)
            for n in names
        }
    except ValueError as error:
        raise UserError(
            f"report {folder}: {path} holds what is no number ({error}). Mend or remove the file."
        ) from None
    for column in columns.values():
        column[np.abs(column) > HUGE] = math.inf  # no sum of them could be told
    found = {"round": np.empty(0), **columns}
    if (np.diff(found["round"]) <= 0).any() or np.isinf(found["round"]).any():
        raise UserError(
            f"report {folder}: the rounds in {path} do not ascend, one row each. Mend or remove the file."
        )
    return found


def _sweep(folder: Path) -> Sweep:
    """The runs of a sweep in its grid's order (that of runs.csv), or of a folder of runs by name."""
    if not folder.is_dir():
        raise UserError(
            f"report {folder}: there is no such folder. Give folders of runs or of sweeps, such as runs/x."
        )
    paths = sorted(
        {p.parent for pattern in ("*/run.json", "*/seed-*/run.json") for p in folder.glob(pattern)}
    )
    order = _grid_order(folder)
    by_place = {
        path: (order.get(_place(path, folder), len(order)), _natural(path)) for path in paths
    }
    there = {_place(path, folder) for path in paths}
    states = _states(folder)
    waiting = [(a, s, status) for (a, s), status in states.items() if f"{a}/seed-{s}" not in there]
    if not paths:
        begun = (
            f"none of its {len(states)} runs has begun"
            if states
            else "neither it nor its subfolders have a run.json"
        )
        raise UserError(
            f"report {folder}: no run is here: {begun}. Give the folder of a run that `fl-lightning fit` made, or of a "
            "sweep."
        )
    claims = folder / "claims.yaml"
    return Sweep(
        folder,
        claims if claims.is_file() else None,
        _mapping(folder / "sweep.yaml"),
        tuple(sorted(paths, key=by_place.__getitem__)),
        tuple(waiting),
    )


def _place(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _natural(path: Path) -> tuple[tuple[str, ...], str, int]:
    """seed-2 before seed-10."""
    stem, _, number = path.name.rpartition("-")
    return (
        (path.parent.parts, stem, int(number))
        if number.isdecimal()
        else (path.parent.parts, path.name, -1)
    )


def _states(folder: Path) -> dict[tuple[str, str], str]:
    """(arm, seed) → status, as runs.csv lists them."""
    try:
        rows = list(csv.DictReader((folder / "runs.csv").read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error):
        return {}
    return {(row.get("arm") or "", row.get("seed") or ""): row.get("status") or "" for row in rows}


def _grid_order(folder: Path) -> dict[str, int]:
    """Place of each run in the grid: arms as they first come in runs.csv, seeds as they come in an arm."""
    states = list(_states(folder))
    arms = {arm: number for number, arm in reversed(list(enumerate(arm for arm, _ in states)))}
    ordered = sorted(range(len(states)), key=lambda i: (arms[states[i][0]], i))
    return {f"{states[i][0]}/seed-{states[i][1]}": rank for rank, i in enumerate(ordered)}


def _mapping(path: Path) -> dict[str, Any]:
    try:
        document = parse_yaml(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return document if isinstance(document, dict) else {}


def _refuse_twins(runs: Iterable[Run]) -> None:
    first: dict[tuple[str, int], Run] = {}
    for run in runs:
        other = first.setdefault((run.arm, run.seed), run)
        if other is not run:
            raise UserError(
                f"report: {other.folder} and {run.folder} are both {run.arm!r} with seed {run.seed}. An arm has "
                "one run a seed. Leave one of them out, or compare two settings by a sweep, which names its arms."
            )
