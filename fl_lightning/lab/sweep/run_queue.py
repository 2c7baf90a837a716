"""Takes runs through their states, several at once: each is started, watched to its end, and
recorded.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from shutil import disk_usage
from types import FrameType

from fl_lightning.lab.sweep import sweep_folder as files
from fl_lightning.lab.sweep.grid import PlannedRun
from fl_lightning.lab.sweep.progress_table import ProgressTable
from fl_lightning.lab.sweep.sweep_folder import DIVERGED, DONE, FAILED, RUNNING, WAITING
from fl_lightning.lab.sweep.workers import STOPPING, Place, start
from fl_lightning.metrics import read_record

# Seconds between two checks of the workers.
_LOOK = 0.05
# If a run fails while its disk has less room than this, the next runs would fail too.
_LEAST_ROOM = 64 * 2**20


class Queue:
    """The runs that wait in ``states``, with one run in each place at a time.

    Args:
        states: states of all runs, which are updated here, and in ``listed`` if it is given.
        places: one per worker.
        claims_hash: recorded by each run.
        table: table that shows the progress.
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
        # The folder of a run that failed because its disk is full.
        self.full: Path | None = None
        # The run that ended without the metric.
        self.without_metric: PlannedRun | None = None

    def run(self, hold: Sequence[str] = ()) -> None:
        """Run until no run waits, except those of the arms to ``hold``.

        A signal that asks to stop also ends it, when the workers have ended. So does a disk without
        room, on which a run has failed.
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
            while self._workers or (waiting and self._goes_on):
                while waiting and self._free and self._goes_on:
                    self._start(waiting.pop())
                # Wake up now and then, because a signal may have asked to stop.
                wait([worker.sentinel for worker in self._workers], timeout=_LOOK)
                self._take_ended()
                # The handler only notes the signal; workers get it here, also one that has just
                # started.
                if not (self._workers_know or self._may_train):
                    self._workers_know = True
                    # The terminal has moved on by the lines of the signal.
                    self.table.leave()
                    for worker in self._workers:
                        worker.terminate()
                self.table.show(self.states)
        finally:
            # No worker is left, unless this ends with an error.
            self._kill()
            for number, handler in handlers.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            self.table.show(self.states, last=True)
        if self.full is not None and waiting:
            print(
                f"{len(waiting)} runs were not started, because the disk of {self.full} is full. "
                "Make room there, and give the same command again: it goes on from here."
            )

    @property
    def _goes_on(self) -> bool:
        """Return whether more runs may start."""
        return self._may_train and self.full is None

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
            if self.states[run] == FAILED and disk_usage(run.folder).free < _LEAST_ROOM:
                self.full = run.folder
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
