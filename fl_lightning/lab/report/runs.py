"""The folders of a report: runs, and sweeps with many runs."""

from __future__ import annotations

import csv
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.errors import UserError
from fl_lightning.introspection.papers import declared
from fl_lightning.lab.cli.compose import as_node, plain_yaml, text_of
from fl_lightning.machine.escaping import plain
from fl_lightning.metrics import Directions, metrics_hash, read_record, read_rows, separated

Column = np.ndarray[Any, np.dtype[np.float64]]

STATUSES = ("running", "done", "diverged", "stopped", "failed")
# Runs with other statuses are shown, but do not count in scores.
FINISHED = ("done", "diverged")
# A larger number counts as infinite, because the sum of two such numbers would be infinite.
HUGE = 1e300
# Settings that change no result, or that follow the seed.
FREE = (
    *("data/download", "data/eval_batch_size", "data/num_workers", "data/root", "data/seed"),
    *("capture", "clients_at_once", "engine", "workers"),
)
ASK = "Give report --mode (of --metric), or mode in the claim"


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """One run, read from its folder.

    ``columns`` are the metrics by name, NaN if nothing was measured, infinite if the measured value
    is not a finite number. ``record`` is run.json.
    """

    folder: Path
    status: str
    seed: int
    arm: str
    record: Mapping[str, Any]
    columns: Mapping[str, Column]
    # All runs of a report share this object: what one run knows about a metric holds for the
    # others.
    directions: Directions = field(default_factory=lambda: Directions(ASK))
    # Errors in metrics.csv that do not prevent reading it.
    faults: tuple[str, ...] = ()
    # The group of the run's sweep; "" for a run by itself.
    sweep: str = ""
    # The label of the run's sweep, if that sweep is reported separately.
    label: str = ""

    @property
    def axes(self) -> dict[str, str]:
        """Return key of its sweep's grid → value as named; empty if no sweep made the run."""
        axes = self.record.get("axes")
        items = axes.items() if isinstance(axes, dict) else ()
        return {plain(str(key)): plain(str(value)) for key, value in items}

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that decide its results, by place; empty if none were recorded."""
        settings = self.record.get("settings")
        items = settings.items() if isinstance(settings, dict) else ()
        return {k: v for k, v in items if k not in FREE and not k.startswith("callback/")}

    @property
    def machine(self) -> dict[str, Any]:
        """Return the machine of the run; empty if it was not recorded."""
        machine = self.record.get("machine")
        return machine if isinstance(machine, dict) else {}

    @property
    def on_test(self) -> bool:
        """Return whether its columns ``val/…`` are measured on the test set."""
        if "validated_on" in self.record:
            return bool(self.record["validated_on"] == "test")
        # Older runs have only their config. Runs with these data sets have a test set and no
        # validation set.
        data = as_node(self.config.get("data"))
        packaged = str(data.get("class_path")).rpartition("fl_lightning.datamodules.")[2]
        return packaged in declared("has_test_set") and not data["init_args"].get("val_fraction")

    @property
    def finished(self) -> bool:
        """Return whether scores include it: it ended by itself, well or badly."""
        return self.status in FINISHED

    @property
    def rounds_done(self) -> int:
        """Return the rounds in which something was logged."""
        return _ended(self.columns["round"])

    def column(self, name: str) -> Column:
        """Return the metric ``name``; all NaN if it was never logged."""
        return self.columns.get(name, np.full(len(self.columns["round"]), math.nan))

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return config.yaml; empty if it is missing or cannot be read, because a report does
        not need it.
        """
        return _mapping(self.folder / "config.yaml")


@dataclass(frozen=True)
class ReportedSweep:
    """A folder of runs with the files that belong to all of them.

    ``claims`` and ``spec`` are its claims.yaml and sweep.yaml. ``group``: a text, the same for
    sweeps that are reported as one. ``waiting`` lists (arm, seed, status) of the runs that have not
    begun. ``names`` maps an arm to its name in the report, if that differs from the sweep's.
    ``arms`` maps the folders of listed runs to their arms.
    """

    folder: Path
    claims: Path | None
    spec: Mapping[str, Any]
    runs: tuple[Path, ...]
    group: str
    waiting: tuple[tuple[str, str, str], ...]
    names: Mapping[str, str] = field(default_factory=dict)
    arms: Mapping[Path, str] = field(default_factory=dict)


