"""Intervals, p and correlations for ``by_hand.py``, without our own code."""

from __future__ import annotations

import itertools
import math
from collections import Counter
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


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> Number:
    ranks = [stats.rankdata(side) for side in (x, y)]
    centred = [side - side.mean() for side in ranks]
    spread = math.sqrt(float((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    if len(x) < 2 or not centred[0].any():
        return None
    # Equal values show no trend.
    return float((centred[0] * centred[1]).sum()) / spread if spread else 0.0


def by_chance(values: Sequence[float], places: float) -> float:
    """How often as many random orders of ``places`` have correlations with so large a sum."""
    if places > 8:
        return 0.0
    places = int(places)
    one = Counter(
        round(rank_correlation(range(places), order) or 0.0, 9)
        for order in itertools.permutations(range(places))
    )
    sums = {0.0: 1.0}
    for _ in values:
        longer: dict[float, float] = {}
        for total, share in sums.items():
            for rho, times in one.items():
                key = round(total + rho, 6)
                longer[key] = longer.get(key, 0.0) + share * times / math.factorial(places)
        sums = longer
    return sum(share for total, share in sums.items() if abs(total) >= abs(sum(values)) - 1e-5)
