"""The progress of a sweep as one table, with a row per arm and a cell per seed."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping

from fl_lightning.lab.sweep.grid import PlannedRun
from fl_lightning.lab.sweep.sweep_folder import (
    DIVERGED,
    DONE,
    FAILED,
    RUNNING,
    WAITING,
    progress,
    shown_of,
    why_failed,
)

# Seconds between two reads of the runs' files.
_EVERY = 1.0


class ProgressTable:
    """A table that is redrawn in a terminal.

    Elsewhere it prints a line for each run that ends, and the table at the end.

    Args:
        title: first line, such as the sweep's folder.
        metric: metric whose newest value is shown first; None: the metrics that each run shows, or
            ``val/acc``.
        rounds: number of rounds of each run, by its place.
    """

    def __init__(self, title: str, metric: str | None, rounds: Mapping[str, int | None]) -> None:
        self.title = title
        self.metric = metric
        self.rounds = rounds
        self._live = sys.stdout.isatty()
        self._lines_drawn = 0
        self._next = 0.0
        self._began = time.monotonic()
        # metric → text, for each run that has ended.
        self._values: dict[PlannedRun, dict[str, str]] = {}

    def show(self, states: Mapping[PlannedRun, str], last: bool = False) -> None:
        """Draw it, if enough time has passed."""
        if not last and (not self._live or time.monotonic() < self._next):
            return
        self._next = time.monotonic() + _EVERY
        lines = self.lines(states, last)
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            lines = [line[:width] for line in lines]
        self._clear()
        print("\n".join(lines), flush=True)
        self._lines_drawn = 0 if last else len(lines)

    def tell(self, run: PlannedRun, states: Mapping[PlannedRun, str]) -> None:
        """Report that ``run`` has ended."""
        self._values.pop(run, None)
        status = states[run]
        # A terminal shows in the table how runs end, but not why one failed.
        if self._live and status != FAILED:
            return
        text = ""
        if status == DONE:
            text = ", ".join(f"{name} {value}" for name, value in self._newest(run).items())
        elif status == FAILED:
            text = why_failed(run)
        ended = sum(state not in (WAITING, RUNNING) for state in states.values())
        self._clear()
        self._lines_drawn = 0
        text = f"{status}, {text}" if text else status
        print(f"{run.place}: {text} ({ended} of {len(states)})", flush=True)

    def leave(self) -> None:
        """Leave what is drawn where it is; it is drawn again below."""
        self._lines_drawn = 0

    def _clear(self) -> None:
        if self._lines_drawn:
            # Move up by this number of lines, and clear everything below.
            print(f"\x1b[{self._lines_drawn}F\x1b[J", end="")

    def lines(self, states: Mapping[PlannedRun, str], last: bool = False) -> list[str]:
        """Return the table, line by line; the last one also has the rounds of stopped runs."""
        seconds = int(time.monotonic() - self._began)
        numbers = ", ".join(f"{number} {status}" for status, number in counts(states).items())
        done = [self._newest(run) for run, status in states.items() if status == DONE]
        shown = {tuple(values) for values in done if values}
        # An arm that shows other metrics than the rest names them in each cell.
        names: list[str] = list(*shown) if len(shown) == 1 else []
        cells: dict[str, dict[int, str]] = {}
        for run, status in states.items():
            arm = run.place.rpartition("/")[0]
            cells.setdefault(arm, {})[run.seed] = self._cell(run, status, names, last)
        seeds = list(dict.fromkeys(run.seed for run in states))
        title = ", ".join(names) if shown else self.metric or "val/acc"
        head = [title, *(f"seed {seed}" for seed in seeds)]
        grid = [head]
        for arm, of_seeds in cells.items():
            grid.append([arm, *(of_seeds.get(seed, "") for seed in seeds)])
        clock = f"{seconds // 60:02d}:{seconds % 60:02d}"
        return ["", f"{self.title}: {numbers} · {clock}", *_aligned(grid), ""]

    def _newest(self, run: PlannedRun) -> dict[str, str]:
        """Return a done run's newest values of the metrics that it shows."""
        if run not in self._values:
            first = [self.metric] if self.metric else []
            names = dict.fromkeys([*first, *shown_of(run)] or ["val/acc"])
            values = {}
            for name in names:
                value = progress(run, name)[1]
                if value is not None:
                    values[name] = f"{value:.4f}"
            self._values[run] = values
        return self._values[run]

    def _cell(self, run: PlannedRun, status: str, names: list[str], last: bool) -> str:
        """Return a done run's values, the round of a running one, or the state.

        Without ``names`` each value has its metric's name next to it. ``last``: a waiting run that
        has begun shows its round, too.
        """
        if status == RUNNING or (status == WAITING and last):
            done = progress(run, "round")[0]
            if status == WAITING:
                return f"stopped after round {done - 1}" if done else "·"
            rounds = self.rounds.get(run.place)
            return f"{done}/{rounds}" if rounds else f"round {done}"
        if status == DONE:
            values = self._newest(run)
            if not names:
                return ", ".join(f"{name} {value}" for name, value in values.items()) or "done"
            return ", ".join(values[name] for name in names if name in values) or "done"
        return "·" if status == WAITING else status


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