@dataclass
class Found:
    """The content of a command line's folders, in its order and the grid's."""

    runs: list[ReportedRun] = field(default_factory=list)
    sweeps: list[ReportedSweep] = field(default_factory=list)
    directions: Directions = field(default_factory=lambda: Directions(ASK))

    @property
    def waiting(self) -> list[tuple[str, str, str]]:
        """Return (arm, seed, status) of runs that have not begun."""
        waiting: list[tuple[str, str, str]] = []
        for sweep in self.sweeps:
            for arm, seed, status in sweep.waiting:
                waiting.append((sweep.names.get(arm, arm), seed, status))
        return waiting

    @property
    def arms(self) -> dict[str, list[ReportedRun]]:
        """Return runs by arm, with arms in the order in which they first occur."""
        arms: dict[str, list[ReportedRun]] = {}
        for run in self.runs:
            arms.setdefault(run.arm, []).append(run)
        return arms

    @property
    def metrics(self) -> list[str]:
        """Return the metrics that any run logged, in the order in which they first occur."""
        names: dict[str, None] = {}
        for run in self.runs:
            names |= dict.fromkeys(run.columns)
        return [name for name in names if name != "round"]

    def of(self, group: str) -> Found:
        """Return only the sweeps of a group, and their runs."""
        runs = [run for run in self.runs if run.sweep == group]
        return replace(self, runs=runs, sweeps=[s for s in self.sweeps if s.group == group])


def find(folders: Sequence[Path]) -> Found:
    """Find the runs in ``folders``: runs' own folders, sweeps, or any folder of runs.

    Raises:
        UserError: there is no run in a folder, a file cannot be read, or two runs have one arm and
            seed.
    """
    found = Found()
    # You may name a run twice, or name it together with its sweep.
    named: dict[Path, tuple[Path, str, str]] = {}
    for folder in folders:
        if (folder / "run.json").is_file():
            named.setdefault(folder.resolve(), (folder, "", ""))
            continue
        sweep = _sweep(folder)
        found.sweeps.append(sweep)
        for path in sweep.runs:
            first, *_ = named.get(path.resolve(), (path,))
            named[path.resolve()] = (first, sweep.group, sweep.arms.get(path, ""))
    for path, group, arm in named.values():
        run = read_run(path, found.directions)
        # A run that was made by itself, or copied from another sweep, does not record its arm here.
        found.runs.append(replace(run, sweep=group, arm=arm or run.arm))
    _name_by_settings(found)
    _keep_apart(found)
    runs: dict[tuple[str, int], ReportedRun] = {}
    for run in found.runs:
        other = runs.setdefault((run.arm, run.seed), run)
        if other is not run:
            same = "" if run.record.get("arm") else ", and their recorded settings are the same"
            raise UserError(
                f"report: {other.folder} and {run.folder} are both {run.arm!r} with seed "
                f"{run.seed}{same}. Each arm may have only one run per seed. Leave out one of "
                "them, or name each: by RunFolder(…, arm=NAME) in Python, or by a sweep."
            )
    return found


def _name_by_settings(found: Found) -> None:
    """Call arms ``<title>, <setting> <value>`` if runs of one title have other settings.

    Runs that a user or a sweep has named keep their names.
    """
    titled: dict[str, list[ReportedRun]] = {}
    for run in found.runs:
        if run.settings and not run.record.get("arm") and run.arm == run.record.get("title"):
            titled.setdefault(run.arm, []).append(run)
    names: dict[Path, str] = {}
    for arm, runs in titled.items():
        keys = separating([run.settings for run in runs])
        for run in runs if keys else ():
            own = [key for key in keys if key in run.settings]
            values = [f"{keys[key]} {run.settings[key]}" for key in own]
            names[run.folder] = plain(", ".join([arm, *values]))
    found.runs = [replace(run, arm=names.get(run.folder, run.arm)) for run in found.runs]


