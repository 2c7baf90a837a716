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
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from fl_lightning.metrics import comma_separated, read_rows

OF_A_SWEEP = ("sweep.yaml", "claims.yaml", "runs.csv", "selections.yaml", "select.csv")
OF_A_RUN = ("run.json", "config.yaml")


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
    content = comma_separated(rows).encode()
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
