"""``fl-lightning analyse hessian RUN`` and ``analyse landscape RUN [RUN2]``."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.errors import UserError
from fl_lightning.lab.cli.arguments import ArgumentParser
from fl_lightning.metrics import comma_separated
from fl_lightning.storage.atomic_files import named, written_aside

DESCRIPTION = """Measure the model of a finished run on its clients' training samples.

hessian    the largest eigenvalue and the trace of the loss's Hessian, as HessianLogger logs them
landscape  the loss around the model, on a plane of two random, filter-normalised directions; two
           runs give one picture

Writes hessian.json, .csv and .png (or landscape.…) to the run's folder, or to --out. If the
checkpoint is not the last one, the files have its name: hessian-best.json. RUN is a run's folder or
a checkpoint in it."""


def parser() -> ArgumentParser:
    """Return the parser of the command's arguments."""
    made = ArgumentParser("analyse", DESCRIPTION)
    made.add_argument("what", choices=("hessian", "landscape"))
    made.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder or checkpoint"
    )
    made.add_argument("--out", type=named, help="where to write (default: the first run's folder)")
    made.add_argument(
        "--samples",
        default="2000",
        help="number of the clients' samples, drawn by the run's seed, or all "
        "(default: %(default)s)",
    )
    made.add_argument(
        "--tolerance",
        default="1e-3",
        help="hessian: relative tolerance of the eigenvalue (default: %(default)s)",
    )
    made.add_argument(
        "--probes",
        default="100",
        help="hessian: number of random vectors for the trace (default: %(default)s)",
    )
    made.add_argument(
        "--points",
        default="21",
        help="landscape: points per side, an odd number (default: %(default)s)",
    )
    made.add_argument(
        "--range",
        default="1",
        help="landscape: distance from the model to each side, in norms of the model's filters "
        "(default: %(default)s)",
    )
    made.add_argument(
        "--directions",
        default="0",
        help="landscape: seed of the directions (default: %(default)s)",
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Run the command with ``argv``, print the place of its files, and return 0.

    Raises:
        UserError: the user has to correct something; nothing has been written.
    """
    options = parser().parse_args(list(argv))
    samples = None if options.samples == "all" else _number(options, "samples", 1)
    most = 1 if options.what == "hessian" else 2
    if len(options.runs) > most:
        raise UserError(
            f"analyse {options.what}: {len(options.runs)} runs were given, but it takes at most "
            f"{most}."
        )
    # This imports torch, which --help should not wait for.
    from fl_lightning.lab.cli.lightning_commands import quiet

    quiet()
    measure = _hessian if options.what == "hessian" else _landscape
    whole, rows, picture, lines = measure(options, samples)
    first = options.runs[0]
    # A checkpoint lies in its run's folder.
    above = first.absolute().parents
    folder = options.out or first
    if options.out is None and not first.is_dir():
        folder = next(place for place in above if (place / "config.yaml").is_file())
    which = "" if first.is_dir() or first.stem == "last" else f"-{first.stem}"
    path = folder / f"{options.what}{which}"
    files = {"json": json.dumps(whole, indent=1).encode()}
    files |= {"csv": comma_separated(rows).encode(), "png": picture}
    for suffix, data in files.items():
        with written_aside(path.with_name(f"{path.name}.{suffix}"), durable=False) as file:
            file.write(data)
    print("\n".join(lines))
    print(f"→ {path}.json, .csv, .png")
    return 0


# The content of .json, the rows of .csv, the bytes of .png, and the lines that are printed.
Result = tuple[dict[str, Any], list[list[Any]], bytes, list[str]]


def _hessian(options: Namespace, samples: int | None) -> Result:
    tolerance = _number(options, "tolerance", 0, whole=False)
    probes = _number(options, "probes", 2)
    from fl_lightning.evaluation.curvature import Hessian, measure_with_vector
    from fl_lightning.lab.analysis import plots
    from fl_lightning.lab.analysis.opened import opened
    from fl_lightning.lab.analysis.slices import along_top

    run = opened(options.runs[0])
    # Second derivatives in half precision would be mostly rounding error.
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
        **{name: finite(value) for name, value in vars(curvature).items()},
        "tolerance": tolerance,
        "probes": probes,
    }
    steps, losses = along_top(run, evaluator, subset, vector, curvature.top_eigenvalue)
    along = {"steps": steps, "losses": list(map(finite, losses))}
    top = f"{curvature.top_eigenvalue:.6g} (residual {curvature.top_residual:.1e})"
    where = f"on {here.samples:,} samples, after {run.rounds} rounds"
    lines = [
        f"largest eigenvalue  {top}",
        f"trace               {curvature.trace:.6g} ± {curvature.trace_stderr:.2g}",
        f"‖w‖                 {curvature.norm:.6g}",
        f"loss                {here.loss:.6g} {where}",
    ]
    picture = plots.along_eigenvector(run, curvature, steps, losses, here.loss)
    rows = [list(values), list(values.values())]
    return {**values, "slice": along}, rows, picture, lines


def _landscape(options: Namespace, samples: int | None) -> Result:
    points = _number(options, "points", 3)
    reach = _number(options, "range", 0, whole=False)
    if points % 2 == 0:
        raise UserError(
            f"analyse landscape --points {points}: give an odd number, so that one of the points "
            "is the model."
        )
    seed = _number(options, "directions", 0)
    from fl_lightning.lab.analysis import plots
    from fl_lightning.lab.analysis.landscape import landscape
    from fl_lightning.lab.analysis.opened import opened

    # Open all runs before measuring the first, so that a mistake in the second is reported at once.
    runs = [opened(path) for path in options.runs]
    landscapes = [landscape(run, points, reach, samples, seed) for run in runs]
    steps = landscapes[0].steps.tolist()
    # Each row of the table is one point of the plane.
    rows: list[list[Any]] = [["run", "a", "b", "loss"]]
    described = []
    lines = []
    for one in landscapes:
        losses = [list(map(finite, row)) for row in one.losses.tolist()]
        for i, j in np.ndindex(one.losses.shape):
            rows.append([str(one.run.folder), steps[i], steps[j], losses[i][j]])
        described.append(
            {
                "run": str(one.run.folder),
                "checkpoint": str(one.run.checkpoint),
                "rounds": one.run.rounds,
                "loss": one.loss,
                "samples": one.samples,
                "losses": losses,
            }
        )
        lines.append(f"{one.run.folder}: loss {one.loss:.6g} on {one.samples:,} samples")
    whole = {"directions": seed, "normalised": "filter", "steps": steps, "runs": described}
    return whole, rows, plots.landscapes(landscapes), lines


def finite(value: Any) -> Any:
    """Return a number, or None for one that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(options: Namespace, name: str, least: int, whole: bool = True) -> Any:
    text = getattr(options, name)
    kind: Callable[[str], Any] = int if whole else float
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or value < least or (not whole and not 0 < value < math.inf):
        accepted = f"a whole number of at least {least}" if whole else "a number above 0"
        other = " or all" if name == "samples" else ""
        raise UserError(f"analyse --{name} {text}: give {accepted}{other}.")
    return value
