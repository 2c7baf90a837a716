"""How evenly clients are served, from the files of ``PerClientEvaluation``.

R. Jain, D. Chiu, W. Hawe: A Quantitative Measure of Fairness and Discrimination for Resource
Allocation in Shared Computer Systems (1984). C. Gini: Variabilità e mutabilità (1912).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable

import numpy as np

from fl_lightning.lab.report.runs import Column, ReportedRun, read_table
from fl_lightning.metrics import without_prefix

# Measure → its name in tables.
MEASURES = {
    "mean": "mean of clients",
    "worst10": "worst 10 %",
    "best10": "best 10 %",
    "jain": "Jain's index",
    "gini": "Gini",
}
# For runs whose clients have domains.
WORST_DOMAIN = "worst_domain"
# These have the metric's unit; the others have no unit.
OF_METRIC = ("mean", "worst10", "best10", WORST_DOMAIN)
# What PerClientEvaluation computes over all clients for one metric.
_OVER_CLIENTS = re.compile(r"_(weighted|std|worst10)$")


def fairness(run: ReportedRun, metric: str) -> dict[str, float | None]:
    """Return the measures of a run's ``clients.csv``; empty if the run has none, or it is damaged.

    If clients have domains, the last logged value of the worst domain is included.
    """
    values, _ = after_last_round(run, metric)
    if not len(values):
        return {}
    measures = spread(values, run.directions.greater(metric))
    domains = run.column(f"domains/{column_of(metric)}_worst")
    domains = domains[np.isfinite(domains)]
    return {**measures, WORST_DOMAIN: float(domains[-1])} if len(domains) else measures


def titles(found: Iterable[Collection[str]]) -> dict[str, str]:
    """Return the names of the measures, including the worst domain's if an arm has one."""
    domains = any(WORST_DOMAIN in measures for measures in found)
    return {**MEASURES, WORST_DOMAIN: "worst domain"} if domains else MEASURES


def after_last_round(run: ReportedRun, metric: str) -> tuple[Column, str]:
    """Return a run's values of clients, and text if its ``clients.csv`` has changed since.

    The run logged their mean in metrics.csv, so a lost, doubled or edited row shows.
    """
    name = column_of(metric)
    path = run.folder / "clients.csv"
    rows = read_table(path)
    # Values beyond the header's columns have no name.
    if any(None in row or None in row.values() for row in rows):
        return np.empty(0), "has rows that are longer or shorter than its header"
    if len({row.get("client") for row in rows}) < len(rows):
        return np.empty(0), "has two rows for one client"
    try:
        values = np.array([float(row[name]) for row in rows if row.get(name)], dtype=float)
    except ValueError as error:
        return np.empty(0), f"holds a value that is not a number ({error})"
    logged = run.column(f"clients/{name}") if path.exists() else np.empty(0)
    # No client had a value: perhaps no site answered.
    if len(logged) and np.isnan(logged[-1]) and np.isnan(values).all():
        return np.empty(0), ""
    logged = logged[~np.isnan(logged)]
    # If a model overflowed, its mean is not finite and was not logged.
    if len(logged) and np.isfinite(logged[-1]) and not _is_mean(float(logged[-1]), values):
        shown = f"{values.mean():.6g}" if len(values) else "nothing"
        fault = f"gives {shown} as the mean of {name}, but the run logged {logged[-1]:.6g}"
        return np.empty(0), fault
    return values[np.isfinite(values)], ""


def measured_nobody(run: ReportedRun) -> bool:
    """Return whether a run's ``clients.csv`` has no client, because none was measured after the
    last round.

    :func:`after_last_round` finds out whether rows were lost from it.
    """
    path = run.folder / "clients.csv"
    return path.is_file() and not read_table(path)


def _is_mean(logged: float, values: Column) -> bool:
    # A client without a value is not part of the mean. Metrics are logged in single precision.
    known = values[~np.isnan(values)]
    return len(known) > 0 and math.isclose(float(known.mean()), logged, rel_tol=1e-6)


def column_of(metric: str) -> str:
    """Return a metric's column in clients' tables: ``acc`` for ``val/acc`` and
    ``clients/acc_std``.
    """
    name = without_prefix(metric.removeprefix("clients/"))
    return _OVER_CLIENTS.sub("", name) if metric.startswith("clients/") else name


def _number(text: str | None) -> float:
    try:
        return float(text or "nan")
    except ValueError:
        return float("nan")


def spread(values: Column, greater: bool) -> dict[str, float | None]:
    """Return means of the ⌈k/10⌉ worst and best of k clients, Jain's index (Σx)² / k Σx², Gini.

    The two indices need values that are not negative and not all 0; otherwise they are None.

    >>> spread(np.array([0.0, 1.0]), True)
    {'mean': 0.5, 'worst10': 0.0, 'best10': 1.0, 'jain': 0.5, 'gini': 0.5}
    """
    ascending = np.sort(values)
    k = len(ascending)
    tenth = -(-k // 10)
    least = float(ascending[:tenth].mean())
    most = float(ascending[-tenth:].mean())
    worst, best = (least, most) if greater else (most, least)
    total = float(ascending.sum())
    jain: float | None = None
    gini: float | None = None
    if total > 0 and ascending[0] >= 0:
        jain = total**2 / (k * float(ascending @ ascending))
        # Σ_i Σ_j |x_i − x_j| / (2 k² mean), computed from ranks.
        ranks = 2 * np.arange(1, k + 1) - k - 1
        gini = float(ranks @ ascending) / (k * total)
    measures = [total / k, worst, best, jain, gini]
    return dict(zip(MEASURES, measures, strict=True))


def over_rounds(run: ReportedRun, metric: str) -> tuple[dict[int, dict[str, float]], list[int]]:
    """Return round → client → value, from a run's ``clients_rounds.csv``, and the rounds left out.

    A round is left out if its values have another mean than the run logged.
    """
    name = column_of(metric)
    rounds: dict[int, dict[str, float]] = {}
    for row in read_table(run.folder / "clients_rounds.csv"):
        value = _number(row.get(name))
        round_text = row.get("round") or ""
        # A killed process may have written only half of a row.
        if round_text.isdecimal() and np.isfinite(value):
            rounds.setdefault(int(round_text), {})[row.get("client") or ""] = value
    logged = dict(zip(run.columns["round"], run.column(f"clients/{name}"), strict=True))
    changed = []
    for t, by_client in rounds.items():
        mean = logged.get(t, math.nan)
        if math.isfinite(mean) and not _is_mean(mean, np.array(list(by_client.values()))):
            changed.append(t)
    return {t: rounds[t] for t in rounds if t not in changed}, changed
