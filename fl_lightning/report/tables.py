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
    """A text; ``value`` is what the column is sorted by, ``mark`` a class of the page.

    Such classes are "best" and those of verdicts.
    """

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
    """Mark the best value of a column; ``greater`` is asked only where there are two or more."""
    values = [row[column].value for row in table.rows]
    known = [value for value in values if value is not None]
    if len(known) > 1:
        best = max(known) if greater() else min(known)
        for row, value in zip(table.rows, values, strict=True):
            if value == best:
                row[column] = Cell(row[column].text, value, "best")


def markdown(table: Table) -> str:
    """A GitHub table under its title."""

    def escaped(cell: Cell) -> str:
        text = _one_line(cell.text)
        return f"**{text}**" if cell.mark == "best" else text

    lines = [
        f"## {table.title}",
        "",
        _row(map(_one_line, table.columns)),
        "|---" * len(table.columns) + "|",
        *(_row(map(escaped, row)) for row in table.rows),
    ]
    if table.note:
        lines += ["", table.note]
    return "\n".join([*lines, ""])


def _row(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _one_line(text: str) -> str:
    """The text of a Markdown cell, which neither a line break nor a bar may end."""
    return " ".join(text.split()).replace("|", "\\|")


_TEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": r"$-$",
    "–": r"\textendash{}",
    "<": r"$<$",
    ">": r"$>$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "·": r"$\cdot$",
    "Δ": r"$\Delta$",
    "‖": r"$\|$",
    "²": r"$^2$",
    "→": r"$\to$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "∞": r"$\infty$",
    "≈": r"$\approx$",
    "ρ": r"$\rho$",
}


def tex(text: str) -> str:
    """Text that LaTeX prints as it is.

    >>> print(tex("val/acc, 75.95 ± 0.19 % of fedinit_0.1"))
    val/acc, 75.95 $\\pm$ 0.19 \\% of fedinit\\_0.1
    """
    escaped = "".join(_TEX.get(character, character) for character in text)
    # LaTeX would make one dash of two hyphens of a name.
    return escaped.replace("--", "-{}-")


def latex(table: Table) -> str:
    """A table of booktabs, with caption and label."""

    def escaped(cell: Cell) -> str:
        text = tex(cell.text)
        return rf"\textbf{{{text}}}" if cell.mark == "best" else text

    def line(texts: Iterable[str]) -> str:
        return " & ".join(texts) + r" \\"

    lines = [
        r"\begin{table}[htb]",
        r"\centering",
        rf"\caption{{{tex(table.title)}. {tex(table.note)}}}".replace(". }", ".}"),
        rf"\label{{tab:{re.sub('[^a-z0-9]+', '-', table.key)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
        r"\toprule",
        line(map(tex, table.columns)),
        r"\midrule",
        *(line(map(escaped, row)) for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
        "",
    ]
    return "\n".join(lines)


def page(table: Table) -> str:
    """An HTML table whose head sorts it by what cells are worth."""
    buttons = [f'<button type="button">{html.escape(column)}</button>' for column in table.columns]
    head = "".join(f'<th scope="col">{button}</th>' for button in buttons)
    body = []
    for name, *numbers in table.rows:
        row = f'<th scope="row"{_attributes(name)}>{html.escape(name.text)}</th>'
        for cell in numbers:
            row += f"<td{_attributes(cell)}>{html.escape(cell.text)}</td>"
        body.append(f"<tr>{row}</tr>")
    whole = (
        f'<div class="table"><table id="{html.escape(table.key)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
    if table.note:
        whole += f'<p class="note">{html.escape(table.note)}</p>'
    if not table.folded:
        return whole
    return f"<details><summary>{html.escape(table.title)}</summary>{whole}</details>"


def _attributes(cell: Cell) -> str:
    text = ""
    if cell.mark:
        text += f' class="{html.escape(cell.mark)}"'
    # The page's script sorts by this number, not by the text.
    if cell.value is not None:
        text += f' data-value="{cell.value!r}"'
    return text


def comma_separated(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A CSV file; None is an empty cell, numbers read back exactly."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    # Without a value the csv module writes an empty cell, too.
    writer.writerows(rows)
    return text.getvalue()
