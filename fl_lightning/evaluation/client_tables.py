"""Clients' values as CSV: after the last round, and after every round that was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.errors import UserError
from fl_lightning.machine.escaping import plain
from fl_lightning.metrics import comma_separated, separated
from fl_lightning.storage.atomic_files import written_aside

Values = Mapping[str, Mapping[int, float]]  # metric → client → value


def heading(table: Values, names: Sequence[str] = ()) -> list[object]:
    return ["client", "samples", *map(plain, table), *(["name"] if names else [])]


def client_rows(
    table: Values, samples: Mapping[int, int], names: Sequence[str] = ()
) -> list[list[object]]:
    """A row per client: client, samples, metrics (empty without a value), its name if given."""
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
        try:
            with open(self.path, "a", encoding="utf-8", newline="") as file:
                file.write(comma_separated(new))
        except OSError as error:
            raise UserError(f"Cannot write {self.path}: {error.strerror}.") from error

    def _rewrite(self, header: list[object], new: list[list[object]]) -> None:
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


def draw_clients(
    file: Any, name: str, values: Mapping[int, float], tuned: Mapping[int, float]
) -> None:
    """Draw clients' values of a metric, ascending, before and after fine-tuning, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for column, label in ((values, "as it is"), (tuned, "after fine-tuning")):
        ordered = sorted(column.values())
        if ordered:
            share = [100 * (j + 0.5) / len(ordered) for j in range(len(ordered))]
            axes.step(
                share,
                ordered,
                where="mid",
                label=f"{label}, mean {sum(ordered) / len(ordered):.4g}",
            )
    axes.set_xlabel(f"{len(values)} clients in the order of their values, %")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(file)


OfClients = Mapping[int, float]


def by_domain(
    values: OfClients, samples: Mapping[int, int], domains: Sequence[str]
) -> dict[str, float]:
    """Return a metric's mean over each domain's clients, weighted by test samples; NaN are out.

    Args:
        values, samples: values by client.
        domains: the domain of each client.

    >>> by_domain({0: 1.0, 1: 0.5, 2: 0.0}, {0: 3, 1: 1, 2: 2}, ["art", "art", "photo"])
    {'art': 0.875, 'photo': 0.0}
    """
    found = {}
    for domain in dict.fromkeys(domains):
        of = [i for i in values if domains[i] == domain and not math.isnan(values[i])]
        total = sum(samples[i] for i in of)
        if total:
            found[domain] = sum(values[i] * samples[i] for i in of) / total
    return found


def over_domains(values: Mapping[str, float], greater: bool) -> dict[str, float]:
    """Return ``_mean`` over domains, which all have the same weight, and the ``_worst``.

    >>> over_domains({"art": 0.75, "photo": 0.25}, greater=True)
    {'_mean': 0.5, '_worst': 0.25}
    """
    every = list(values.values())
    return {"_mean": sum(every) / len(every), "_worst": (min if greater else max)(every)}


def rows_of_domains(
    table: Values, samples: Mapping[int, int], domains: Sequence[str], greater: Mapping[str, bool]
) -> list[list[object]]:
    """Return the lines of domains.csv: a row per domain, then each metric's mean and worst.

    Args:
        table: metric → client → value.
        greater: for each metric, whether greater is better.
    """
    names = [name for name, values in table.items() if values]
    columns = {name: by_domain(table[name], samples, domains) for name in names}
    lines: list[list[object]] = [["domain", "clients", "samples", *names]]
    for domain in dict.fromkeys(domains):
        of = [i for i in samples if domains[i] == domain]
        cells = [columns[name].get(domain, math.nan) for name in names]
        shown = ["" if math.isnan(cell) else repr(cell) for cell in cells]
        lines.append([domain, str(len(of)), str(sum(samples[i] for i in of)), *shown])
    every = [str(len(samples)), str(sum(samples.values()))]
    for kind in ("_mean", "_worst"):
        cells = [over_domains(columns[name], greater[name])[kind] for name in names]
        lines.append([kind.removeprefix("_"), *every, *map(repr, cells)])
    return lines
