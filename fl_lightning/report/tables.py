"""A table, and its four forms: Markdown, LaTeX, HTML and CSV."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cell:
    """What is shown; ``value`` is what the column is sorted by, ``mark`` a class of the page ("best", a verdict)."""

    text: str
    value: float | None = None
    mark: str = ""


@dataclass
class Table:
    """Columns and rows; the first column names the row. ``note`` is a sentence or two below it.

    ``folded``: the page shows it when its title is clicked, because a figure says the same.
    """

    key: str
    title: str
    columns: Sequence[str]
    rows: list[list[Cell]] = field(default_factory=list)
    note: str = ""
    folded: bool = False

    def add(self, *cells: Cell | str) -> None:
        """Add a row; texts are cells without a value."""
        self.rows.append([cell if isinstance(cell, Cell) else Cell(cell) for cell in cells])


def mark_best(table: Table, column: int, greater: Callable[[], bool]) -> None:
    """Mark the best value of a column, where there are two or more to choose from, and ``greater`` is asked for."""
    values = [row[column].value for row in table.rows]
    known = [value for value in values if value is not None]
    if len(known) > 1:
        best = max(known) if greater() else min(known)
        for row, value in zip(table.rows, values, strict=True):
            if value == best:
                row[column] = Cell(row[column].text, value, "best")


def markdown(table: Table) -> str:
    """A GitHub table under its title."""

    def cell(text: str) -> str:
        return " ".join(text.split()).replace("|", "\\|")

    head = [f"| {' | '.join(map(cell, table.columns))} |", "|---" * len(table.columns) + "|"]
    body = [
        "| "
        + " | ".join(f"**{cell(c.text)}**" if c.mark == "best" else cell(c.text) for c in row)
        + " |"
        for row in table.rows
    ]
    note = ["", table.note] if table.note else []
    return "\n".join([f"## {table.title}", "", *head, *body, *note, ""])


_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "−": r"$-$",
    "–": r"\textendash{}", "<": r"$<$", ">": r"$>$", "≤": r"$\leq$", "≥": r"$\geq$", "·": r"$\cdot$", "Δ": r"$\Delta$",
    "‖": r"$\|$", "²": r"$^2$", "→": r"$\to$", "α": r"$\alpha$", "β": r"$\beta$", "∞": r"$\infty$",
    "≈": r"$\approx$", "ρ": r"$\rho$",
}  # fmt: skip


def tex(text: str) -> str:
    """Text that LaTeX prints as it is.

    >>> print(tex("val/acc, 75.95 ± 0.19 % of fedinit_0.1"))
    val/acc, 75.95 $\\pm$ 0.19 \\% of fedinit\\_0.1
    """
    escaped = "".join(_TEX.get(character, character) for character in text)
    return escaped.replace("--", "-{}-")  # two hyphens of a name are not a dash


def latex(table: Table) -> str:
    """A table of booktabs, with caption and label."""

    def line(cells: Iterable[str]) -> str:
        return " & ".join(cells) + r" \\"

    body = [
        line(rf"\textbf{{{tex(c.text)}}}" if c.mark == "best" else tex(c.text) for c in row)
        for row in table.rows
    ]
    lines = [
        r"\begin{table}[htb]",
        r"\centering",
        rf"\caption{{{tex(table.title)}. {tex(table.note)}}}".replace(". }", ".}"),
        rf"\label{{tab:{re.sub('[^a-z0-9]+', '-', table.key)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
        r"\toprule",
        line(map(tex, table.columns)),
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
        "",
    ]
    return "\n".join(lines)


def page(table: Table) -> str:
    """An HTML table whose head sorts it by what cells are worth."""
    head = "".join(
        f'<th scope="col"><button type="button">{html.escape(c)}</button></th>'
        for c in table.columns
    )
    body = []
    for row in table.rows:
        cells = [f'<th scope="row"{_attributes(row[0])}>{html.escape(row[0].text)}</th>']
        cells += [f"<td{_attributes(c)}>{html.escape(c.text)}</td>" for c in row[1:]]
        body.append(f"<tr>{''.join(cells)}</tr>")
    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    whole = (
        f'<div class="table"><table id="{html.escape(table.key)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>{note}"
    )
    return (
        f"<details><summary>{html.escape(table.title)}</summary>{whole}</details>"
        if table.folded
        else whole
    )


def _attributes(cell: Cell) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    mark = f' class="{html.escape(cell.mark)}"' if cell.mark else ""
    return mark + value


def comma_separated(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A CSV file; None is an empty cell, numbers read back exactly."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(["" if value is None else value for value in row] for row in rows)
    return text.getvalue()
