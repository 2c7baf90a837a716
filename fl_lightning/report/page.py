"""The report as one page: everything is inline, nothing is fetched from the network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files

from fl_lightning.report.claimed import difference_unit, sentence, shown_first
from fl_lightning.report.drawing import Drawing, inline
from fl_lightning.report.summary import Summary, Verdict
from fl_lightning.report.tables import Table
from fl_lightning.report.tables import page as table_html

# first parts of keys, in the order of reading
ORDER = (
    "claims", "scores", "pivot", "intervals", "pairs", "curves", "budgets", "target", "communication", "heatmap",
    "consensus", "measurements", "published", "runs",
)  # fmt: skip
SHORT = {  # in the list of contents
    "scores": "Scores", "pivot": "Settings", "pairs": "Differences", "budgets": "Equal cost", "target": "Until {}",
    "communication": "Communication", "consensus": "Consensus", "measurements": "Measurements",
    "published": "Published",
}  # fmt: skip


def write(
    summary: Summary, tables: Sequence[Table], drawings: Sequence[Drawing], title: str
) -> str:
    """The whole page."""
    sections = [_verdicts(summary), _notes(summary)]
    by_key: dict[str, list[Table]] = {}
    for table in tables:
        by_key.setdefault(table.key.split("-")[0], []).append(table)
    groups: dict[str, list[Drawing]] = {}
    for drawing in drawings:
        groups.setdefault(drawing.group or drawing.key, []).append(drawing)
    contents = []
    for key in ORDER:
        for table in by_key.get(key, []):
            if table.folded:  # below the figure that says the same
                continue
            contents.append(
                (table.key, SHORT.get(key, table.title).format(table.key.partition("-")[2]))
            )
            sections.append(_section(table.key, table.title, table_html(table)))
        if key in groups:
            name = "Curves" if len(groups[key]) > 1 else groups[key][0].title
            contents.append((f"figure-{key}", SHORT.get(key, name)))
            numbers = "".join(table_html(table) for table in by_key.get(key, []) if table.folded)
            sections.append(_section(f"figure-{key}", name, _figures(key, groups[key]) + numbers))
    links = "".join(f'<a href="#section-{key}">{html.escape(name)}</a>' for key, name in contents)
    parts = {
        name: files("fl_lightning.report").joinpath(name).read_text("utf-8")
        for name in ("page.css", "page.js")
    }
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>
{parts["page.css"]}</style>
</head>
<body>
<header>
<h1>{html.escape(title)}</h1>
<p class="lead">{html.escape(lead(summary))}</p>
<nav>{links}</nav>
</header>
<main>
{"".join(sections)}</main>
<footer>Made by <code>fl-lightning report</code>. The numbers unrounded: <code>report.json</code>, a row a run:
<code>report.csv</code>.</footer>
<script>
{parts["page.js"]}</script>
</body>
</html>
"""


def lead(summary: Summary) -> str:
    """One sentence: how much there is of what."""
    runs = summary.found.runs
    seeds = len({run.seed for run in runs})
    counts = [f"{number} {status}" for status in ("done", "diverged", "running", "stopped", "failed")
              if (number := sum(run.status == status for run in runs))]  # fmt: skip
    arms = f"{len(summary.arms)} arm{'s' * (len(summary.arms) != 1)}"
    count = f"{len(runs)} runs ({', '.join(counts)})"
    return f"{arms}, {seeds} seed{'s' * (seeds != 1)}, {count}, scored by {summary.metric}."


def _section(key: str, title: str, body: str) -> str:
    return (
        f'<section id="section-{html.escape(key)}"><h2>{html.escape(title)}</h2>{body}</section>\n'
    )


def _verdicts(summary: Summary) -> str:
    """A card for each claim: what was claimed, what the runs say."""
    if not summary.verdicts:
        return ""
    return f'<div class="cards">{"".join(_card(summary, said) for said in shown_first(summary.verdicts))}</div>\n'


def _card(summary: Summary, said: Verdict) -> str:
    pair, found = said.pair, said.pair.interval
    shown = difference_unit(summary, pair)
    claimed = said.claim.text or sentence(said.claim)
    if said.claim.kind == "diverges":
        claimed = f"{claimed}: in {(found.mean or 0) * found.n:.0f} of {found.n} seeds"
    if found.low is not None:
        numbers = f"{shown.difference(found.mean)} {shown.of_difference}".strip()
        numbers += f", 95 % interval {shown.difference(found.low)} to {shown.difference(found.high)}, n = {found.n}"
    else:
        numbers = f"{shown.difference(found.mean)}, n = {found.n}: an interval needs two pairs"
    changed = (
        '<p class="changed">The claims were edited after the runs started.</p>'
        if said.changed
        else ""
    )
    return (
        f'<article class="card {said.verdict.replace(" ", "-")}"><h3><span>{html.escape(said.claim.id)}</span> '
        f"{html.escape(said.printed)}</h3><p>{html.escape(claimed)}</p><p class=numbers>{html.escape(numbers)}</p>"
        f"{changed}</article>"
    )


def _notes(summary: Summary) -> str:
    if not summary.notes:
        return ""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in summary.notes)
    return f"<aside><h2>To be known</h2><ul>{items}</ul></aside>\n"


def _figures(key: str, drawings: Sequence[Drawing]) -> str:
    """One figure, or several behind tabs that need no script."""
    bodies = [
        f"<figure>{inline(d.figure, d.key, html.escape(d.title))}"
        f"<figcaption>{html.escape(d.caption)}</figcaption></figure>"
        for d in drawings
    ]
    if len(drawings) == 1:
        return bodies[0]
    tabs = []
    for number, (drawing, body) in enumerate(zip(drawings, bodies, strict=True)):
        checked = " checked" if number == 0 else ""
        name = f"tab-{drawing.key}"
        tabs.append(
            f'<input type="radio" name="{key}" id="{name}"{checked}><label for="{name}">{drawing.title}</label>'
        )
        tabs.append(body)
    return f'<div class="tabs">{"".join(tabs)}</div>'
