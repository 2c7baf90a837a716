"""``fl-lightning report FOLDER…`` reads run folders and writes the report.

If it cannot read a file, it refuses with one paragraph that says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.cli.arguments import ArgumentParser
from fl_lightning.machine.escaping import plain
from fl_lightning.storage.atomic_files import named

if TYPE_CHECKING:
    from fl_lightning.lab.report.runs import Found

FORMATS = ("png", "svg", "pdf")
METRIC = "val/acc"
DESCRIPTION = """Compare runs: tables, curves, paired intervals, verdicts on claims.

Reads folders of runs and of sweeps (with their claims.yaml). Writes report.html (a page to read),
report.md, report.tex, report.csv (one row per run), curves.csv (one row per value), report.json
(all numbers without rounding) and figures/ (PNG, SVG and PDF)."""


def parser() -> ArgumentParser:
    """Return the parser of the command's arguments."""
    made = ArgumentParser("report", DESCRIPTION)
    made.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="folder of a run or of a sweep, or any folder of runs",
    )
    made.add_argument(
        "--out",
        type=named,
        help="folder for the report (default: FOLDER if you give one, else ./report)",
    )
    made.add_argument(
        "--targets",
        default="",
        help="values of the metric, such as 0.8,0.9; the report gives rounds, bytes and seconds "
        "to each",
    )
    made.add_argument("--metric", help=f"metric to score (default: {METRIC})")
    made.add_argument(
        "--mode",
        choices=("max", "min"),
        help="whether greater or less is better for --metric, if its name does not say so",
    )
    _add_files(made)
    made.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="ARM=TEXT",
        help="name of an arm in tables and figures; you can give this option several times",
    )
    made.add_argument(
        "--style",
        choices=("page", "paper"),
        default="page",
        help="style of figures: for a page, or for a column of a paper, with markers for prints in "
        "black and white (default: page)",
    )
    made.add_argument(
        "--figures",
        default=",".join(FORMATS),
        metavar="FORMATS",
        help="formats of figures, or none to write no figures (default: %(default)s)",
    )
    made.add_argument(
        "--no_seconds",
        action="store_true",
        help="leave out seconds, for runs that shared their machine with other work",
    )
    return made


def _add_files(made: ArgumentParser) -> None:
    """Add the options that name files beside the runs."""
    made.add_argument(
        "--claims",
        type=Path,
        metavar="FILE",
        help="claims to judge, instead of the sweeps' claims.yaml",
    )
    made.add_argument(
        "--published",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="numbers that a paper printed, to show beside yours; you can give this option several "
        "times",
    )


def main(argv: Sequence[str]) -> int:
    """Write the report that ``argv`` asks for, print where it is, and return 0.

    Raises:
        UserError: the user has to correct something; nothing has been written.
    """
    options = parser().parse_args(list(argv))
    # Check what you typed before reading any file.
    targets = _targets(options.targets)
    formats = _formats(options.figures)
    # The modules that read and draw are slow to import, and a typing error should be reported
    # before.
    from fl_lightning.lab.report.evidence import logged
    from fl_lightning.lab.report.runs import find
    from fl_lightning.lab.report.summary import summarise

    found = find(options.folders)
    metric = options.metric or _headline(found)
    # Runs that have logged nothing so far may still log the metric.
    if options.metric and found.metrics and not logged(found, metric):
        raise UserError(
            f"report --metric {metric}: no run logs it.{suggest(metric, found.metrics)} They log "
            f"{', '.join(found.metrics)[:400]}."
        )
    found.directions.given[metric] = options.mode
    summary = summarise(found, metric, targets, options.claims, options.published)
    summary.timed = not options.no_seconds
    from fl_lightning.lab.report.labels import labels_of
    from fl_lightning.lab.report.report_files import contents, leftovers

    labels = labels_of(options.label, list(summary.arms))

    title = " and ".join(folder.resolve().name for folder in options.folders[:3])
    if len(options.folders) > 3:
        title += " and others"
    written = contents(summary, title, labels, options.style, formats)
    out = options.out or (options.folders[0] if len(options.folders) == 1 else Path("report"))
    _write(out, written, leftovers(out, written))
    for verdict in summary.verdicts:
        print(plain(f"{verdict.claim.id}: {verdict.printed}"))
    for note in summary.notes:
        print(plain(f"note: {note}"))
    files = [name for name in written if "/" not in name]
    if len(files) < len(written):
        files.append("figures/")
    print(f"→ {out / 'report.html'} ({', '.join(files)})")
    return 0


def _headline(found: Found) -> str:
    """Return the metric that is scored by default: val/acc, or the metric of clients' own models.

    Clients' own metric comes first if a run is shown by it and all runs log it: then its val/…
    measures a mean of models, or of personal parts, which no client uses.
    """
    for run in found.runs:
        shown = run.record.get("shown")
        first = shown[0] if isinstance(shown, list) and shown else ""
        of_clients = isinstance(first, str) and first.startswith("clients/")
        if of_clients and all(first in each.columns for each in found.runs):
            return str(first)
    return METRIC


def _formats(text: str) -> list[str]:
    formats = [] if text == "none" else text.split(",")
    for name in formats:
        if name not in FORMATS:
            raise UserError(
                f"report --figures {text}: {name!r} is not one of {', '.join(FORMATS)}. Accepted: "
                "one or more of these with commas between, or the word none."
            )
    return formats


def _targets(text: str) -> list[str]:
    # Keep the text of a target: a report shows it as you typed it.
    targets = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for target in targets:
        try:
            finite = math.isfinite(float(target))
        except ValueError:
            finite = False
        if not finite:
            raise UserError(
                f"report --targets {text}: {target!r} is not a number. Accepted: numbers, such as "
                "0.8,0.9."
            )
    return targets


def _write(out: Path, written: dict[str, bytes], leftovers: Sequence[Path]) -> None:
    try:
        for name, data in written.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        # Delete files of an earlier report, which would look like part of this one.
        for path in leftovers:
            path.unlink()
    except OSError as error:
        raise UserError(
            f"report --out {out}: cannot be written to ({error.strerror}). Give another folder."
        ) from None
