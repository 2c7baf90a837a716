"""Clients' values as CSV: after the last round, and after every round that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_lightning.errors import UserError
from fl_lightning.machine.escaping import plain
from fl_lightning.metrics import comma_separated, separated
from fl_lightning.storage import lock
from fl_lightning.storage.atomic_files import written_aside

Values = Mapping[str, Mapping[int, float]]  # metric → client → value


def heading(table: Values, names: Sequence[str] = ()) -> list[object]:
    """Return the columns of :func:`client_rows`."""
    return ["client", "samples", *map(plain, table), *(["name"] if names else [])]


def client_rows(
    table: Values, samples: Mapping[int, int], names: Sequence[str] = ()
) -> list[list[object]]:
    """Yield a row per client: client, samples, every metric, and its name if there are ``names``.

    A metric is empty if a client has no value.
    """
    rows: list[list[object]] = []
    for client, number in samples.items():
        values = [column.get(client) for column in table.values()]
        texts = ["" if value is None else repr(value) for value in values]
        rows.append([client, number, *texts, *([names[client]] if names else [])])
    return rows


class ClientRounds:
    """``clients_rounds.csv``: round, client, samples, every metric; rounds ascending.

    A round's rows are added at its end, whatever the number of earlier rounds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep(self, before: int) -> None:
        """Forget rounds from ``before`` on, which a resumed run measures again."""
        if not self.path.exists():
            return
        header, rows = self._read()
        kept = [row for row in rows if int(str(row[0])) < before]
        with written_aside(self.path) as file:
            file.write(comma_separated([header, *kept]).encode())

    def add(
        self, t: int, table: Values, samples: Mapping[int, int], names: Sequence[str] = ()
    ) -> None:
        """Add the rows of round t.

        Raises:
            UserError: the file cannot be written.
        """
        header = ["round", *heading(table, names)]
        new = [[t, *row] for row in client_rows(table, samples, names)]
        # A header without metrics would get them after the names of the clients.
        if not new:
            return
        if not self.path.exists() or self._header() != header:
            self._rewrite(header, new)
            return
        lock.check(self.path)
        try:
            with open(self.path, "a", encoding="utf-8", newline="") as file:
                file.write(comma_separated(new))
        except OSError as error:
            raise UserError(f"Cannot write {self.path}: {error.strerror}.") from error

    def _rewrite(self, header: list[object], new: list[list[object]]) -> None:
        """Write all rounds under a header that also has the old columns."""
        old_header, old = self._read() if self.path.exists() else ([], [])
        every = [*old_header, *(name for name in header if name not in old_header)]
        named = [dict(zip(old_header, row, strict=True)) for row in old]
        named += [dict(zip(header, row, strict=True)) for row in new]
        lines = [every]
        for row in named:
            lines.append([row.get(name, "") for name in every])
        with written_aside(self.path) as file:
            file.write(comma_separated(lines).encode())

    def _header(self) -> list[object]:
        with open(self.path, encoding="utf-8", newline="") as file:
            first = file.readline()
        return [*(separated(first) or [[]])[0]]

    def _read(self) -> tuple[list[object], list[list[object]]]:
        """Return the header and the complete rows; a killed process may have left half a row."""
        text = self.path.read_bytes().decode()
        whole = text[: text.rfind("\n") + 1]
        header, *rows = separated(whole) or [[]]
        return list(header), [list(row) for row in rows if len(row) == len(header)]
