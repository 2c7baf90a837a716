"""``fl-lightning sweep FILE``: reads the grid, runs what is not done yet, says what came of it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.cli.arguments import ArgumentParser
from fl_lightning.errors import UserError
from fl_lightning.storage.files import named
from fl_lightning.sweep.folder import DIVERGED, DONE, FAILED, WAITING, read_states, standing
from fl_lightning.sweep.grid import Run
from fl_lightning.sweep.spec import read_spec
from fl_lightning.sweep.sweep import Sweep
from fl_lightning.sweep.table import counts

DESCRIPTION = """Run a grid of settings and seeds, several runs at once.

FILE is YAML (configs, fixed, grid, select, claims), or the name of a packaged sweep. Each run is an ordinary run's
folder, <out>/<arm>/seed-<s>; <out>/runs.csv says how each stands. The same command again goes on where it stopped:
what is done stays, what was killed or failed goes on from its last checkpoint."""


def parser() -> ArgumentParser:
    """What the command takes."""
    hint = "Options of the runs are given as key=value, such as trainer.max_epochs=3."
    made = ArgumentParser("sweep", DESCRIPTION, hint)
    made.add_argument("file", metavar="FILE", help="the sweep, a YAML file or a packaged name")
    made.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="over what is fixed, or the values of an axis of the grid",
    )
    made.add_argument(
        "--jobs",
        type=int,
        metavar="N",
        help="runs at once (default: one a GPU, without GPUs one a core)",
    )
    made.add_argument(
        "--out", type=named, metavar="DIR", help="the sweep's folder (default: runs/<FILE's name>)"
    )
    made.add_argument(
        "--dry_run", action="store_true", help="list what would run, as commands, and do nothing"
    )
    made.add_argument(
        "--slurm",
        metavar="SCRIPT",
        help="write a SLURM array script instead of running; -: print it",
    )
    made.add_argument(
        "--run",
        metavar="PLACE",
        help="do one run here, such as fedavg/seed-0 (what the script does)",
    )
    return made


def main(argv: Sequence[str]) -> int:
    """Run the sweep that ``argv`` asks for; 0 all done, 1 a run failed or waits, 3 one diverged, 128 + n by signal n.

    Raises:
        UserError: what is to mend; nothing was trained then.
    """
    try:
        given = parser().parse_intermixed_args(list(argv))
    except SystemExit as asked:  # --help
        return int(asked.code or 0)
    if given.jobs is not None and given.jobs < 1:
        raise UserError(f"sweep --jobs {given.jobs}: give how many runs go at once, at least 1.")
    spec = read_spec(given.file, given.overrides)
    sweep = Sweep(spec, given.out or Path("runs") / spec.stem)
    if given.dry_run:
        _list(sweep)
        return 0
    if os.getcwd() not in sys.path:
        # so that `my_learner.Lit` in the current directory is found
        sys.path.insert(0, os.getcwd())
    if given.run is not None:
        return sweep.run_one(given.run)
    if given.slurm is not None:
        command = [
            "fl-lightning",
            "sweep",
            given.file,
            *given.overrides,
            "--out",
            str(sweep.folder),
        ]
        _write_script(given.slurm, sweep.slurm(command), sweep)
        return 0
    stopped = sweep.run(given.jobs)
    states = sweep.states
    _conclude(sweep)
    if stopped is not None:
        return 128 + stopped
    if set(states.values()) & {FAILED, WAITING} or sweep.undecided:
        return 1
    return 3 if DIVERGED in states.values() else 0


def _list(sweep: Sweep) -> None:
    before = read_states(sweep.folder)
    groups: list[tuple[str, list[Run]]] = [("", sweep.listed())]
    if sweep.candidates:
        groups.insert(
            0,
            (" to select from", [run for candidate in sweep.candidates for run in candidate.runs]),
        )
    for what, its_runs in groups:
        states = {run: standing(run, before) for run in its_runs}
        told = ", ".join(f"{number} {status}" for status, number in counts(states).items())
        print(f"{sweep.folder}: {len(states)} runs{what} ({told})")
        for run, status in states.items():
            if status not in (DONE, DIVERGED):
                print(f"  {status:<8} fl-lightning fit {shlex.join(run.argv)}")
    if sweep.candidates:
        options = dict.fromkeys(key for each in sweep.candidates for key in each.choice)
        print(f"  each with the choice of its arm: {', '.join(options)}")


def _conclude(sweep: Sweep) -> None:
    failed = [run for run, status in sweep.states.items() if status == FAILED]
    for run in failed:
        print(f"failed: {run.place} (what it said: {run.folder / 'log.txt'})")
    for arm in sweep.undecided:
        print(
            f"waiting: {arm} has chosen nothing, because not all of its runs under {sweep.folder / 'select'} ended well"
        )
    if failed or sweep.undecided or WAITING in sweep.states.values():
        print("the same command goes on with what is not done")
    print(f"→ {sweep.folder} (fl-lightning report {sweep.folder} compares the arms)")


def _write_script(target: str, text: str, sweep: Sweep) -> None:
    if target == "-":
        print(text, end="")
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"sweep --slurm {target}: cannot be written ({error.strerror}). Give another file."
        ) from None
    print(f"→ {target}: sbatch {target}")
    if sweep.selecting:
        print("it selects; the same command afterwards writes the script of the sweep's own runs")
