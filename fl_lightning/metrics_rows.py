"""Reading ``metrics.csv``, without importing torch: who only looks at runs need not wait for it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from fl_lightning.errors import UserError

Row = dict[str, str]


def read_rows(path: Path, complete: bool = False) -> tuple[list[str], list[Row]]:
    """Columns and rows of a metrics.csv, values as text ("" where missing), without a line cut by a kill.

    Args:
        path: the file.
        complete: the run ended by itself, so the last line is whole even where no line break follows it.

    Raises:
        UserError: it is missing or no such file.
    """
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"Cannot read {path}: {error}. It should be a run's metrics.csv.") from error
    text = text if complete else text[: text.rfind("\n") + 1]
    lines = list(csv.reader(io.StringIO(text, newline="")))
    columns, rows = (lines[0], lines[1:]) if lines else (["round"], [])
    for number, row in enumerate(rows, start=2):
        if columns[0] != "round" or len(row) != len(columns) or not row[0].isdecimal():
            raise UserError(
                f"{path}, line {number}: not a row of metrics (a round, then {len(columns) - 1} values). "
                "Mend or remove the file."
            )
    return columns, [dict(zip(columns, row, strict=True)) for row in rows]
