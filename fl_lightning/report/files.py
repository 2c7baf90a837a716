"""The files of a report, whole, before the first of them is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

from fl_lightning.report import charts, curves, page, sections
from fl_lightning.report.drawing import Drawing, png, svg
from fl_lightning.report.scores import SCORES
from fl_lightning.report.summary import Summary
from fl_lightning.report.tables import Cell, Table, comma_separated, latex, markdown


def contents(summary: Summary, title: str) -> dict[str, bytes]:
    """Name → bytes of every file of the report."""
    tables = sections.tables(summary)
    drawings = [
        *charts.intervals(summary),
        *curves.curves(summary),
        *charts.heat_map(summary),
        *charts.layers(summary),
        *charts.generalisation(summary),
        *curves.measurements(summary),
    ]
    document = json.dumps(summary.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
    texts = {
        "report.html": page.write(summary, tables, drawings, title),
        "report.md": _markdown(summary, tables, drawings, title),
        "report.tex": "% needs \\usepackage{booktabs}\n\n" + "\n".join(map(latex, tables)),
        "report.csv": comma_separated(*rows(summary)),
        "report.json": document + "\n",
    }
    # The table of methods by settings is a file of its own, for spreadsheets.
    if len(summary.settings) > 1:
        pivot = sections.pivot(summary)
        texts["pivot.csv"] = comma_separated(pivot.columns, map(_texts, pivot.rows))
    # All bytes are made before the first is written: an error leaves the old report whole.
    written = {name: text.encode() for name, text in texts.items()}
    for drawing in drawings:
        written[f"figures/{drawing.key}.png"] = png(drawing.figure)
        written[f"figures/{drawing.key}.svg"] = svg(drawing.figure).encode()
    return written


def _texts(row: Sequence[Cell]) -> list[str]:
    return [cell.text for cell in row]


def _markdown(
    summary: Summary, tables: Sequence[Table], drawings: Sequence[Drawing], title: str
) -> str:
    parts = [f"# {title}", "", page.lead(summary), ""]
    if summary.notes:
        parts += [*(f"- {note}" for note in summary.notes), ""]
    parts += map(markdown, tables)
    for drawing in drawings:
        picture = f"![{drawing.title}](figures/{drawing.key}.png)"
        parts.append(f"## {drawing.title}\n\n{picture}\n\n{drawing.caption}\n")
    return "\n".join(parts)


def rows(summary: Summary) -> tuple[list[str], list[list[Any]]]:
    """The columns of report.csv, and a row for each run."""
    costs = list(product(summary.targets, ("rounds", "bytes", "seconds")))
    columns = [
        "arm",
        "seed",
        "status",
        "rounds",
        *SCORES,
        *(f"{what}_to_{target}" for target, what in costs),
        "folder",
    ]
    lines: list[list[Any]] = []
    for arm in summary.arms.values():
        for run in arm.runs:
            scores = [arm.scores[score].get(run.seed) for score in SCORES]
            spent = [arm.reached[target].get(run.seed, {}).get(what) for target, what in costs]
            head = [arm.name, run.seed, run.status, run.rounds_done]
            lines.append([*head, *scores, *spent, str(run.folder)])
    return columns, lines
