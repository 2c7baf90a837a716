"""Takes runs through their states, several at once: each is started, watched to its end, recorded,
and shown in one table.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType

from fl_lightning.lab.sweep import sweep_folder as files
from fl_lightning.lab.sweep.grid import PlannedRun
from fl_lightning.lab.sweep.sweep_folder import DIVERGED, DONE, FAILED, RUNNING, WAITING
from fl_lightning.lab.sweep.workers import STOPPING, Place, start
from fl_lightning.metrics import read_record

# Seconds between two checks of the workers.
_LOOK = 0.05
DIFFERENT_METRICS = (
    "  The arms show different metrics, which you cannot compare: val/… measures the server's "
    "model, clients/… the models that clients use, on their own samples."
)


class ProgressTable:
    """A table with a row per arm and a cell per seed.

    Args:
        title: first line, such as the sweep's folder.
        metric: metric whose newest value is shown first; None: the metrics that each run shows, or
            ``val/acc``.
    """

    def __init__(self, title: str, metric: str | None) -> None:
        self.title = title
        self.metric = metric
        self._began = time.monotonic()

    def tell(self, run: PlannedRun, states: Mapping[PlannedRun, str]) -> None:
        """Report that ``run`` has ended."""
        text = states[run]
        if text == DONE:
            values = ", ".join(f"{name} {value}" for name, value in self._newest(run).items())
            text = f"{text}, {values}" if values else text
        elif text == FAILED and (why := files.why_failed(run)):
            text = f"{text}, {why}"
        ended = sum(state not in (WAITING, RUNNING) for state in states.values())
        print(f"{run.place}: {text} ({ended} of {len(states)})", flush=True)

    def lines(self, states: Mapping[PlannedRun, str]) -> list[str]:
        """Return the table, line by line."""
        seconds = int(time.monotonic() - self._began)
        numbers = ", ".join(f"{number} {status}" for status, number in counts(states).items())
        done = {run: self._newest(run) for run, status in states.items() if status == DONE}
        shown = {tuple(values) for values in done.values() if values}
        # An arm that shows other metrics than the rest names them in each cell.
        title = ", ".join(next(iter(shown))) if len(shown) == 1 else self.metric or "val/acc"
        cells: dict[str, dict[int, str]] = {}
        for run, status in states.items():
            text = "·" if status == WAITING else status
            if run in done:
                named = done[run].items()
                texts = [f"{name} {value}" if len(shown) > 1 else value for name, value in named]
                text = ", ".join(texts) or status
            elif status == WAITING and (rounds := files.progress(run, "round")[0]):
                text = f"stopped after round {rounds - 1}"
            cells.setdefault(run.place.rpartition("/")[0], {})[run.seed] = text
        seeds = list(dict.fromkeys(run.seed for run in states))
        grid = [["" if len(shown) > 1 else title, *(f"seed {seed}" for seed in seeds)]]
        for arm, of_seeds in cells.items():
            grid.append([arm, *(of_seeds.get(seed, "") for seed in seeds)])
        notes = [] if len(shown) <= 1 else [DIFFERENT_METRICS]
        clock = f"{seconds // 60:02d}:{seconds % 60:02d}"
        return ["", f"{self.title}: {numbers} · {clock}", *_aligned(grid), *notes, ""]

    def _newest(self, run: PlannedRun) -> dict[str, str]:
        """Return a done run's newest values of the metrics that it shows."""
        first = [self.metric] if self.metric else []
        values = {}
        for name in dict.fromkeys([*first, *files.shown_of(run)] or ["val/acc"]):
            value = files.progress(run, name)[1]
            if value is not None:
                values[name] = f"{value:.4f}"
        return values


def _aligned(grid: list[list[str]]) -> list[str]:
    """Return the rows as lines: names on the left, cells on the right of their columns."""
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = []
    for name, *cells in grid:
        texts = [name.ljust(widths[0])]
        for cell, width in zip(cells, widths[1:], strict=True):
            texts.append(cell.rjust(width))
        lines.append(("  " + "  ".join(texts)).rstrip())
    return lines


def counts(states: Mapping[PlannedRun, str]) -> dict[str, int]:
    """Return how many runs are in each state, without states that no run has."""
    order = (DONE, RUNNING, WAITING, DIVERGED, FAILED)
    values = list(states.values())
    return {status: values.count(status) for status in order if status in values}


