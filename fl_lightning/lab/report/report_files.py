"""The files of a report, complete before the first of them is written.

The page, Markdown and LaTeX are the templates next to this file, for one list of tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fl_lightning.lab.report import figures, report_tables
from fl_lightning.lab.report.cells import Table
from fl_lightning.lab.report.drawing import FORMATS, Drawing, in_style, inline, saved
from fl_lightning.lab.report.scores import SCORES
from fl_lightning.lab.report.summary import COSTS, Summary, relabelled
from fl_lightning.machine.escaping import markdown, paragraph, plain
from fl_lightning.metrics import comma_separated

# The first parts of the names of figures' files.
FIGURES = ("intervals", "curves", "measurements")


@dataclass(frozen=True)
class Section:
    """A part of the page: a table, or a figure, of which several are behind tabs."""

    key: str
    title: str
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()


def contents(
    summary: Summary,
    title: str,
    labels: Mapping[str, str] | None = None,
    style: str = "page",
    formats: Sequence[str] = FORMATS,
    further: Callable[[Summary], list[Table]] = lambda summary: [],
) -> dict[str, bytes]:
    """Return name → bytes of every file of the report.

    ``labels``: arm → its name in tables and figures; report.json and report.csv keep
    arms. ``style``: style of the figures. ``formats``: formats in which figures are written;
    an empty list leaves out all figures, on the page, too. ``further``: a function that returns
    the tables after the report's own.
    """
    original = summary
    summary = relabelled(summary, labels or {})
    tables = [*report_tables.tables(summary), *further(summary)]
    texts = {}
    drawn = {}
    with in_style(style):
        drawings: list[Drawing] = []
        if formats:
            drawings = figures.intervals(summary)
            drawings += figures.curves(summary) + figures.measurements(summary)
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
        for kind in ("html", "md", "tex"):
            template = _templates(kind).get_template(f"report.{kind}")
            texts[f"report.{kind}"] = template.render(shown)
        for drawing, ending in product(drawings, formats):
            drawn[f"figures/{drawing.key}.{ending}"] = saved(drawing.figure, ending)
    texts["report.csv"] = comma_separated(rows(original))
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
    return {**{name: text.encode() for name, text in texts.items()}, **drawn}


def stable(value: Any) -> Any:
    """Return plain data with numbers of 12 digits: further digits depend on the processor."""
    if isinstance(value, Mapping):
        return {name: stable(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [stable(each) for each in value]
    return float(f"{value:.12g}") if isinstance(value, float) else value


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
    templates.filters |= {"tex": tex, "widths": widths, "breakable": breakable}
    templates.filters |= {"markdown": markdown, "paragraph": paragraph}
    templates.filters["label"] = lambda key: re.sub("[^a-z0-9]+", "-", key)
    templates.filters["inline"] = inline
    return templates


def _sections(tables: Sequence[Table], drawings: Sequence[Drawing]) -> list[Section]:
    """Return the figures of each kind, and then each table."""
    made = []
    for key in FIGURES:
        own = [drawing for drawing in drawings if drawing.key.split("-")[0] == key]
        if own:
            title = own[0].title if len(own) == 1 else key.capitalize()
            made.append(Section(f"figure-{key}", title, drawings=own))
    return made + [Section(table.key, table.title, [table]) for table in tables]


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


# -------------------------------------------------------------------------------------- LaTeX

GREEK = "αβγδεζηθικλμνξπρςστυφχψωΓΔΘΛΞΠΣΦΨΩ"
GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho varsigma "
    "sigma tau upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
# Characters that LaTeX would not print literally.
_TEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "–": r"\textendash{}",
        "±": r"$\pm$",
        "×": r"$\times$",
        "−": "$-$",
        "<": "$<$",
        ">": "$>$",
        "≤": r"$\leq$",
        "≥": r"$\geq$",
        "·": r"$\cdot$",
        "‖": r"$\|$",
        "→": r"$\to$",
        "∞": r"$\infty$",
        "≈": r"$\approx$",
        **{sign: f"$\\{name}$" for sign, name in zip(GREEK, GREEK_NAMES.split(), strict=True)},
        **{raised: f"$^{number}$" for number, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    }
)
# Break longer texts into lines, and also longer words in them.
LONG_TEXT = 40
LONG_WORD = 25


def tex(text: str) -> str:
    """Return text that LaTeX prints unchanged.

    >>> print(tex("val/acc, 75.95 ± 0.19 % of fedinit_0.1"))
    val/acc, 75.95 $\\pm$ 0.19 \\% of fedinit\\_0.1
    """
    # LaTeX would turn two hyphens of a name into one dash.
    return plain(text).translate(_TEX).replace("--", "-{}-")


def widths(table: Table) -> list[str]:
    """Return LaTeX's columns of a table: long texts, such as claims' sentences, are broken into
    lines.
    """
    columns = []
    for place in range(len(table.columns)):
        longest = max((len(row[place].text) for row in table.rows), default=0)
        narrow = "r" if place else "l"
        columns.append("p{0.3\\linewidth}" if longest > LONG_TEXT else narrow)
    return columns


def breakable(text: str) -> str:
    """Return the text of a cell, in which long words, such as a run's folder, may continue on
    the next line.
    """
    words = []
    for word in text.split(" "):
        parts = re.split("(?<=[/=,_])(?=.)", word) if len(word) > LONG_WORD else [word]
        words.append(r"\allowbreak{}".join(map(tex, parts)))
    return " ".join(words)
