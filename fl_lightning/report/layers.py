"""Consensus distance of each layer, averaged over rounds and seeds, in the forms that were logged."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from fl_lightning.report.runs import Run

FORMS = {
    "consensus/": "raw, as FedALS has it",
    "consensus_per_coordinate/": "per coordinate",
    "consensus_relative/": "relative to ‖mean x‖²",
}


def forms(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Prefix of a form → the layers that ``runs`` logged in it, from the input on; empty where they logged none."""
    names = dict.fromkeys(name for run in runs for name in run.columns if name != "consensus/total")
    found = {
        form: [name.removeprefix(form) for name in names if name.startswith(form)] for form in FORMS
    }
    return {form: own for form, own in found.items() if own}


def over_time(runs: Sequence[Run], name: str) -> float | None:
    """Mean of ``name`` over the rounds that have it, and then over the runs that are done (else over all)."""
    done = [run for run in runs if run.status == "done"] or runs
    columns = [run.column(name) for run in done]
    means = [float(own[np.isfinite(own)].mean()) for own in columns if np.isfinite(own).any()]
    return fmean(means) if means else None
