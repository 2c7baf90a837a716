"""``metrics.csv``: one row per round, the same bytes whether or not the run was interrupted."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fl_lightning.errors import cannot_write
from fl_lightning.machine.escaping import plain
from fl_lightning.machine.lightning import Logger, rank_zero_only, rank_zero_warn
from fl_lightning.metrics import Row, comma_separated, read_rows
from fl_lightning.storage.atomic_files import written_aside


class MetricsCSV(Logger):
    """Writes ``metrics.csv`` in ``save_dir``, one row per round.

    The first column is ``round``, the others follow in order of appearance. Floats are written so
    that reading gives the same value. The row survives the end of the process once ``log_metrics``
    has returned, and that of the machine once ``save`` has. ``resume(t)`` forgets rounds from ``t``
    on, so a run that was killed and resumed leaves the same file (except its ``time/`` columns).
    """

    def __init__(self, save_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(save_dir) / "metrics.csv"
        self._columns: list[str] | None = None  # None: the file has not been read
        # Rows of this round and later ones are dropped with the next row; None: all stay.
        self._before: int | None = None
        self._synced = True  # whether all rows would survive a crash of the machine
        self._round = -1  # round of the last row, which may still get more columns
        self._row: Row = {}
        self._start = 0  # offset of the last row's first byte

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing, because config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add ``metrics`` to the row of round ``step`` (None: the last one)."""
        # Lightning adds "epoch" to the metrics; it is the round.
        values = {
            plain(key): _text(value)
            for key, value in metrics.items()
            if key not in ("epoch", "round")
        }
        if not values:
            return
        columns = self._open()
        step = max(self._round, 0) if step is None else int(step)
        new = [key for key in values if key not in columns]
        # A new column, or an earlier round, changes lines that have been written already.
        if step < self._round or new:
            rows = {int(row["round"]): row for row in read_rows(self.path)[1]}
            rows.setdefault(step, {"round": str(step)}).update(values)
            self._rewrite([*columns, *new], [rows[key] for key in sorted(rows)])
            return
        if step > self._round:
            if self._row:
                self._start += len(self._line(self._row, columns))
            self._round = step
            self._row = {"round": str(step)}
        self._row.update(values)
        line = self._line(self._row, columns)
        with self._changing() as file:
            file.seek(self._start)
            file.write(line)
            file.truncate()
        self._synced = False

    @rank_zero_only
    def save(self) -> None:
        """Write all rows through to the disk; a checkpoint that counts on them is written next."""
        if self._synced:
            return
        with self._changing() as file:
            os.fsync(file.fileno())
        self._synced = True

    @contextmanager
    def _changing(self) -> Iterator[BinaryIO]:
        try:
            with open(self.path, "r+b") as file:
                yield file
        except OSError as error:
            raise cannot_write(self.path, error) from error

    @rank_zero_only
    def resume(self, round: int) -> None:
        """Keep only the rows of rounds before ``round``.

        The others are dropped with the next row: if the process is killed before it has one, the
        last checkpoint is still that of a later round. If a new run (``round`` 0) drops rows, a
        warning says so.

        Raises:
            UserError: the file is not a metrics.csv.
        """
        if self.path.exists():
            read_rows(self.path, before=round)
            if round == 0 and self.path.read_bytes().count(b"\n") > 1:
                rank_zero_warn(
                    f"{self.path} holds the rounds of an earlier run, and this new run replaces "
                    "them. To keep them, give MetricsCSV another folder, or resume that run."
                )
        self._columns = None
        self._before = round

    def _open(self) -> list[str]:
        """Return the columns; at first use they are read from the existing file."""
        if self._columns is None:
            columns, rows = ["round"], list[Row]()
            if self.path.exists():
                columns, rows = read_rows(self.path, before=self._before)
            if self._before is not None:
                rows = [row for row in rows if int(row["round"]) < self._before]
                # If a column first appeared in a round that is dropped, drop the column too.
                filled = {"round"}
                for row in rows:
                    filled.update(name for name, value in row.items() if value)
                columns = [column for column in columns if column in filled]
            self._rewrite(columns, rows)
        assert self._columns is not None
        return self._columns

    def _rewrite(self, columns: list[str], rows: list[Row]) -> None:
        lines = [self._line(row, columns) for row in rows]
        head = self._line({column: column for column in columns}, columns)
        with written_aside(self.path) as file:
            file.write(head + b"".join(lines))
        self._columns = columns
        self._row = rows[-1] if rows else {}
        self._round = int(self._row["round"]) if rows else -1
        self._start = len(head) + sum(map(len, lines[:-1]))

    @staticmethod
    def _line(row: Row, columns: list[str]) -> bytes:
        return comma_separated([[row.get(column, "") for column in columns]]).encode()


def _text(value: Any) -> str:
    value = value.item() if hasattr(value, "item") else value
    return repr(float(value)) if not isinstance(value, int) else str(int(value))