def differing(every: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the places at which settings differ.

    >>> differing([{"a/n": "A", "a/n/depth": 8, "b/lr": 1}, {"a/n": "B", "b/lr": 1}])
    ['a/n']
    """
    places: dict[str, None] = {}
    for settings in every:
        places |= dict.fromkeys(settings)
    found: list[str] = []
    for place in places:
        # The arguments of another class differ because the class does.
        classes = [other for other in found if place.startswith(f"{other}/")]
        if _kinds(every, [*classes, place]) > _kinds(every, classes):
            found.append(place)
    # Numbers of parameters follow from other settings, but these may not have been recorded.
    return sorted(found, key=lambda place: place.endswith("parameters"))


def _kinds(every: Sequence[Mapping[str, Any]], places: Sequence[str]) -> int:
    """Return how many different settings there are at these places."""
    return len({repr([*map(settings.get, places)]) for settings in every})


def separating(every: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a few settings that tell all different ``every`` apart: place → its name for readers.

    >>> separating([{"client_optimizer/lr": 1, "a/b": 2}, {"client_optimizer/lr": 3, "a/b": 4}])
    {'client_optimizer/lr': 'lr'}
    """
    places = differing(every)
    chosen: list[str] = []
    for place in places:
        if _kinds(every, [*chosen, place]) > _kinds(every, chosen):
            chosen.append(place)
    ends = [place.rpartition("/")[2] for place in chosen]
    return {p: e if ends.count(e) == 1 else p for p, e in zip(chosen, ends, strict=True)}


def _keep_apart(found: Found) -> None:
    """Call arms ``<sweep>/<arm>`` if sweeps with other claims have an arm of the same name.

    Sweeps with the same claims are reported as one: their arms of one name are one arm. A sweep's
    name is its folder's name.
    """
    # In reverse order, so that of several sweeps the first named one gives the folder's name.
    folders = {sweep.group: sweep.folder.resolve().name for sweep in reversed(found.sweeps)}
    groups_of_arm: dict[str, set[str]] = {}
    for run in found.runs:
        groups_of_arm.setdefault(run.arm, set()).add(run.sweep)
    shared = {arm for arm, groups in groups_of_arm.items() if len(groups) > 1}
    parted = set[str]().union(*(groups_of_arm[arm] for arm in shared)) - {""}
    for place, sweep in enumerate(found.sweeps):
        if sweep.group in parted:
            apart = {arm: f"{folders[sweep.group]}/{arm}" for arm in shared}
            found.sweeps[place] = replace(sweep, names=apart)
    for place, run in enumerate(found.runs):
        if run.sweep in parted:
            label = folders[run.sweep]
            arm = f"{label}/{run.arm}" if run.arm in shared else run.arm
            found.runs[place] = replace(run, arm=arm, label=label)


# ---------------------------------------------------------------------------- one run


def read_run(folder: Path, directions: Directions | None = None) -> ReportedRun:
    """Read the run in ``folder``.

    ``directions`` also learn the modes that the run recorded.

    Raises:
        UserError: run.json is invalid, or metrics.csv of a finished run is missing or broken.
    """
    record = read_record(folder)
    status = record.get("status")
    seed = record.get("seed")
    # A bool would pass for an integer seed.
    if status not in STATUSES or type(seed) is not int:
        raise UserError(
            f"report {folder}: {folder / 'run.json'}, which `fl-lightning fit` writes, cannot be "
            f"read, or is damaged: it has status {status!r} and seed {seed!r}. Accepted: a status "
            f"of {', '.join(STATUSES)}, and an integer as seed."
        )
    arm = record.get("arm") or record.get("title") or folder.name
    directions = directions or Directions(ASK)
    # Older runs recorded no modes.
    directions.record(record.get("modes"))
    columns = _columns(folder, status)
    directions.below_zero |= {name for name, column in columns.items() if (column < 0).any()}
    faults = _faults(folder, status, record, columns["round"])
    return ReportedRun(folder, status, seed, str(arm), record, columns, directions, tuple(faults))


def _faults(folder: Path, status: str, record: Mapping[str, Any], rounds: Column) -> Iterator[str]:
    """Return how metrics.csv of a finished run shows that something was lost."""
    if status not in FINISHED:
        return
    asked = record.get("rounds")
    written = record.get("metrics_hash")  # Older runs recorded none.
    whole = written is not None and written == metrics_hash(folder)
    ended = _ended(rounds)
    if absent := ended - len(rounds):
        yield f"lacks {absent} of the rounds 0 to {ended - 1}"
    # If the file is what the run wrote, the run itself ended early (EarlyStopping, say).
    if status == "done" and isinstance(asked, int) and ended < asked and not whole:
        yield f"ends after {ended} of {asked} rounds"
    if written is not None and not whole:
        yield "has changed since the run wrote it: its SHA-256 is not the one in run.json"


def _ended(rounds: Column) -> int:
    return int(rounds[-1]) + 1 if len(rounds) else 0


def _columns(folder: Path, status: str) -> dict[str, Column]:
    path = folder / "metrics.csv"
    # A run that was stopped or failed before its first round ended has no metrics.
    if status != "done" and not path.is_file() and not path.with_suffix(".csv.gz").is_file():
        return {"round": np.empty(0)}
    names, rows = read_rows(path, complete=status in FINISHED)
    twice = [name for name, times in Counter(names).items() if times > 1]
    problem = f"has two columns {twice[0]!r}" if twice else ""
    columns = {"round": np.empty(0)}
    for name in names:
        try:
            column = np.array([float(row[name] or "nan") for row in rows], dtype=float)
        except ValueError as error:
            problem = f"holds a value that is not a number ({error})"
            break
        # An empty cell means that nothing was measured; "nan" was measured, and is as bad as
        # infinite.
        measured = np.array([bool(row[name]) for row in rows], dtype=bool)
        column[measured & ~(np.abs(column) <= HUGE)] = math.inf
        columns[name] = column
    # Sums over rounds and look-ups of a round rely on the order of rounds.
    if (np.diff(columns["round"]) <= 0).any() or np.isinf(columns["round"]).any():
        problem = problem or "has rounds that do not ascend with one row per round"
    if problem:
        raise UserError(f"report {folder}: {path} {problem}. Mend or remove the file.")
    return columns


# -------------------------------------------------------------------------- one sweep


def _sweep(folder: Path) -> ReportedSweep:
    """Return the runs of a sweep in the grid's order (the order of runs.csv), or the runs of
    another folder by name.
    """
    states = read_states(folder)
    # Arms are in order of first appearance, and so are their seeds.
    arms = list(dict.fromkeys(arm for arm, _ in states))
    listed = [f"{a}/seed-{s}" for a, s in sorted(states, key=lambda key: arms.index(key[0]))]
    order = {place: rank for rank, place in enumerate(listed)}
    paths: dict[str, Path] = {}
    for path in {*folder.glob("*/run.json"), *folder.glob("*/seed-*/run.json")}:
        paths[path.parent.relative_to(folder).as_posix()] = path.parent
    if not paths:
        reason = "neither it nor its subfolders have a run.json"
        if not folder.is_dir():
            reason = "there is no such folder"
        elif states:
            reason = f"none of its {len(states)} runs has begun"
        raise UserError(
            f"report {folder}: there is no run here: {reason}. Give the folder of a run that "
            "`fl-lightning fit` made, or of a sweep."
        )
    places = sorted(paths, key=lambda place: (order.get(place, len(order)), _natural(place)))
    waiting = []
    for (arm, seed), status in states.items():
        if f"{arm}/seed-{seed}" not in paths:
            waiting.append((arm, seed, status))
    claims: Path | None = folder / "claims.yaml"
    # Sweeps with the same claims belong together, and so do folders of runs without a sweep.
    group = str(folder.resolve()) if (folder / "sweep.yaml").is_file() else ""
    if claims is not None and claims.is_file():
        group = hashlib.sha256(claims.read_bytes()).hexdigest()
    else:
        claims = None
    runs = tuple(paths[place] for place in places)
    of_runs = {paths[place]: place.rpartition("/")[0] for place in places if place in order}
    spec = _mapping(folder / "sweep.yaml")
    return ReportedSweep(folder, claims, spec, runs, group, tuple(waiting), arms=of_runs)


def _natural(place: str) -> tuple[str, str, int, str]:
    """Sort seed-2 before seed-10."""
    above, _, name = place.rpartition("/")
    stem, _, number = name.rpartition("-")
    return (above, stem, int(number), name) if number.isdecimal() else (above, name, -1, name)


def read_states(folder: Path) -> dict[tuple[str, str], str]:
    """Return (arm, seed) → status, from a sweep's runs.csv; empty if it cannot be read."""
    rows = read_table(folder / "runs.csv")
    return {(row.get("arm") or "", row.get("seed") or ""): row.get("status") or "" for row in rows}


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; empty if it cannot be read."""
    try:
        header, *rows = separated(path.read_text(encoding="utf-8")) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
    # A row that is longer than the header has the name None, and a shorter one has values None.
    return [dict(zip_longest(header, row)) for row in rows if row]


def _mapping(path: Path) -> dict[str, Any]:
    document: Any = None
    with suppress(UserError):
        document = plain_yaml(text_of(path, str(path)), str(path))
    return document if isinstance(document, dict) else {}
