"""``fl-lightning analyse hessian RUN`` and ``analyse landscape RUN [RUN2]``."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.cli.arguments import ArgumentParser
from fl_lightning.errors import UserError
from fl_lightning.storage.files import named

DESCRIPTION = """Look at the model of a finished run, on its clients' training samples.

hessian    the largest eigenvalue of the loss's Hessian and its trace, as HessianLogger logs them
landscape  the loss around the model on a plane of two random, filter-normalised directions; of two
           runs in one picture

Writes hessian.json, .csv and .png (or landscape…) in the run's folder, or in --out. A checkpoint
that is not the last is named: hessian-best.json. RUN is a run's folder, or a checkpoint in one."""


def parser() -> ArgumentParser:
    """The parser of the command's arguments."""
    made = ArgumentParser("analyse", DESCRIPTION)
    made.add_argument("what", choices=("hessian", "landscape"))
    made.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder or checkpoint"
    )
    made.add_argument("--out", type=named, help="where to write (default: the first run's folder)")
    made.add_argument(
        "--samples",
        default="2000",
        help="of the clients, drawn by the run's seed, or all (default: %(default)s)",
    )
    made.add_argument(
        "--tolerance",
        default="1e-3",
        help="hessian: of the eigenvalue, relative (default: %(default)s)",
    )
    made.add_argument(
        "--probes",
        default="100",
        help="hessian: random vectors for the trace (default: %(default)s)",
    )
    made.add_argument(
        "--points", default="21", help="landscape: a side, an odd number (default: %(default)s)"
    )
    made.add_argument(
        "--range",
        default="1",
        help="landscape: how far, in lengths of the model's filters (default: %(default)s)",
    )
    made.add_argument(
        "--directions",
        default="0",
        help="landscape: the seed of the directions (default: %(default)s)",
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Do what ``argv`` asks for, print where it is, and give 0.

    Raises:
        UserError: what is to mend; nothing has been written then.
    """
    try:
        options = parser().parse_args(list(argv))
    except SystemExit as end:
        # So ends --help.
        return int(end.code or 0)
    samples = None
    if options.samples != "all":
        samples = _number("samples", options.samples, 1)
    most = 1 if options.what == "hessian" else 2
    if len(options.runs) > most:
        raise UserError(
            f"analyse {options.what}: {len(options.runs)} runs were given, and it takes {most} at "
            "most."
        )
    # It brings torch, which --help need not wait for.
    from fl_lightning.cli.commands import quiet

    quiet()
    first = options.runs[0]
    if options.what == "hessian":
        tolerance = _number("tolerance", options.tolerance, 0, whole=False)
        probes = _number("probes", options.probes, 2)
        written, lines = _hessian(first, samples, tolerance, probes)
    else:
        points = _number("points", options.points, 3)
        reach = _number("range", options.range, 0, whole=False)
        if points % 2 == 0:
            raise UserError(
                f"analyse landscape --points {points}: give an odd number, so that the model is "
                "one."
            )
        directions = _number("directions", options.directions, 0)
        written, lines = _landscape(options.runs, int(points), reach, samples, int(directions))
    out = options.out or _folder(first)
    stem = options.what + _which(first)
    for suffix, data in written.items():
        _write(out / f"{stem}{suffix}", data)
    print("\n".join(lines))
    print(f"→ {out / stem}.json, .csv, .png")
    return 0


Files = dict[str, bytes]


def _hessian(path: Path, samples: Any, tolerance: float, probes: Any) -> tuple[Files, list[str]]:
    from fl_lightning.analysis import pictures
    from fl_lightning.analysis.opened import opened
    from fl_lightning.analysis.slices import along_top
    from fl_lightning.evaluation.curvature import Hessian, measure_with_vector

    run = opened(path)
    # Second derivatives in half precision would be noise.
    evaluator = run.evaluator(exact=True)
    subset = run.samples(samples, "hessian")
    hessian = Hessian(evaluator, run.vector, subset)
    curvature, vector = measure_with_vector(hessian, tolerance, probes, run.seed)
    here = evaluator.mean(run.vector, subset)
    values: dict[str, Any] = {
        "run": str(run.folder),
        "checkpoint": str(run.checkpoint),
        "rounds": run.rounds,
        "seed": run.seed,
        "parameters": run.vector.numel(),
        "samples": here.samples,
        "loss": here.loss,
        **{name: _finite(value) for name, value in vars(curvature).items()},
        "tolerance": tolerance,
        "probes": probes,
    }
    steps, losses = along_top(run, evaluator, subset, vector, curvature.top_eigenvalue)
    along = {"steps": list(steps), "losses": [_finite(loss) for loss in losses]}
    top = f"{curvature.top_eigenvalue:.6g} (residual {curvature.top_residual:.1e})"
    where = f"on {here.samples:,} samples, after {run.rounds} rounds"
    shown = [
        f"largest eigenvalue  {top}",
        f"trace               {curvature.trace:.6g} ± {curvature.trace_stderr:.2g}",
        f"‖w‖                 {curvature.norm:.6g}",
        f"loss                {here.loss:.6g} {where}",
    ]
    picture = pictures.along_eigenvector(run, curvature, steps, losses, here.loss)
    rows = [list(values), list(values.values())]
    return _files({**values, "slice": along}, rows, picture), shown


def _landscape(
    paths: list[Path], points: int, reach: float, samples: Any, seed: int
) -> tuple[Files, list[str]]:
    from fl_lightning.analysis import pictures
    from fl_lightning.analysis.landscape import landscape
    from fl_lightning.analysis.opened import opened

    # All are opened before the first is measured: a mistake in the second costs no wait.
    runs = [opened(path) for path in paths]
    landscapes = [landscape(run, points, reach, samples, seed) for run in runs]
    steps = [float(step) for step in landscapes[0].steps]
    whole = {
        "directions": seed,
        "normalised": "filter",
        "steps": steps,
        "runs": [one.as_dict() for one in landscapes],
    }
    # A row of the table is a point of the plane.
    rows: list[list[Any]] = [["run", "a", "b", "loss"]]
    shown = []
    for one in landscapes:
        for i, j in np.ndindex(one.losses.shape):
            rows.append([str(one.run.folder), steps[i], steps[j], _finite(one.losses[i, j])])
        shown.append(f"{one.run.folder}: loss {one.loss:.6g} on {one.samples:,} samples")
    return _files(whole, rows, pictures.landscapes(landscapes)), shown


def _files(whole: dict[str, Any], rows: list[list[Any]], picture: bytes) -> Files:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return {
        ".json": json.dumps(whole, indent=1).encode(),
        ".csv": text.getvalue().encode(),
        ".png": picture,
    }


def _finite(value: Any) -> Any:
    """A number, or None for one that JSON does not have."""
    infinite = isinstance(value, float) and not math.isfinite(value)
    return None if infinite else value


def _number(name: str, text: str, least: int, whole: bool = True) -> Any:
    kind: Callable[[str], Any] = int if whole else float
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or value < least or (not whole and not 0 < value < float("inf")):
        accepted = f"a whole number of at least {least}" if whole else "a number above 0"
        other = " or all" if name == "samples" else ""
        raise UserError(f"analyse --{name} {text}: give {accepted}{other}.")
    return value


def _folder(path: Path) -> Path:
    """The folder of the run that ``path`` is, or is a checkpoint of."""
    if path.is_dir():
        return path
    return next(place for place in path.absolute().parents if (place / "config.yaml").is_file())


def _which(path: Path) -> str:
    return "" if path.is_dir() or path.stem == "last" else f"-{path.stem}"


def _write(path: Path, data: bytes) -> None:
    from fl_lightning.storage.files import written_aside

    with written_aside(path, durable=False) as file:
        file.write(data)
