"""The choices of sweeps before their runs, from their select.csv, and the table of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fl_lightning.lab.report.cells import Rows, Table, cell
from fl_lightning.lab.report.runs import ReportedSweep, read_table
from fl_lightning.lab.report.summary import Summary
from fl_lightning.lab.sweep.selection import end_of, on_test_samples

CHOSEN_NOTE = (
    "Each candidate was trained with other seeds, for the number of rounds of the selection. It "
    "was scored on {samples}. If the chosen value is at an end of "
    "the tried values, a better value may lie beyond that end."
)
HELD_OUT = "training data that it was not trained on"
CLIENTS_TEST = f"the clients' test samples by clients/… and domains/…, by others on {HELD_OUT}"


@dataclass(frozen=True)
class Choice:
    """The choice of an arm among so many candidates; ``tried``: option → values, in their order.

    ``metric``: the metric by which it chose.
    """

    arm: str
    metric: str
    taken: Mapping[str, str]
    tried: Mapping[str, list[str]]
    candidates: int

    @property
    def at_end(self) -> list[str]:
        """Return the options whose value is the least or largest that was tried."""
        found = []
        for option, values in self.tried.items():
            if end_of(list(map(_number, values)), _number(self.taken[option])):
                found.append(option)
        return found


def choices(sweep: ReportedSweep) -> Iterator[Choice]:
    """Return the choice of each arm that had one; empty if nothing was selected."""
    rows = read_table(sweep.folder / "select.csv")
    for arm in dict.fromkeys(row.get("arm") or "" for row in rows):
        own = [row for row in rows if row.get("arm") == arm]
        best = next((row for row in own if row.get("chosen")), None)
        if best is None or "runs" not in best:
            continue
        columns = list(best)
        # The options are the columns between the arm and the score; after the score comes the
        # number of runs.
        score = columns.index("runs") - 1
        options = [key for key in columns[1:score] if best[key]]
        tried = {}
        for option in options:
            tried[option] = sorted({row[option] for row in own}, key=_place)
        taken = {option: best[option] for option in options}
        metric = columns[score].partition(" (")[0]
        yield Choice(sweep.names.get(arm, arm), metric, taken, tried, len(own))


def _number(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def _place(value: str) -> tuple[float, str]:
    """Sort numbers by their size, before everything else."""
    number = _number(value)
    return (number, "") if isinstance(number, float) else (float("inf"), number)


def short(option: str) -> str:
    """Return the last two words of an option.

    >>> short("model.server_optimizer.init_args.lr"), short("method.beta")
    ('server_optimizer lr', 'method beta')
    """
    words = [word for word in option.split(".") if word != "init_args"]
    return " ".join(words[-2:])


def table(summary: Summary) -> Table:
    """Return the choices of sweeps before their runs, and choices at an end of the tried values."""
    columns = ["arm", "chosen", "tried", "at an end", "candidates"]
    labels = {arm.key: name for name, arm in summary.arms.items()}
    rows: Rows = []
    title, samples = "Chosen on held-out data", HELD_OUT
    for sweep in summary.found.sweeps:
        for choice in choices(sweep):
            if on_test_samples(choice.metric):
                title, samples = "Chosen before the runs", CLIENTS_TEST
            row: list[Any] = [labels.get(choice.arm, choice.arm)]
            row.append("; ".join(f"{short(key)} {value}" for key, value in choice.taken.items()))
            row.append("; ".join(f"{short(key)} {', '.join(v)}" for key, v in choice.tried.items()))
            row.append(", ".join(map(short, choice.at_end)) or "no")
            rows.append([*row, cell(str, choice.candidates)])
    return Table("chosen", title, columns, rows, CHOSEN_NOTE.format(samples=samples))
