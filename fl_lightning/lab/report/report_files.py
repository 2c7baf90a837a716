"""The files of a report, complete before the first of them is written.

The page, Markdown and LaTeX are the templates next to this file, for one list of tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from fl_lightning.lab.report import charts, curves, report_tables
from fl_lightning.lab.report.cells import Table
from fl_lightning.lab.report.drawing import FORMATS, Drawing, in_style, inline, saved
from fl_lightning.lab.report.labels import relabelled
from fl_lightning.lab.report.latex import breakable, heading, tex, widths
from fl_lightning.lab.report.scores import SCORES
from fl_lightning.lab.report.summary import COSTS, Summary
from fl_lightning.machine.escaping import markdown, paragraph, plain
from fl_lightning.metrics import comma_separated

# The first parts of keys, in the order of reading, with their titles in the table of contents.
ORDER = {
    "claims": "",
    "gains": "Published gains",
    "scores": "Scores",
    "pivot": "Settings",
    "intervals": "",
    "pairs": "Differences",
    "curves": "",
    "budgets": "Equal cost",
    "target": "Until {}",
    "communication": "Communication",
    "heatmap": "",
    "consensus": "Consensus",
    "generalisation": "Generalisation",
    "fairness": "Fairness",
    "clients": "",
    "measurements": "Measurements",
    "published": "Published",
    "chosen": "Chosen",
    "runs": "",
}
COSTS_OF_CURVES = (
    "cost/gradients",
    "communication/total_bytes",
    "time/virtual",
    "time/round",
    "time/cpu",
)


@dataclass(frozen=True)
class Section:
    """A part of the page: figures above tables; several figures are behind tabs."""

    key: str
    name: str
    title: str
    tables: Sequence[Table]
    drawings: Sequence[Drawing] = ()
    group: str = ""


def contents(
    summary: Summary,
    title: str,
    labels: Mapping[str, str] | None = None,
    style: str = "page",
    formats: Sequence[str] = FORMATS,
) -> dict[str, bytes]:
    """Return name → bytes of every file of the report.

    ``labels``: arm → its name in tables and figures; report.json, report.csv and curves.csv keep
    arms. ``style``: style of the figures. ``formats``: formats in which figures are written;
    without any there are no figures, also not on the page.
    """
    with in_style(style):
        return _contents(summary, title, labels, formats)


def _contents(
    summary: Summary, title: str, labels: Mapping[str, str] | None, formats: Sequence[str]
) -> dict[str, bytes]:
    original = summary
    summary = relabelled(summary, labels or {})
    tables = report_tables.tables(summary)
    drawings = _drawings(summary) if formats else []
    shown = {
        "title": title,
        "summary": summary,
        "lead": lead(summary),
        "tables": tables,
        "drawings": drawings,
        "format": next(iter(formats), None),
        "sections": _sections(tables, drawings),
        "verdicts": report_tables.shown_first(summary.verdicts),
        "sentence": lambda claim: report_tables.sentence(claim, summary.called),
        "unit": lambda compared: report_tables.difference_unit(summary, compared),
    }
    texts = {}
    for kind in ("html", "md", "tex"):
        texts[f"report.{kind}"] = _templates(kind).get_template(f"report.{kind}").render(shown)
    texts["report.csv"] = comma_separated(rows(original))
    texts["curves.csv"] = comma_separated(list(points(original)))
    numbers = stable(original.to_json())
    document = json.dumps(numbers, indent=1, ensure_ascii=False, allow_nan=False)
    texts["report.json"] = document + "\n"
    # Spreadsheets get the table of methods by settings as a separate file.
    if len(summary.settings) > 1:
        pivot = report_tables.pivot(summary)
        spreadsheet = [pivot.columns]
        for row in pivot.rows:
            spreadsheet.append([cell.text for cell in row])
        texts["pivot.csv"] = comma_separated(spreadsheet)
    # Make all files in memory before writing the first, so that an error leaves the old report
    # complete.
    written = {name: text.encode() for name, text in texts.items()}
    for drawing in drawings:
        for ending in formats:
            written[f"figures/{drawing.key}.{ending}"] = saved(drawing.figure, ending)
    return written


def stable(value: Any) -> Any:
    """Return plain data with numbers of 12 digits: further digits depend on the processor."""
    if isinstance(value, Mapping):
        return {name: stable(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [stable(each) for each in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


def leftovers(out: Path, written: Collection[str]) -> list[Path]:
    """Return the files in ``out`` that an earlier report left and that this one has not
    ``written``.
    """
    found = [out / "pivot.csv", *sorted(out.glob("figures/*"))]
    left = []
    for path in found:
        # A figure's file name begins with that of its section; other files belong to somebody else.
        ours = path.stem.partition("-")[0] in ORDER and path.suffix[1:] in (*FORMATS, "csv")
        if ours and path.is_file() and path.relative_to(out).as_posix() not in written:
            left.append(path)
    return left


def _drawings(summary: Summary) -> list[Drawing]:
    return [
        *charts.intervals(summary),
        *curves.curves(summary),
        *charts.heat_map(summary),
        *charts.layers(summary),
        *charts.generalisation(summary),
        *charts.clients(summary),
        *curves.measurements(summary),
    ]


def _templates(kind: str) -> Environment:
    """Return the templates of a kind of files; in LaTeX braces are text, so these templates
    have other marks.
    """
    marks: dict[str, Any] = {}
    if kind == "tex":
        marks = {"block_start_string": "<%", "block_end_string": "%>"}
        marks |= {"variable_start_string": "<<", "variable_end_string": ">>"}
    templates = Environment(
        loader=PackageLoader("fl_lightning.lab.report"),
        autoescape=kind == "html",
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        finalize=lambda value: plain(value) if type(value) is str else value,
        **marks,
    )
    templates.filters |= {"tex": tex, "heading": heading, "widths": widths, "breakable": breakable}
    templates.filters |= {"markdown": markdown, "paragraph": paragraph}
    templates.filters["label"] = lambda key: re.sub("[^a-z0-9]+", "-", key)
    templates.filters["inline"] = inline
    return templates


def _sections(tables: Sequence[Table], drawings: Sequence[Drawing]) -> list[Section]:
    made = []
    for key, name in ORDER.items():
        own = [table for table in tables if table.key.split("-")[0] == key]
        group = [drawing for drawing in drawings if (drawing.group or drawing.key) == key]
        for table in own:
            # A folded table comes below the figure with the same numbers, if there is one.
            if not (table.folded and group):
                short = (name or table.title).format(table.key.partition("-")[2])
                made.append(Section(table.key, short, table.title, [table]))
        # Figures that show the same data in several ways are shown as tabs.
        if group:
            title = group[0].title.partition(":")[0] if key != "curves" else "Curves"
            if len(group) == 1:
                title = group[0].title
            folded = [table for table in own if table.folded]
            made.append(Section(f"figure-{key}", name or title, title, folded, group, key))
    return made


def lead(summary: Summary) -> str:
    """Return one sentence that counts the entries."""
    runs = summary.found.runs
    seeds = len({run.seed for run in runs})
    counts = []
    for status in ("done", "diverged", "running", "stopped", "failed"):
        if number := sum(run.status == status for run in runs):
            counts.append(f"{number} {status}")
    arms = f"{len(summary.arms)} arm{'s' * (len(summary.arms) != 1)}"
    count = f"{len(runs)} runs ({', '.join(counts)})"
    metric = summary.called(summary.metric)
    return f"{arms}, {seeds} seed{'s' * (seeds != 1)}, {count}, scored by {metric}."


def points(summary: Summary) -> Iterator[list[Any]]:
    """Yield the rows of curves.csv: its columns, and one for each value from which a figure is
    drawn.
    """
    yield ["arm", "seed", "round", "metric", "value"]
    shown = dict.fromkeys((summary.metric, *curves.MEASUREMENTS, *COSTS_OF_CURVES))
    for run in summary.found.runs:
        rounds = run.columns["round"].tolist()
        for metric in shown:
            values = run.column(metric)
            for place in np.flatnonzero(np.isfinite(values)):
                yield [run.arm, run.seed, int(rounds[place]), metric, float(values[place])]


def rows(summary: Summary) -> list[list[Any]]:
    """Yield the rows of report.csv: its columns, and one for each run."""
    costs = list(product(summary.targets, COSTS))
    spent = [f"{what}_to_{target}" for target, what in costs]
    table: list[list[Any]] = [["arm", "seed", "status", "rounds", *SCORES, *spent, "folder"]]
    for arm in summary.arms.values():
        for run in arm.runs:
            scores = [arm.scores[score].get(run.seed) for score in SCORES]
            reached = [arm.reached[target].get(run.seed, {}).get(what) for target, what in costs]
            head = [arm.name, run.seed, run.status, run.rounds_done]
            table.append([*head, *scores, *reached, str(run.folder)])
    return table
