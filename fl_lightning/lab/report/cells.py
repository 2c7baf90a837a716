"""Tables, and numbers in the form for readers: accuracies in percent, fitting units."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

NONE = "–"
# A table with more rows than this is folded.
LONG = 16
# Cells, or texts, which are cells without a value.
Rows = list[list[Any]]


@dataclass(frozen=True)
class Cell:
    """A text; the column is sorted by ``value``, and ``mark`` is a class of the page.

    Such classes are "best" and the classes of verdicts. ``whole``: whether every run counts in the
    value; otherwise it is never the best.
    """

    text: str
    value: float | None = None
    mark: str = ""
    whole: bool = True


@dataclass
class Table:
    """Columns and rows; the first column names the row. ``note`` is a sentence or two below it.

    ``folded``: page and Markdown show it when its title is clicked, because another table has the
    same content, or because it is long.
    """

    key: str
    title: str
    columns: Sequence[str]
    rows: Rows
    note: str = ""
    folded: bool = False

    def __post_init__(self) -> None:
        self.folded = self.folded or len(self.rows) > LONG
        for row in self.rows:
            row[:] = [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]

    def with_best(
        self,
        columns: Iterable[int],
        greater: Callable[[], bool],
        group_of: Mapping[str, str] | None = None,
    ) -> Table:
        """Mark the best of each of these columns; ``greater`` is called if there are several.

        ``group_of``: first cell → group; rows are compared with rows of their own group.
        """
        groups: dict[str, Rows] = {}
        for row in self.rows:
            groups.setdefault((group_of or {}).get(row[0].text, ""), []).append(row)
        for column, rows in product(columns, groups.values()):
            cells = [row[column] for row in rows if row[column].value is not None]
            whole = [cell.value for cell in cells if cell.whole]
            if len(cells) > 1 and whole:
                best = max(whole) if greater() else min(whole)
                for row in rows:
                    if row[column].whole and row[column].value == best:
                        row[column] = Cell(row[column].text, best, "best")
        return self


@dataclass(frozen=True)
class Unit:
    """How values of a metric are shown: unchanged, or in percent with differences in points."""

    percent: bool = False

    @property
    def factor(self) -> float:
        return 100.0 if self.percent else 1.0

    def value(self, value: float | None, sd: float | None = None) -> str:
        """``75.95 ± 0.19``.

        >>> PERCENT.value(0.75951, 0.0019), Unit().value(0.123456, 0.0123), PERCENT.value(None)
        ('75.95 ± 0.19', '0.123 ± 0.012', '–')
        """
        if value is None or not math.isfinite(value):
            return NONE
        shown = value * self.factor
        if sd is None:
            return f"{shown:.2f}" if self.percent else f"{shown:.4g}"
        spread = sd * self.factor
        if self.percent:
            return f"{shown:.2f} ± {spread:.2f}"
        if not spread:
            return f"{shown:.4g} ± 0"
        # The deviation has two significant digits, and the value as many decimal places.
        places = max(0, 1 - math.floor(math.log10(spread)))
        if places > 6 or abs(shown) >= 1e6:
            return f"{shown:.4g} ± {spread:.2g}"
        return f"{shown:.{places}f} ± {spread:.{places}f}"

    def cell(self, value: float | None, sd: float | None = None) -> Cell:
        return Cell(self.value(value, sd), value)

    def difference(self, value: float | None, named: bool = False) -> str:
        """Return a difference with its sign: ``+2.10``; ``named``: also with its unit, if it
        has one.
        """
        if value is None:
            return NONE
        text = f"{value * self.factor:{'+.2f' if self.percent else '+#.3g'}}"
        # A value that rounds to 0 has no sign.
        text = text.replace("-", "−", 1) if float(text) else text.lstrip("+-")
        return f"{text} points" if named and self.percent else text


PERCENT = Unit(percent=True)


def cell(wording: Callable[[Any], str], value: float | None) -> Cell:
    """Return a cell that shows a value in the form of ``wording``; a dash for None."""
    return Cell(NONE if value is None else wording(value), value)


def p_value(p: float) -> str:
    """
    >>> p_value(0.0312), p_value(0.00001)
    ('0.031', '< 0.001')
    """
    if p < 0.001:
        return "< 0.001"
    return f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def size(count: float) -> str:
    """
    >>> size(1234567), size(20)
    ('1.23 MB', '20 B')
    """
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def seconds(value: float) -> str:
    """
    >>> seconds(0.1234), seconds(83.0), seconds(7300.0)
    ('0.123 s', '83.0 s', '2 h 02 min')
    """
    if value < 10:
        return f"{value:.3g} s"
    if value < 600:
        return f"{value:.1f} s"
    minutes = round(value / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


# The format of a ratio.
times = "{:.2f} ×".format
