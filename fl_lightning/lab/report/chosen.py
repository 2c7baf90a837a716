"""The choices of sweeps before their runs, from their select.csv."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.lab.report.runs import ReportedSweep, read_table


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


def on_test_samples(metric: str) -> bool:
    """Return whether a metric is measured on the clients' test samples.

    >>> on_test_samples("clients/acc_worst10"), on_test_samples("val/acc")
    (True, False)
    """
    return metric.startswith(("clients/", "domains/"))


def end_of(values: Sequence[Any], value: Any) -> str:
    """Return "least" or "largest" if ``value`` is that of three numbers or more, else "".

    >>> end_of([0.03, 0.1, 0.3], 0.3), end_of([0.03, 0.1, 0.3], 0.1), end_of([0.1, 0.3], 0.3)
    ('largest', '', '')
    """
    numbers = {each for each in values if type(each) in (int, float)}
    others = any(type(each) not in (int, float) for each in values)
    if others or len(numbers) < 3 or value not in (min(numbers), max(numbers)):
        return ""
    return "least" if value == min(numbers) else "largest"


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
