"""The communication by two conventions: counted from the messages, and as papers count it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fl_lightning.introspection.papers import Paper, declared
from fl_lightning.lab.cli.compose import as_list, class_name
from fl_lightning.lab.report.intervals import mean_sd
from fl_lightning.lab.report.runs import ReportedRun
from fl_lightning.lab.report.summary import Arm


@dataclass(frozen=True)
class Traffic:
    """Means over an arm's done runs; None if it is not known.

    ``bytes`` per round, up and down, from the messages. ``papers``: vectors per client and round,
    as papers count them. FedALS counts parameters in one direction; its arms compare ``one_way``
    parameters per round instead.
    """

    bytes: float | None
    one_way: float | None
    papers: int | None
    partial: bool


def methods(run: ReportedRun) -> set[str] | None:
    """Return class names of the method callbacks in config.yaml, if all belong to this package.

    The result is None if there is no config.yaml, or a method belongs to another package.
    """
    if not run.config:
        return None
    items = as_list(run.config.get("method"))
    # A method that is not part of this package may send anything, whatever its name is.
    if not all(map(_packaged, items)):
        return None
    return {class_name(item) for item in items}


def _packaged(item: Any) -> bool:
    path = item.get("class_path") if isinstance(item, dict) else item
    return str(path).startswith("fl_lightning.")


def traffic(arm: Arm) -> Traffic:
    """Return how much the done runs of ``arm`` sent per round."""
    done = [run for run in arm.runs if run.status == "done"]
    # All runs of an arm have one config except for the seed, so read the first run.
    names = methods(arm.runs[0])
    # FedInit's Table 8 and FedSMOO's Table 3 count vectors of the model's size.
    counted = [declared("paper").get(name, Paper()).vectors for name in names or ()]
    vectors = [number for number in counted if number is not None]
    return Traffic(
        _a_round(done, "communication/total_bytes"),
        _a_round(done, "communication/up_parameters"),
        None if names is None else max(vectors, default=1),
        None in counted,
    )


def papers_ratio(one: Traffic, other: Traffic) -> float | None:
    """Return how many times as much ``one`` sends per round as ``other``, by the papers'
    convention.

    None if the traffic of one of them is not known.
    """
    if one.papers is None or other.papers is None:
        return None
    # A method that sends parts does not send a whole number of vectors.
    if one.partial or other.partial:
        return over(one.one_way, other.one_way)
    return over(one.papers, other.papers)


def uncounted(arms: Iterable[Traffic]) -> str:
    """Return a sentence for a note, if the papers' count of one of ``arms`` is not known; else
    "".
    """
    if all(arm.papers is not None for arm in arms):
        return ""
    return (
        " The report does not know the papers' count for a method that is not part of this "
        "package, or for a run without config.yaml."
    )


def over(ours: float | None, theirs: float | None) -> float | None:
    """Return ``ours / theirs``; None if either is 0 or not known."""
    return ours / theirs if ours and theirs else None


def _a_round(runs: list[ReportedRun], name: str) -> float | None:
    # The column is a running total, and runs may have different numbers of rounds.
    rates = [float(run.column(name)[-1]) / run.rounds_done for run in runs if run.rounds_done]
    return mean_sd(rates)[0] if all(map(math.isfinite, rates)) else None
