"""Metrics by domain: how well the clients of each domain are served."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Values = Mapping[int, float]


def by_domain(
    values: Values, samples: Mapping[int, int], domains: Sequence[str]
) -> dict[str, float]:
    """Return the mean of a metric over each domain's clients, weighted by test samples; NaN does
    not count.

    Args:
        values, samples: values by client.
        domains: the domain of each client.

    >>> by_domain({0: 1.0, 1: 0.5, 2: 0.0}, {0: 3, 1: 1, 2: 2}, ["art", "art", "photo"])
    {'art': 0.875, 'photo': 0.0}
    """
    found = {}
    for domain in dict.fromkeys(domains):
        of = [i for i in values if domains[i] == domain and not math.isnan(values[i])]
        total = sum(samples[i] for i in of)
        if total:
            found[domain] = sum(values[i] * samples[i] for i in of) / total
    return found


def over_domains(values: Mapping[str, float], greater: bool) -> dict[str, float]:
    """Return ``_mean`` over domains, which all have the same weight, and the ``_worst``.

    >>> over_domains({"art": 0.75, "photo": 0.25}, greater=True)
    {'_mean': 0.5, '_worst': 0.25}
    """
    every = list(values.values())
    return {"_mean": sum(every) / len(every), "_worst": (min if greater else max)(every)}


def rows_of_domains(
    table: Mapping[str, Values],
    samples: Mapping[int, int],
    domains: Sequence[str],
    greater: Mapping[str, bool],
) -> list[list[object]]:
    """Return the lines of domains.csv: a row per domain, then the mean and the worst of each
    metric.

    Args:
        table: metric → client → value.
        greater: for each metric, whether greater is better.
    """
    names = [name for name, values in table.items() if values]
    columns = {name: by_domain(table[name], samples, domains) for name in names}
    lines: list[list[object]] = [["domain", "clients", "samples", *names]]
    for domain in dict.fromkeys(domains):
        of = [i for i in samples if domains[i] == domain]
        cells = [columns[name].get(domain, math.nan) for name in names]
        shown = ["" if math.isnan(cell) else repr(cell) for cell in cells]
        lines.append([domain, str(len(of)), str(sum(samples[i] for i in of)), *shown])
    every = [str(len(samples)), str(sum(samples.values()))]
    for kind in ("_mean", "_worst"):
        cells = [over_domains(columns[name], greater[name])[kind] for name in names]
        lines.append([kind.removeprefix("_"), *every, *map(repr, cells)])
    return lines
