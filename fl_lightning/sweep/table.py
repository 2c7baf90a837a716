"""How a sweep goes, as one table: a row an arm, a cell a seed."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping

from fl_lightning.sweep.folder import (
    DIVERGED,
    DONE,
    FAILED,
    RUNNING,
    WAITING,
    progress,
    shown_of,
    why_failed,
)
from fl_lightning.sweep.grid import Run

_EVERY = 1.0  # seconds between two looks at the runs' files


class Table:
    """Drawn anew in a terminal; elsewhere a line for each run that ends, and the table at the end.

    Args:
        title: first line, such as the sweep's folder.
        metric: whose newest value is shown first; None: what each run is shown by, else ``val/acc``.
        rounds: asked of each run, by its place.
    """

    def __init__(self, title: str, metric: str | None, rounds: Mapping[str, int | None]) -> None:
        self.title, self.metric, self.rounds = title, metric, rounds
        self._live = sys.stdout.isatty()
        self._drawn = 0  # lines on the screen
        self._next = 0.0
        self._began = time.monotonic()
        self._values: dict[Run, dict[str, str]] = {}  # of runs that ended, by metric

    def show(self, states: Mapping[Run, str], last: bool = False) -> None:
        """Draw it, if it is time to."""
        if not last and (not self._live or time.monotonic() < self._next):
            return
        self._next = time.monotonic() + _EVERY
        lines = self.lines(states)
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            lines = [line[:width] for line in lines]
        self._clear()
        print("\n".join(lines), flush=True)
        self._drawn = 0 if last else len(lines)

    def tell(self, run: Run, states: Mapping[Run, str]) -> None:
        """Say that ``run`` has ended."""
        self._values.pop(run, None)
        status = states[run]
        if self._live and status not in (FAILED,):
            return
        over = sum(state not in (WAITING, RUNNING) for state in states.values())
        values = (
            ", ".join(f"{name} {value}" for name, value in self._told(run).items())
            if status == DONE
            else ""
        )
        text = why_failed(run) if status == FAILED else values
        self._clear()
        self._drawn = 0
        print(
            f"{run.place}: {status}{', ' if text else ''}{text} ({over} of {len(states)})",
            flush=True,
        )

    def _clear(self) -> None:
        if self._drawn:
            print(f"\x1b[{self._drawn}F\x1b[J", end="")

    def lines(self, states: Mapping[Run, str]) -> list[str]:
        """The table."""
        seconds = int(time.monotonic() - self._began)
        told = ", ".join(f"{number} {status}" for status, number in counts(states).items())
        rows: dict[str, dict[int, str]] = {}
        names = dict.fromkeys(
            name for run, status in states.items() if status == DONE for name in self._told(run)
        )
        for run, status in states.items():
            rows.setdefault(run.place.rpartition("/")[0], {})[run.seed] = self._cell(
                run, status, list(names)
            )
        seeds = list(dict.fromkeys(run.seed for run in states))
        head = [", ".join(names) or self.metric or "val/acc", *(f"seed {seed}" for seed in seeds)]
        grid = [
            head,
            *([arm, *(cells.get(seed, "") for seed in seeds)] for arm, cells in rows.items()),
        ]
        widths = [max(len(row[column]) for row in grid) for column in range(len(head))]
        body = [
            "  ".join(
                [
                    row[0].ljust(widths[0]),
                    *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
                ]
            ).rstrip()
            for row in grid
        ]
        return [
            "",
            f"{self.title}: {told} · {seconds // 60:02d}:{seconds % 60:02d}",
            *(f"  {line}" for line in body),
            "",
        ]

    def _told(self, run: Run) -> dict[str, str]:
        """A done run's newest values of what it is shown by."""
        if run not in self._values:
            first = [self.metric] if self.metric else []
            names = dict.fromkeys([*first, *shown_of(run)] or ["val/acc"])
            found = {name: progress(run, name)[1] for name in names}
            self._values[run] = {
                name: f"{value:.4f}" for name, value in found.items() if value is not None
            }
        return self._values[run]

    def _cell(self, run: Run, status: str, names: list[str]) -> str:
        """A done run's values of ``names``, the round of one that runs, or the state."""
        if status == RUNNING:
            done, rounds = progress(run, "round")[0], self.rounds.get(run.place)
            return f"{done}/{rounds}" if rounds else f"round {done}"
        if status == DONE:
            told = self._told(run)
            return ", ".join(told.get(name, "–") for name in names) if told else "done"
        return "·" if status == WAITING else status


def counts(states: Mapping[Run, str]) -> dict[str, int]:
    """How many runs are in each state, those that none is in left out."""
    order = (DONE, RUNNING, WAITING, DIVERGED, FAILED)
    values = list(states.values())
    return {status: values.count(status) for status in order if status in values}