class Queue:
    """The runs that wait in ``states``, with one run in each place at a time.

    Args:
        states: states of all runs, which are updated here, and in ``listed`` if it is given.
        places: one per worker.
        claims_hash: recorded by each run.
        table: prints the progress.
        listed: folder of runs.csv.
        metric: metric that every run has to log; the first that ends without it stops the others.
    """

    def __init__(
        self,
        states: dict[PlannedRun, str],
        places: list[Place],
        claims_hash: str | None,
        table: ProgressTable,
        listed: Path | None,
        metric: str | None = None,
    ) -> None:
        self.states = states
        self.claims_hash = claims_hash
        self.table = table
        self.listed = listed
        self.metric = metric
        # Places are taken from the end of the list.
        self._free = list(reversed(places))
        self._workers: dict[ForkProcess, tuple[PlannedRun, Place]] = {}
        # The signal that asked the sweep to stop.
        self.stopped: int | None = None
        self._workers_know = False
        # The run that ended without the metric.
        self.without_metric: PlannedRun | None = None

    def run(self, hold: Sequence[str] = ()) -> None:
        """Run until no run waits, except those of the arms to ``hold``.

        A signal that asks to stop also ends it, when the workers have ended.
        """
        handlers = {}
        for number in STOPPING:
            # A signal that nohup has made this process ignore stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                handlers[number] = signal.signal(number, self._on_signal)
        waiting = [run for run, status in self.states.items() if status == WAITING]
        waiting = [run for run in reversed(waiting) if run.arm not in hold]
        for run in self.states:
            self._check_metric(run)
        try:
            self._write()
            while self._workers or (waiting and self._may_train):
                while waiting and self._free and self._may_train:
                    self._start(waiting.pop())
                # Wake up now and then, because a signal may have asked to stop.
                wait([worker.sentinel for worker in self._workers], timeout=_LOOK)
                self._take_ended()
                # The handler only notes the signal; workers get it here, also one that has just
                # started.
                if not (self._workers_know or self._may_train):
                    self._workers_know = True
                    for worker in self._workers:
                        worker.terminate()
        finally:
            # No worker is left, unless this ends with an error.
            self._kill()
            for number, handler in handlers.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            print("\n".join(self.table.lines(self.states)), flush=True)

    @property
    def _may_train(self) -> bool:
        """Return whether the runs that have started may go on."""
        return self.stopped is None and self.without_metric is None

    def _start(self, run: PlannedRun) -> None:
        place = self._free.pop()
        self.states[run] = RUNNING
        # Write runs.csv before the fork, so that every run that was started is in it.
        self._write()
        self._workers[start(run, place, self.claims_hash)] = (run, place)

    def _take_ended(self) -> None:
        for worker in list(self._workers):
            code = worker.exitcode
            if code is None or worker.pid is None:
                continue
            run, place = self._workers.pop(worker)
            # A run that was killed may have left processes of its own.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)
            self._free.append(place)
            # A run that was stopped before it handled signals has lost nothing, so it waits again.
            unbegun = not self._may_train and -code in STOPPING
            self.states[run] = WAITING if unbegun else outcome(run, code)
            self._check_metric(run)
            self.table.tell(run, self.states)
            self._write()

    def _check_metric(self, run: PlannedRun) -> None:
        if self.metric is None or self.states[run] != DONE:
            return
        _, value = files.progress(run, self.metric)
        if value is None:
            self.without_metric = run

    def _write(self) -> None:
        if self.listed is not None:
            files.write_states(self.listed, self.states)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C does not wait for the end of rounds.
        if self.stopped is not None and number == signal.SIGINT:
            self._kill()
        elif self.stopped is None:
            name = signal.Signals(number).name
            os.write(2, f"\n{name}: stopping each run after its round\n".encode())
        self.stopped = self.stopped or number

    def _kill(self) -> None:
        for worker in list(self._workers):
            worker.kill()


def outcome(run: PlannedRun, code: int) -> str:
    """Return the state of a run whose process ended with ``code``.

    If a signal killed it, the code is minus the signal's number.
    """
    status = read_record(run.folder).get("status")
    if code == 0 and status in ("running", None):
        # The run was killed after its last round, so it had nothing left to do.
        files.set_status(run, DONE)
        return DONE
    if code == 3 or status == DIVERGED:
        return DIVERGED
    if code == 0 and status == DONE:
        return DONE
    # If the exit code says otherwise, an earlier process of the run wrote "stopped".
    if status == "stopped" and (code == 0 or code > 128):
        return WAITING
    if status == "running":
        files.set_status(run, FAILED)
    return FAILED
