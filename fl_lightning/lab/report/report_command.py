"""``fl-lightning report FOLDER…`` reads run folders and writes the report.

If it cannot read a file, it refuses with one paragraph that says why.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fl_lightning.errors import UserError, suggest
from fl_lightning.introspection.accepted import check
from fl_lightning.lab.cli.arguments import ArgumentParser
from fl_lightning.machine.escaping import plain
from fl_lightning.storage.atomic_files import named, written_aside

if TYPE_CHECKING:
    from fl_lightning.lab.report.cells import Table
    from fl_lightning.lab.report.summary import Summary

FORMATS = ("png", "svg", "pdf")
METRIC = "val/acc"
DESCRIPTION = """Compare runs: tables, curves, paired intervals, verdicts on claims.

Reads folders of runs and of sweeps (with their claims.yaml). Writes report.html (a page to read),
report.md, report.tex, report.csv (one row per run), report.json (all numbers without rounding) and
figures/ (PNG, SVG and PDF)."""


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
        default=[],
        type=_targets,
        metavar="NUMBERS",
        help="values of the metric, such as 0.8,0.9; the report gives rounds, bytes and seconds "
        "to each",
    )
    made.add_argument("--metric", help=f"metric to score (default: {METRIC})")
    made.add_argument(
        "--mode",
        choices=("max", "min"),
        help="whether greater or less is better for --metric, if its name does not say so",
    )
    made.add_argument(
        "--claims",
        type=Path,
        metavar="FILE",
        help="claims to judge, instead of the sweeps' claims.yaml",
    )
    _add_look(made)
    return made


def _add_look(made: ArgumentParser) -> None:
    """Add the options of what the report shows, and how."""
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
        default=list(FORMATS),
        type=_formats,
        metavar="FORMATS",
        help=f"formats of figures, or none to write no figures (default: {','.join(FORMATS)})",
    )
    made.add_argument(
        "--no_seconds",
        action="store_true",
        help="leave out seconds, for runs that shared their machine with other work",
    )


def main(
    argv: Sequence[str], further: Callable[[Summary], list[Table]] = lambda summary: []
) -> int:
    """Write the report that ``argv`` asks for, print where it is, and return 0.

    ``further``: a function that returns tables of a study, to stand after the report's own.

    Raises:
        UserError: the user has to correct something; nothing has been written.
    """
    options = parser().parse_args(list(argv))
    check("report --figures", options.figures, list[Literal["png", "svg", "pdf"]])
    # The modules that read and draw are slow to import, and a typing error should be reported
    # before.
    from fl_lightning.lab.report.evidence import logged
    from fl_lightning.lab.report.runs import find
    from fl_lightning.lab.report.summary import summarise

    found = find(options.folders)
    metric = options.metric or METRIC
    claimed = options.claims is not None or any(
        (folder / "claims.yaml").is_file() for folder in options.folders
    )
    # Runs that have logged nothing so far may still log the metric. A run that was stopped in its
    # first round has logged its costs, and no measurement.
    done = any(run.status == "done" and run.rounds_done for run in found.runs) and not claimed
    if (found.metrics if options.metric else done) and not logged(found, metric):
        raise UserError(
            f"report --metric {metric}: no run logs it.{suggest(metric, found.metrics)} Give one "
            f"that they log: {', '.join(found.metrics)[:400]}."
        )
    found.directions.given[metric] = options.mode
    summary = summarise(found, metric, options.targets, options.claims)
    summary.timed = not options.no_seconds
    from fl_lightning.lab.report.report_files import contents

    labels = _labels(options.label, list(summary.arms))
    title = " and ".join(folder.resolve().name for folder in options.folders[:3])
    if len(options.folders) > 3:
        title += " and others"
    written = contents(summary, title, labels, options.style, options.figures, further)
    out = options.out or (options.folders[0] if len(options.folders) == 1 else Path("report"))
    for name, data in written.items():
        with written_aside(out / name, durable=False) as file:
            file.write(data)
    for verdict in summary.verdicts:
        print(plain(f"{verdict.claim.id}: {verdict.printed}"))
    for note in summary.notes:
        print(plain(f"note: {note}"))
    files = [name for name in written if "/" not in name]
    if len(files) < len(written):
        files.append("figures/")
    print(f"→ {out / 'report.html'} ({', '.join(files)})")
    return 0


def _formats(text: str) -> list[str]:
    return [] if text == "none" else text.split(",")


def _targets(text: str) -> list[str]:
    # Keep the text of a target: a report shows it as you typed it.
    targets = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for target in targets:
        try:
            finite = math.isfinite(float(target))
        except ValueError:
            finite = False
        if not finite:
            raise argparse.ArgumentTypeError(
                f"{target!r} is not a number. Give numbers, such as 0.8,0.9"
            )
    return targets


def _labels(texts: Sequence[str], arms: Sequence[str]) -> dict[str, str]:
    """Return arm → its label, from ``ARM=TEXT``.

    Raises:
        UserError: there is no such arm, or two arms would have the same name.
    """
    labels: dict[str, str] = {}
    for text in texts:
        arm, _, label = text.partition("=")
        if arm not in arms or not label.strip():
            raise UserError(
                f"report --label {text}: give ARM=TEXT, such as fedavg=FedAvg."
                f"{suggest(arm, arms)} The arms are {', '.join(arms)[:300]}."
            )
        labels[arm] = label.strip()
    shown = [labels.get(arm, arm) for arm in arms]
    twice = [label for label in shown if shown.count(label) > 1]
    if twice:
        raise UserError(
            f"report --label: two arms would be called {twice[0]!r}; give each arm its own name."
        )
    return labels
