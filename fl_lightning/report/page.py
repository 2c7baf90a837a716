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

# The first parts of keys, in the order of reading.
ORDER = (
    "claims",
    "scores",
    "pivot",
    "intervals",
    "pairs",
    "curves",
    "budgets",
    "target",
    "communication",
    "heatmap",
    "consensus",
    "measurements",
    "published",
    "runs",
)
# Names in the list of contents.
SHORT = {
    "scores": "Scores",
    "pivot": "Settings",
    "pairs": "Differences",
    "budgets": "Equal cost",
    "target": "Until {}",
    "communication": "Communication",
    "consensus": "Consensus",
    "measurements": "Measurements",
    "published": "Published",
}


def write(
    summary: Summary, tables: Sequence[Table], drawings: Sequence[Drawing], title: str
) -> str:
    """Write the whole page."""
    lead_in = [_verdicts(summary), _notes(summary)]
    contents, sections = _sections(tables, drawings)
    links = "".join(f'<a href="#section-{key}">{html.escape(name)}</a>' for key, name in contents)
    folder = files("fl_lightning.report")
    css = folder.joinpath("page.css").read_text("utf-8")
    js = folder.joinpath("page.js").read_text("utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>{html.escape(title)}</h1>
<p class="lead">{html.escape(lead(summary))}</p>
<nav>{links}</nav>
</header>
<main>
{"".join(lead_in + sections)}</main>
<footer>Made by <code>fl-lightning report</code>. The numbers unrounded: \
<code>report.json</code>, a row a run:
<code>report.csv</code>.</footer>
<script>
{js}</script>
</body>
</html>
"""


def _sections(
    tables: Sequence[Table], drawings: Sequence[Drawing]
) -> tuple[list[tuple[str, str]], list[str]]:
    """(key, name) of each section for the list of contents, and the sections themselves."""
    by_key: dict[str, list[Table]] = {}
    for table in tables:
        by_key.setdefault(table.key.split("-")[0], []).append(table)
    groups: dict[str, list[Drawing]] = {}
    for drawing in drawings:
        groups.setdefault(drawing.group or drawing.key, []).append(drawing)
    contents: list[tuple[str, str]] = []
    sections = []
    for key in ORDER:
        for table in by_key.get(key, []):
            # A folded table stands below the figure that says the same.
            if not table.folded:
                name = SHORT.get(key, table.title).format(table.key.partition("-")[2])
                contents.append((table.key, name))
                sections.append(_section(table.key, table.title, table_html(table)))
        # Figures that show the same in several ways lie behind tabs.
        if key in groups:
            title = "Curves" if len(groups[key]) > 1 else groups[key][0].title
            contents.append((f"figure-{key}", SHORT.get(key, title)))
            numbers = "".join(table_html(table) for table in by_key.get(key, []) if table.folded)
            sections.append(_section(f"figure-{key}", title, _figures(key, groups[key]) + numbers))
    return contents, sections


def lead(summary: Summary) -> str:
    """Say in one sentence how much there is of what."""
    runs = summary.found.runs
    seeds = len({run.seed for run in runs})
    counts = []
    for status in ("done", "diverged", "running", "stopped", "failed"):
        number = sum(run.status == status for run in runs)
        if number:
            counts.append(f"{number} {status}")
    arms = f"{len(summary.arms)} arm{'s' * (len(summary.arms) != 1)}"
    count = f"{len(runs)} runs ({', '.join(counts)})"
    return f"{arms}, {seeds} seed{'s' * (seeds != 1)}, {count}, scored by {summary.metric}."


def _section(key: str, title: str, body: str) -> str:
    return (
        f'<section id="section-{html.escape(key)}"><h2>{html.escape(title)}</h2>{body}</section>\n'
    )


def _verdicts(summary: Summary) -> str:
    """Make a card for each claim: what was claimed, what the runs say."""
    if not summary.verdicts:
        return ""
    cards = [_card(summary, verdict) for verdict in shown_first(summary.verdicts)]
    return f'<div class="cards">{"".join(cards)}</div>\n'


def _card(summary: Summary, verdict: Verdict) -> str:
    claim = verdict.claim
    interval = verdict.pair.interval
    shown = difference_unit(summary, verdict.pair)
    claimed = claim.text or sentence(claim)
    if claim.kind == "diverges":
        diverged = f"{(interval.mean or 0) * interval.n:.0f}"
        claimed = f"{claimed}: in {diverged} of {interval.n} seeds"
    mean = shown.difference(interval.mean)
    if interval.low is None:
        numbers = f"{mean}, n = {interval.n}: an interval needs two pairs"
    else:
        ends = f"{shown.difference(interval.low)} to {shown.difference(interval.high)}"
        numbers = f"{mean} {shown.of_difference}".strip()
        numbers += f", 95 % interval {ends}, n = {interval.n}"
    changed = ""
    if verdict.changed:
        changed = '<p class="changed">The claims were edited after the runs started.</p>'
    return (
        f'<article class="card {verdict.verdict.replace(" ", "-")}">'
        f"<h3><span>{html.escape(claim.id)}</span> {html.escape(verdict.printed)}</h3>"
        f"<p>{html.escape(claimed)}</p><p class=numbers>{html.escape(numbers)}</p>"
        f"{changed}</article>"
    )


def _notes(summary: Summary) -> str:
    if not summary.notes:
        return ""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in summary.notes)
    return f"<aside><h2>To be known</h2><ul>{items}</ul></aside>\n"


def _figures(key: str, drawings: Sequence[Drawing]) -> str:
    """Show one figure, or several behind tabs that need no script."""
    bodies = [
        f"<figure>{inline(d.figure, d.key, html.escape(d.title))}"
        f"<figcaption>{html.escape(d.caption)}</figcaption></figure>"
        for d in drawings
    ]
    if len(drawings) == 1:
        return bodies[0]
    tabs = []
    for number, (drawing, body) in enumerate(zip(drawings, bodies, strict=True)):
        # The browser shows the tab that is checked.
        checked = " checked" if number == 0 else ""
        name = f"tab-{drawing.key}"
        button = f'<input type="radio" name="{key}" id="{name}"{checked}>'
        tabs.append(f'{button}<label for="{name}">{drawing.title}</label>{body}')
    return f'<div class="tabs">{"".join(tabs)}</div>'
