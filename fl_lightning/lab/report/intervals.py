"""Means, paired intervals by Student's t, and Holm's correction for several of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import fmean, stdev

import numpy as np
from scipy.special import stdtr, stdtrit


@dataclass(frozen=True)
class Interval:
    """Mean of n differences, its 95 % interval and two-sided p; None if n is too small."""

    n: int
    mean: float | None = None
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None

    def ends(self, percent: int) -> tuple[float, float] | None:
        """Return the ends of Student's t interval with this coverage.

        >>> Interval(2, 0.5, 0.0).ends(90)
        (0.5, 0.5)
        """
        if self.mean is None or self.sd is None:
            return None
        half = float(stdtrit(self.n - 1, 0.5 + percent / 200)) * (self.sd / math.sqrt(self.n))
        return self.mean - half, self.mean + half


def mean_sd(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return mean and sample deviation (n - 1).

    >>> mean_sd([1.0, 3.0]), mean_sd([2.0]), mean_sd([])
    ((2.0, 1.4142135623730951), (2.0, None), (None, None))
    """
    mean = fmean(values) if values else None
    return mean, stdev(values) if len(values) > 1 else None


def paired(differences: Sequence[float]) -> Interval:
    """Apply Student's t to ``differences``, one per seed.

    >>> paired([0.02, 0.02])
    Interval(n=2, mean=0.02, sd=0.0, low=0.02, high=0.02, p=0.0)
    """
    n = len(differences)
    mean, sd = mean_sd(differences)
    if mean is None or sd is None:
        return Interval(n, mean)
    error = sd / math.sqrt(n)
    # Without any spread the mean is certain: p is 1 if the mean is 0, and 0 otherwise.
    p = 2 * float(stdtr(n - 1, -abs(mean) / error)) if error else float(mean == 0)
    low, high = Interval(n, mean, sd).ends(95) or (None, None)
    return Interval(n, mean, sd, low, high, p)


def equivalent(found: Interval, margin: float) -> float | None:
    """Return p of two one-sided tests that the mean of ``found`` lies within ± ``margin``: the
    larger one.

    >>> equivalent(Interval(2, 0.0, 0.0), 0.1), equivalent(Interval(2, 0.1, 0.0), 0.1)
    (0.0, 1.0)
    """
    if found.mean is None or found.sd is None:
        return None
    inside = margin - abs(found.mean)
    if not found.sd:
        return float(inside <= 0)
    return float(stdtr(found.n - 1, -inside / (found.sd / math.sqrt(found.n))))


def chance_of_orders(total: float, n: int, places: int) -> float:
    """Return the probability that ``n`` random orders of ``places`` values have a sum of Spearman's
    ρ that is as far from 0 as ``total``.

    It is 0, which corrects nothing, for more than eight places, whose orders are too many to count.

    >>> chance_of_orders(5.0, 5, 2), chance_of_orders(1.0, 1, 3)
    (0.0625, 0.3333333333333333)
    """
    if places > 8:
        return 0.0
    orders = np.array(list(permutations(range(places))))
    squares = ((orders - np.arange(places)) ** 2).sum(1)
    of_one = np.bincount(squares) / len(orders)
    of_all = np.ones(1)
    for _ in range(n):
        of_all = np.convolve(of_all, of_one)
    sums = n - 6 * np.arange(len(of_all)) / (places * (places**2 - 1))
    return float(of_all[np.abs(sums) >= abs(total) - 1e-9].sum())


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Apply Holm's step-down correction; None stands for no comparison, and is not counted.

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    highest = 0.0
    # A corrected p may not be smaller than that of a row with a smaller p.
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p))
        corrected[i] = highest
    return corrected
