"""Runs through their states, several at once: each is started, watched to its end, written down."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from fl_lightning.sweep import folder as files
from fl_lightning.sweep.folder import DIVERGED, DONE, FAILED, RUNNING, WAITING
from fl_lightning.sweep.grid import Run
from fl_lightning.sweep.table import Table
from fl_lightning.sweep.workers import Place, start

# Seconds between two looks at the workers.
_LOOK = 0.05
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Queue:
    """The runs that wait in ``states``, a run in each place at a time.

    Args:
        states: of every run; kept up to date, and in ``listed`` where that is given.
        places: one a worker.
        claims_hash: recorded by each run.
        table: shows how it goes.
        listed: folder of runs.csv.
    """

    def __init__(
        self,
        states: dict[Run, str],
        places: list[Place],
        claims_hash: str | None,
        table: Table,
        listed: Path | None,
    ) -> None:
        self.states = states
        self.claims_hash = claims_hash
        self.table = table
        self.listed = listed
        # They are taken from the end.
        self._free = list(reversed(places))
        self._workers: dict[int, tuple[Run, Place]] = {}
        # The signal that asked to stop.
        self.stopped: int | None = None
        self._workers_know = False

    def run(self, hold: Sequence[str] = ()) -> None:
        """Run until nothing waits but the arms to ``hold``.

        A signal that asks to stop ends it too, when the workers have ended.
        """
        handlers = {}
        for number in _STOPPING:
            # What nohup has told this process to ignore stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                handlers[number] = signal.signal(number, self._on_signal)
        waiting = [run for run, status in self.states.items() if status == WAITING]
        waiting = [run for run in reversed(waiting) if run.arm not in hold]
        try:
            self._write()
            while self._workers or (waiting and self.stopped is None):
                while waiting and self._free and self.stopped is None:
                    self._start(waiting.pop())
                if not self._ended():
                    time.sleep(_LOOK)
                # The handler only notes the signal: a worker that starts meanwhile is told here.
                if self.stopped is not None and not self._workers_know:
                    self._workers_know = True
                    self._signal(signal.SIGTERM)
                self.table.show(self.states)
        finally:
            # No worker is left, unless this ends by an error.
            self._signal(signal.SIGKILL)
            for number, handler in handlers.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            self.table.show(self.states, last=True)

    def _start(self, run: Run) -> None:
        place = self._free.pop()
        self.states[run] = RUNNING
        # It comes before the fork: a run that runs.csv does not know of was not started.
        self._write()
        self._workers[start(run, place, self.claims_hash)] = (run, place)

    def _ended(self) -> bool:
        some_ended = False
        for pid in list(self._workers):
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                run, place = self._workers.pop(pid)
                # A run that was killed may have left processes of its own.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                self._free.append(place)
                code = os.waitstatus_to_exitcode(status)
                # A run that was stopped before it handled signals has lost nothing: it waits again.
                unbegun = self.stopped is not None and -code in _STOPPING
                self.states[run] = WAITING if unbegun else outcome(run, code)
                self.table.tell(run, self.states)
                some_ended = True
        if some_ended:
            self._write()
        return some_ended

    def _write(self) -> None:
        if self.listed is not None:
            files.write_states(self.listed, self.states)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C does not wait for the end of rounds.
        if self.stopped is not None and number == signal.SIGINT:
            self._signal(signal.SIGKILL)
        elif self.stopped is None:
            name = signal.Signals(number).name
            os.write(2, f"\n{name}: stopping each run after its round\n".encode())
        self.stopped = self.stopped or number

    def _signal(self, number: int) -> None:
        for pid in list(self._workers):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def outcome(run: Run, code: int) -> str:
    """The state of a run whose process ended with ``code``.

    Where a signal killed it, the code is minus the signal's number.
    """
    status = files.record(run).get("status")
    if code == 0 and status in ("running", None):
        # It was killed after its last round, so there was nothing left to do.
        files.set_status(run, DONE)
        return DONE
    if code == 3 or status == DIVERGED:
        return DIVERGED
    if code == 0 and status == DONE:
        return DONE
    # A "stopped" beside another code was written by an earlier process of the run.
    if status == "stopped" and (code == 0 or code > 128):
        return WAITING
    if status == "running":
        files.set_status(run, FAILED)
    return FAILED
