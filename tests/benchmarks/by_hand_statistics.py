"""Intervals and p of paired values for ``by_hand.py``, without our own code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

Number = float | None


@dataclass(frozen=True)
class Interval:
    mean: Number
    sd: Number
    low: Number
    high: Number


def interval(values: Sequence[float], percent: int = 95) -> Interval:
    n = len(values)
    mean = sum(values) / n if n else None
    if mean is None or n < 2:
        return Interval(mean, None, None, None)
    sd = math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1))
    half = float(stats.t.ppf(0.5 + percent / 200, n - 1)) * sd / math.sqrt(n)
    return Interval(mean, sd, mean - half, mean + half)


def p_two_sided(values: Sequence[float]) -> Number:
    found = interval(values)
    if found.mean is None or found.sd is None:
        return None
    if found.sd == 0:
        return float(found.mean == 0)
    t = found.mean / (found.sd / math.sqrt(len(values)))
    return float(2 * stats.t.sf(abs(t), len(values) - 1))


def p_equivalent(values: Sequence[float], margin: float) -> Number:
    """The larger of two one-sided p: that the mean is not above −margin, not below +margin."""
    found = interval(values)
    if found.mean is None or found.sd is None:
        return None
    if found.sd == 0:
        return float(abs(found.mean) >= margin)
    error = found.sd / math.sqrt(len(values))
    above = stats.t.sf((found.mean + margin) / error, len(values) - 1)
    below = stats.t.cdf((found.mean - margin) / error, len(values) - 1)
    return float(max(above, below))


def holm(ps: Sequence[Number]) -> list[Number]:
    """Each p times how many are not smaller, never less than a smaller one's; None is no p."""
    order = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    corrected: list[Number] = [None] * len(ps)
    floor = 0.0
    for rank, (p, i) in enumerate(order):
        floor = max(floor, min(1.0, p * (len(order) - rank)))
        corrected[i] = floor
    return corrected
