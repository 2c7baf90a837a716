"""``fl-lightning sweep FILE`` reads the grid, runs the runs that are not done, and prints the
results.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.introspection.accepted import PositiveInt, check
from fl_lightning.lab.cli.arguments import ArgumentParser
from fl_lightning.lab.sweep.grid import PlannedRun
from fl_lightning.lab.sweep.run_queue import counts
from fl_lightning.lab.sweep.sweep import Sweep
from fl_lightning.lab.sweep.sweep_file import read_spec
from fl_lightning.lab.sweep.sweep_folder import (
    DIVERGED,
    DONE,
    FAILED,
    WAITING,
    check_claims,
    read_states,
    standing,
)
from fl_lightning.storage.atomic_files import named, written_aside

DESCRIPTION = """Run a grid of settings and seeds, several runs at once.

FILE is YAML (configs, fixed, grid, select, claims), or the name of a packaged sweep. Each run is an
ordinary run's folder, <out>/<arm>/seed-<s>; <out>/runs.csv says how each stands. The same command
again goes on where it stopped: what is done stays, what was killed or failed goes on from its last
checkpoint."""


def parser() -> ArgumentParser:
    """Return the parser of the command's arguments."""
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
    """Run the sweep that ``argv`` asks for.

    Return 0 when all is done, 1 when a run failed or waits, 3 when one diverged, and 128 + n when
    signal n stopped it.

    Raises:
        UserError: the user has to correct something; nothing was trained.
    """
    options = parser().parse_intermixed_args(list(argv))
    check("sweep --jobs", options.jobs, PositiveInt | None)
    spec = read_spec(options.file, options.overrides)
    sweep = Sweep(spec, options.out or Path("runs") / spec.stem)
    if options.dry_run:
        _list(sweep)
        return 0
    if os.getcwd() not in sys.path:
        # Python has to find the user's `my_learner.Lit` in the current directory.
        sys.path.insert(0, os.getcwd())
    if options.run is not None:
        return sweep.run_one(options.run)
    if options.slurm is not None:
        head = ["fl-lightning", "sweep", options.file, *options.overrides]
        script = sweep.slurm([*head, "--out", str(sweep.folder)])
        _write_script(options.slurm, script, sweep)
        return 0
    signal_number = sweep.run(options.jobs)
    states = sweep.states
    _conclude(sweep)
    if signal_number is not None:
        return 128 + signal_number
    if set(states.values()) & {FAILED, WAITING} or sweep.undecided:
        return 1
    return 3 if DIVERGED in states.values() else 0


def _list(sweep: Sweep) -> None:
    check_claims(sweep.spec, sweep.arms)
    print(f"arms: {', '.join(arm.name for arm in sweep.arms)}")
    listed_states = read_states(sweep.folder)
    if sweep.candidates:
        _list_runs(sweep, " to select from", sweep.measuring, listed_states)
    _list_runs(sweep, "", sweep.listed(), listed_states)
    if sweep.candidates:
        options: dict[str, Any] = {}
        for candidate in sweep.candidates:
            options |= candidate.whole
        print(f"  each with the choice of its arm: {', '.join(options)}")
    if sweep.note:
        print(sweep.note)


def _list_runs(
    sweep: Sweep, purpose: str, runs: Sequence[PlannedRun], listed_states: Mapping[str, str]
) -> None:
    states = {run: standing(run, listed_states) for run in runs}
    numbers = ", ".join(f"{number} {status}" for status, number in counts(states).items())
    print(f"{sweep.folder}: {len(states)} runs{purpose} ({numbers})")
    for run, status in states.items():
        if status not in (DONE, DIVERGED):
            print(f"  {status:<8} fl-lightning fit {shlex.join(run.argv)}")


def _conclude(sweep: Sweep) -> None:
    failed = [run for run, status in sweep.states.items() if status == FAILED]
    for run in failed:
        print(f"failed: {run.place} (what it said: {run.folder / 'log.txt'})")
    for arm in sweep.undecided:
        print(
            f"no choice: the candidates of {arm}, or of the arm that it comes after, did not end, "
            "diverged, or have a score that is not finite. So the arm's own runs are not made. "
            f"See {sweep.folder / 'select'}"
        )
    waiting = [run for run, status in sweep.states.items() if status == WAITING]
    if failed or sweep.trying or any(run.arm not in sweep.undecided for run in waiting):
        print("the same command goes on with what is not done")
    report = ""
    if DONE in sweep.states.values():
        report = f" (fl-lightning report {sweep.folder} compares the arms)"
    print(f"→ {sweep.folder}{report}")


def _write_script(target: str, text: str, sweep: Sweep) -> None:
    if target == "-":
        print(text, end="")
        return
    with written_aside(named(target)) as file:
        file.write(text.encode())
    print(f"→ {target}: sbatch {target}")
    if sweep.selecting:
        print("it selects; the same command afterwards writes the next script")
