"""``fl-lightning report FOLDER…``: reads run folders and writes the report, or says in one paragraph why not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.cli.arguments import ArgumentParser
from fl_lightning.errors import UserError
from fl_lightning.storage.files import named

DESCRIPTION = """Compare runs: tables, curves, paired intervals, verdicts on claims.

Reads folders of runs and of sweeps (with their claims.yaml), and writes report.html, a page to read, report.md,
report.tex, report.csv (a row a run), report.json (every number unrounded) and figures/ as PNG and SVG."""


def parser() -> ArgumentParser:
    """What the command takes."""
    made = ArgumentParser("report", DESCRIPTION)
    made.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="of a run, of a sweep, or any full of runs",
    )
    made.add_argument(
        "--out",
        type=named,
        help="where to write (default: FOLDER where one is given, else ./report)",
    )
    made.add_argument(
        "--targets",
        default="",
        help="values of the metric, such as 0.8,0.9: rounds, bytes, seconds until",
    )
    made.add_argument("--metric", default="val/acc", help="what is scored (default: %(default)s)")
    made.add_argument(
        "--mode",
        choices=("max", "min"),
        help="which way is better in --metric, where its name does not tell",
    )
    made.add_argument(
        "--claims",
        type=Path,
        metavar="FILE",
        help="claims to judge, in place of the sweeps' claims.yaml",
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Write the report that ``argv`` asks for, print where it is, and give 0.

    Raises:
        UserError: what is to mend; nothing has been written then.
    """
    try:
        given = parser().parse_args(list(argv))
    except SystemExit as asked:  # --help
        return int(asked.code or 0)
    targets = _targets(given.targets)
    from fl_lightning.report.runs import find
    from fl_lightning.report.summary import summarise

    found = find(given.folders)
    found.directions.given[given.metric] = given.mode
    summary = summarise(found, given.metric, targets, given.claims)
    out = given.out or (given.folders[0] if len(given.folders) == 1 else Path("report"))
    from fl_lightning.report.files import contents

    title = " and ".join(folder.resolve().name for folder in given.folders[:3])
    written = contents(summary, title + (" and others" if len(given.folders) > 3 else ""))
    _write(out, written)
    for said in summary.verdicts:
        print(f"{said.claim.id}: {said.printed}")
    for note in summary.notes:
        print(f"note: {note}")
    print(
        f"→ {out / 'report.html'} ({', '.join(name for name in written if '/' not in name)}, figures/)"
    )
    return 0


def _targets(text: str) -> list[str]:
    targets = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for target in targets:
        try:
            finite = math.isfinite(float(target))
        except ValueError:
            finite = False
        if not finite:
            raise UserError(
                f"report --targets {text}: {target!r} is no number. Accepted: numbers, such as 0.8,0.9."
            )
    return targets


def _write(out: Path, written: dict[str, bytes]) -> None:
    try:
        for name, data in written.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    except OSError as error:
        raise UserError(
            f"report --out {out}: cannot be written to ({error.strerror}). Give another folder."
        ) from None
