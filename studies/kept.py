"""Runs as tables, in place of a folder per run.

``sweeps.csv`` has a row per sweep, with the text of each file in ``OF_A_SWEEP``. For each sweep,
there is a subfolder with two tables. ``runs.csv.xz`` has a row per run: its folder within the
sweep, the text of run.json and of config.yaml, and the columns of its metrics.csv in their order,
as JSON. ``curves.csv.xz`` has a row per metric and run: the cells of that column, with a space
between two of them. Cells are copied as text, so no digit is lost.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from fl_lightning.metrics import (
    comma_separated,
    metrics_hash,
    read_record,
    read_rows,
    write_record,
)

OF_A_SWEEP = ("sweep.yaml", "claims.yaml", "runs.csv", "selections.yaml", "select.csv")
OF_A_RUN = ("run.json", "config.yaml")
UNFINISHED = "unfinished"  # the folder, in that of the tables, of rows that lack runs
# Runs that share their machine take longer, so their seconds say nothing.
WALL = ("time/round", "time/validation")
CLOCKS = (*WALL, "time/cpu")
# What studies/results may come to, with figures and the table of methods.
FILES = 80
MEGABYTES = 16


def pack(source: Path, target: Path) -> None:
    """Write the sweeps that are folders in ``source`` as tables into ``target``.

    The same runs give the same bytes. Tables of other sweeps in ``target`` remain.
    """
    texts = {row[0]: row for row in read(target / "sweeps.csv")}
    for file in sorted(source.glob("*/sweep.yaml")):
        sweep = file.parent
        texts[sweep.name] = [sweep.name, *(text_of(sweep / name) for name in OF_A_SWEEP)]
        runs: list[list[str]] = []
        curves: dict[str, list[list[str]]] = {}
        for path in sorted(sweep.rglob("run.json")):
            run = path.parent.relative_to(sweep).as_posix()
            names, rows = read_rows(path.with_name("metrics.csv"), complete=True)
            runs.append([run, *(text_of(path.with_name(n)) for n in OF_A_RUN), json.dumps(names)])
            for name in names:
                cells = " ".join(row[name] for row in rows)
                curves.setdefault(name, []).append([name, run, cells])
        write(target / sweep.name / "runs.csv.xz", [["folder", *OF_A_RUN, "columns"], *runs])
        # Curves of one metric resemble each other, so they lie together and compress better.
        header = ["metric", "run", "cells"]
        write(target / sweep.name / "curves.csv.xz", [header, *chain(*curves.values())])
    write(target / "sweeps.csv", [["sweep", *OF_A_SWEEP], *(texts[name] for name in sorted(texts))])


def unpack(source: Path, target: Path) -> None:
    """Write the sweeps in the tables of ``source`` as folders into ``target``.

    Files that ``target`` already has stay as they are.
    """
    for name, *texts in read(source / "sweeps.csv"):
        for file, text in zip(OF_A_SWEEP, texts, strict=True):
            place(target / name / file, text)
        cells = {
            (m, run): held.split(" ") for m, run, held in read(source / name / "curves.csv.xz")
        }
        for run, record, config, columns in read(source / name / "runs.csv.xz"):
            folder = target / name / run
            names = json.loads(columns)
            rows = zip(*(cells[metric, run] for metric in names), strict=True)
            place(folder / "run.json", record)
            place(folder / "config.yaml", config)
            place(folder / "metrics.csv", comma_separated([names, *rows]))


@contextmanager
def unpacked(source: Path) -> Iterator[Path]:
    """The sweeps in the tables of ``source`` as folders, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as made:
        unpack(source, Path(made))
        yield Path(made)


