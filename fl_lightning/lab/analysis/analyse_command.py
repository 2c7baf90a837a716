"""``fl-lightning analyse hessian RUN`` and ``analyse landscape RUN [RUN2]``."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import (
    AtLeast,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check,
)
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
    for name, (kind, default, words) in _OPTIONS.items():
        made.add_argument(
            f"--{name}", type=kind, default=default, help=f"{words} (default: %(default)s)"
        )
    return made


def _samples(text: str) -> int | None:
    return None if text == "all" else int(text)


# Option → its type, its default, and what it is.
_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "samples": (
        _samples,
        2000,
        "number of the clients' samples, drawn by the run's seed, or all",
    ),
    "tolerance": (float, 1e-3, "hessian: relative tolerance of the eigenvalue"),
    "probes": (int, 100, "hessian: number of random vectors for the trace"),
    "points": (
        int,
        21,
        "landscape: points per side; an even number gets one more, so that one is the model",
    ),
    "range": (
        float,
        1.0,
        "landscape: distance from the model to each side, in norms of the model's filters",
    ),
    "directions": (int, 0, "landscape: seed of the directions"),
}
_ACCEPTED: dict[str, Any] = {
    "samples": PositiveInt | None,
    "tolerance": PositiveFloat,
    "probes": Annotated[int, AtLeast(2)],
    "points": Annotated[int, AtLeast(3)],
    "range": PositiveFloat,
    "directions": NonNegativeInt,
}


def main(argv: Sequence[str]) -> int:
    """Run the command with ``argv``, print the place of its files, and return 0.

    Raises:
        UserError: the user has to correct something; nothing has been written.
    """
    options = parser().parse_args(list(argv))
    for name, hint in _ACCEPTED.items():
        check(f"analyse --{name}", getattr(options, name), hint)
    # One of the points is the model.
    options.points += 1 - options.points % 2
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
    whole, rows, picture, lines = measure(options)
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


def _hessian(options: Namespace) -> Result:
    from fl_lightning.evaluation.curvature import Hessian, measure_with_vector
    from fl_lightning.lab.analysis import plots
    from fl_lightning.lab.analysis.landscape import along_top
    from fl_lightning.lab.analysis.opened import opened

    run = opened(options.runs[0])
    # Second derivatives in half precision would be mostly rounding error.
    evaluator = run.evaluator(exact=True)
    subset = run.samples(options.samples, "hessian")
    hessian = Hessian(evaluator, run.vector, subset)
    curvature, vector = measure_with_vector(hessian, options.tolerance, options.probes, run.seed)
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
        "tolerance": options.tolerance,
        "probes": options.probes,
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


def _landscape(options: Namespace) -> Result:
    from fl_lightning.lab.analysis import plots
    from fl_lightning.lab.analysis.landscape import landscape
    from fl_lightning.lab.analysis.opened import opened

    # Open all runs before measuring the first, so that a mistake in the second is reported at once.
    runs = [opened(path) for path in options.runs]
    given = (options.points, options.range, options.samples, options.directions)
    landscapes = [landscape(run, *given) for run in runs]
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
    whole = {
        "directions": options.directions,
        "normalised": "filter",
        "steps": steps,
        "runs": described,
    }
    return whole, rows, plots.landscapes(landscapes), lines


def finite(value: Any) -> Any:
    """Return a number, or None for one that JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
