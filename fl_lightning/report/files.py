"""The files of a report, whole, before the first of them is written."""

from __future__ import annotations

import json
from typing import Any

from fl_lightning.report import charts, curves, page, sections
from fl_lightning.report.drawing import png, svg
from fl_lightning.report.scores import SCORES
from fl_lightning.report.summary import Summary
from fl_lightning.report.tables import comma_separated, latex, markdown


def contents(summary: Summary, title: str) -> dict[str, bytes]:
    """Name → bytes of every file of the report."""
    tables = sections.tables(summary)
    drawings = [
        drawing
        for draw in (
            charts.intervals,
            curves.curves,
            charts.heat_map,
            charts.layers,
            curves.measurements,
        )
        for drawing in draw(summary)
    ]
    notes = [f"- {note}" for note in summary.notes]
    text = [f"# {title}", "", page.lead(summary), "", *notes, *([""] if notes else [])]
    pictures = [
        f"## {d.title}\n\n![{d.title}](figures/{d.key}.png)\n\n{d.caption}\n" for d in drawings
    ]
    files = {
        "report.html": page.write(summary, tables, drawings, title),
        "report.md": "\n".join([*text, *map(markdown, tables), *pictures]),
        "report.tex": "% needs \\usepackage{booktabs}\n\n" + "\n".join(map(latex, tables)),
        "report.csv": comma_separated(*rows(summary)),
        "report.json": json.dumps(summary.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
        + "\n",
    }
    if len(summary.settings) > 1:
        cells = sections.pivot(summary)
        files["pivot.csv"] = comma_separated(
            cells.columns, [[cell.text for cell in row] for row in cells.rows]
        )
    written = {name: text.encode() for name, text in files.items()}
    for drawing in drawings:
        written[f"figures/{drawing.key}.png"] = png(drawing.figure)
        written[f"figures/{drawing.key}.svg"] = svg(drawing.figure).encode()
    return written


def rows(summary: Summary) -> tuple[list[str], list[list[Any]]]:
    """report.csv: columns, and a row a run."""
    costs = [
        (what, target) for target in summary.targets for what in ("rounds", "bytes", "seconds")
    ]
    columns = [
        "arm",
        "seed",
        "status",
        "rounds",
        *SCORES,
        *(f"{what}_to_{target}" for what, target in costs),
        "folder",
    ]
    found = []
    for arm in summary.arms.values():
        for run in arm.runs:
            scores = [arm.scores[score].get(run.seed) for score in SCORES]
            spent = [arm.reached[target].get(run.seed, {}).get(what) for what, target in costs]
            found.append(
                [arm.name, run.seed, run.status, run.rounds_done, *scores, *spent, str(run.folder)]
            )
    return columns, found
