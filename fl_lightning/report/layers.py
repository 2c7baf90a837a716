"""Consensus distance of each layer, averaged over rounds and seeds, in all logged forms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fl_lightning.report.intervals import mean_sd
from fl_lightning.report.runs import Run

FORMS = {
    "consensus/": "raw, as FedALS has it",
    "consensus_per_coordinate/": "per coordinate",
    "consensus_relative/": "relative to ‖mean x‖²",
}


def forms(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Prefix of a form → the layers that ``runs`` logged in it, from the input on.

    Forms that none logged are left out.
    """
    # The total is a metric of its own, and no layer.
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(name for name in run.columns if name != "consensus/total")
    logged = {}
    for form in FORMS:
        layers = [name.removeprefix(form) for name in names if name.startswith(form)]
        if layers:
            logged[form] = layers
    return logged


def over_time(runs: Sequence[Run], name: str) -> float | None:
    """Mean of ``name`` over the rounds that have it, and then over runs.

    These are the runs that are done, or all where none is.
    """
    means = []
    for run in [run for run in runs if run.status == "done"] or runs:
        column = run.column(name)
        measured = column[np.isfinite(column)]
        if len(measured):
            means.append(float(measured.mean()))
    return mean_sd(means)[0]
