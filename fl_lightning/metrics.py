"""A run's metrics as a table, without importing torch: whoever only looks at runs need not wait for it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.errors import UserError, suggest

Row = dict[str, str]
Column = np.ndarray[Any, np.dtype[np.float64]]


def read_rows(path: Path, complete: bool = False, before: int | None = None) -> tuple[list[str], list[Row]]:
    """Columns and rows of a metrics.csv, values as text ("" where missing), without a last line torn by a kill.

    Args:
        path: the file.
        complete: the run ended by itself, so the last line is whole even where no line break follows it.
        before: only rounds before this one are needed; nothing that follows them is looked at.

    Raises:
        UserError: it is missing or no such file.
    """
    try:
        content = path.read_bytes()
        content[: content.find(b"\n")].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read {path}: {error}. It should be a run's metrics.csv.") from error
    text = content.decode(errors="replace").replace("\0", "\ufffd")  # what a crash of the machine leaves
    text = text if complete else text[: text.rfind("\n") + 1]
    lines = list(csv.reader(io.StringIO(text, newline="")))
    columns, rows = (lines[0], lines[1:]) if lines else (["round"], [])
    whole: list[Row] = []
    for number, row in enumerate(rows, start=2):
        if columns[0] == "round" and len(row) == len(columns) and row[0].isdecimal():
            whole.append(dict(zip(columns, row, strict=True)))
            continue
        needed = before is None or (before > 0 and (not whole or int(whole[-1]["round"]) < before - 1))
        torn = not complete and number == len(rows) + 1
        if columns[0] != "round" or (needed and not torn):
            raise UserError(
                f"{path}, line {number}: not a row of metrics (a round, then {len(columns) - 1} values). "
                "Mend or remove the file."
            )
        break
    return columns, whole


class Metrics(Mapping[str, Column]):
    """A table of metrics: ``metrics["val/acc"]`` is a column beside ``metrics.rounds``, nan where nothing was logged.

    ``pandas.DataFrame(dict(metrics), index=metrics.rounds)`` turns it into a frame.
    """

    def __init__(self, rounds: Sequence[int], columns: Mapping[str, Sequence[float]]) -> None:
        self.rounds = list(rounds)
        self._columns = {name: np.asarray(values, dtype=np.float64) for name, values in columns.items()}

    @classmethod
    def read(cls, path: Path) -> Metrics:
        """The table of a metrics.csv."""
        names, rows = read_rows(path)
        columns = {n: [float(row[n]) if row[n] else math.nan for row in rows] for n in names if n != "round"}
        return cls([int(row["round"]) for row in rows], columns)

    def __getitem__(self, name: str) -> Column:
        if name not in self._columns:
            raise KeyError(f"no metric {name!r}.{suggest(name, self._columns)}")
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Metrics({len(self.rounds)} rounds: {', '.join(self._columns)})"

    def last(self, name: str) -> float:
        """The value logged last; nan where there is none."""
        values = self._logged(name)
        return float(values[-1]) if len(values) else math.nan

    def best(self, name: str) -> tuple[float, int]:
        """The highest value and the round that first reached it; (nan, -1) where there is none."""
        if not len(self._logged(name)):
            return math.nan, -1
        at = int(np.nanargmax(self[name]))
        return float(self[name][at]), self.rounds[at]

    def median(self, name: str) -> float:
        """The median of the logged values; nan where there is none."""
        values = self._logged(name)
        return float(np.median(values)) if len(values) else math.nan

    def _logged(self, name: str) -> Column:
        values = self._columns.get(name, np.empty(0))
        return values[~np.isnan(values)]
