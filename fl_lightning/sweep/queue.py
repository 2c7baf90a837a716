"""Runs through their states, several at once: each is started once, watched to its end, and written down."""

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

_LOOK = 0.05  # seconds between two looks at the workers


class Queue:
    """Runs what waits in ``states``, a run in each place at a time.

    Args:
        states: of every run; kept up to date, and in ``listed`` (a folder's runs.csv) where that is given.
        places: one a worker.
        claims_hash: that each run records.
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
        self.states, self.claims_hash, self.table, self.listed = states, claims_hash, table, listed
        self._free = list(reversed(places))
        self._workers: dict[int, tuple[Run, Place]] = {}
        self.stopped: int | None = None  # the signal that asked to stop
        self._told = False

    def run(self, hold: Sequence[str] = ()) -> None:
        """Until nothing waits but the arms to ``hold``, or a signal asked to stop and the workers have ended."""
        before = {
            number: signal.signal(number, self._on_signal)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup stays nohup
        }
        waiting = [
            run for run, status in self.states.items() if status == WAITING and run.arm not in hold
        ]
        waiting.reverse()
        try:
            self._write()
            while self._workers or (waiting and self.stopped is None):
                while waiting and self._free and self.stopped is None:
                    self._start(waiting.pop())
                if not self._ended():
                    time.sleep(_LOOK)
                if self.stopped is not None and not self._told:
                    self._told = True
                    self._signal(signal.SIGTERM)
                self.table.show(self.states)
        finally:
            self._signal(signal.SIGKILL)  # none is left, unless this ends by an error
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            self.table.show(self.states, last=True)

    def _start(self, run: Run) -> None:
        place = self._free.pop()
        self.states[run] = RUNNING
        self._write()  # before the fork: a run that runs.csv does not know of was not started
        self._workers[start(run, place, self.claims_hash)] = (run, place)

    def _ended(self) -> bool:
        ended = False
        for pid in list(self._workers):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                run, place = self._workers.pop(pid)
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # processes that a killed run has left
                self._free.append(place)
                code = os.waitstatus_to_exitcode(status)
                before_rounds = self.stopped is not None and -code in (
                    signal.SIGTERM,
                    signal.SIGINT,
                    signal.SIGHUP,
                )
                # nothing was lost
                self.states[run] = WAITING if before_rounds else outcome(run, code)
                self.table.tell(run, self.states)
                ended = True
        if ended:
            self._write()
        return ended

    def _write(self) -> None:
        if self.listed is not None:
            files.write_states(self.listed, self.states)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stopped is not None and number == signal.SIGINT:  # a second Ctrl-C
            self._signal(signal.SIGKILL)
        elif self.stopped is None:
            os.write(
                2, f"\n{signal.Signals(number).name}: stopping each run after its round\n".encode()
            )
        self.stopped = self.stopped or number

    def _signal(self, number: int) -> None:
        for pid in list(self._workers):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def outcome(run: Run, code: int) -> str:
    """The state of a run whose process ended with ``code`` (minus the signal's number, where one killed it)."""
    status = files.record(run).get("status")
    if code == 0 and status in ("running", None):
        files.set_status(run, DONE)  # killed after its last round: there was nothing left to do
        return DONE
    if code == 3 or status == DIVERGED:
        return DIVERGED
    if code == 0 and status == DONE:
        return DONE
    # else what an earlier process of it wrote
    if status == "stopped" and (code == 0 or code > 128):
        return WAITING
    if status == "running":
        files.set_status(run, FAILED)
    return FAILED