def read(path: Path) -> list[list[str]]:
    """The rows of a table below its header; none if there is no such file."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    return list(csv.reader(io.StringIO(text, newline="")))[1:]


def write(path: Path, rows: Iterable[Sequence[str]]) -> None:
    """Write a table; xz because gzip takes a fifth more, and it stores no time."""
    # Cells are whole files, so they are not escaped as those of a run's tables are.
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    content = text.getvalue().encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(content, preset=9) if path.suffix == ".xz" else content)


def text_of(path: Path) -> str:
    """The text of a file; empty if there is no such file."""
    return path.read_text("utf-8") if path.is_file() else ""


def place(path: Path, text: str) -> None:
    """Write a file that has a text and is not there yet."""
    if text and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


# An absolute folder of data, as the argument ``root`` has it in YAML, JSON or a command.
DATA_ROOT = re.compile(r"""(\broot['":=,\s]+)/[^\s'",}\]]+""")


def copy(path: Path, target: Path) -> None:
    """Copy a text; a root of data and the folder of work are called ``data`` and ``.`` in it."""
    text = path.read_text("utf-8").replace(os.getcwd(), ".")
    text = DATA_ROOT.sub(r"\1data", text)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, "utf-8")


def keep_rows(source: Path, results: Path) -> int:
    """Keep the rows under ``source`` that have ended in ``results``, and the others beside them.

    No verdict and no check reads the others.
    """
    unfinished = results / UNFINISHED
    with tempfile.TemporaryDirectory() as made, unpacked(unfinished) as before:
        chosen = {True: Path(made, "ended"), False: Path(made, "begun")}
        for file in source.glob("*/sweep.yaml"):
            ended = has_ended(file.parent)
            chosen[ended].mkdir(exist_ok=True)
            (chosen[ended] / file.parent.name).symlink_to(file.parent.resolve())
            if ended:
                shutil.rmtree(before / file.parent.name, ignore_errors=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        if any(before.iterdir()):
            pack(before, unfinished)
        status = keep(chosen[True], results) if chosen[True].exists() else 0
        return status or (keep(chosen[False], unfinished) if chosen[False].exists() else 0)


def has_ended(sweep: Path) -> bool:
    """Whether all runs of a sweep have ended, by its list of them."""
    with (sweep / "runs.csv").open(encoding="utf-8", newline="") as file:
        return all(row["status"] in ("done", "diverged") for row in csv.DictReader(file))


def keep(source: Path, target: Path, clocks: Sequence[str] = CLOCKS) -> int:
    """Add what ended under ``source`` to the tables in ``target``: no checkpoints, no path of this
    machine, and no column of ``clocks``.

    A run that is there already stays as it is. What was selected by comes too, so that a sweep
    goes on from there once ``unpack`` has made folders of it.
    """
    with unpacked(target) as made:
        for file in sorted(source.glob("*/sweep.yaml")):
            folder = file.parent
            own = made / folder.name
            kept = 0
            for path in sorted(
                [*folder.glob("*/seed-*/run.json"), *folder.glob("select/*/*/seed-*/run.json")]
            ):
                place = own / path.parent.relative_to(folder)
                ended = json.loads(path.read_text("utf-8"))["status"] in ("done", "diverged")
                if ended and not (place / "run.json").is_file():
                    for name in OF_A_RUN:
                        copy(path.parent / name, place / name)
                    names, rows = read_rows(path.with_name("metrics.csv"), complete=True)
                    names = [name for name in names if name not in clocks]
                    cells = [[row[name] for name in names] for row in rows]
                    (place / "metrics.csv").write_text(comma_separated([names, *cells]), "utf-8")
                    # Without the clocks it is another file.
                    write_record(place, read_record(place) | {"metrics_hash": metrics_hash(place)})
                    kept += 1
            for name in OF_A_SWEEP:
                if (folder / name).is_file():
                    copy(folder / name, own / name)
            print(f"{target / folder.name}: {kept} runs more")
        pack(made, target)
    files = [path for path in target.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e6
    print(f"{target}: {len(files)} files of {FILES} at most, {size:.1f} MB of {MEGABYTES}")
    return int(len(files) > FILES or size > MEGABYTES)
