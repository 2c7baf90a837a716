"""Measures to compare two splits: how different clients' labels are, and their sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def total_variation(counts: NDArray[np.int64]) -> float:
    """Return the mean over clients of the total variation distance between the client's class
    shares and those of all clients together; from 0 (all alike) to 1.

    Args:
        counts: samples by client and class ``(m, C)``.

    >>> total_variation(np.array([[5, 5], [10, 0]]))
    0.25
    """
    shares = counts / counts.sum(axis=1, keepdims=True)
    common = counts.sum(axis=0) / counts.sum()
    return float((np.abs(shares - common).sum(axis=1) / 2).mean())


def effective_classes(counts: NDArray[np.int64]) -> float:
    """Return the mean over clients of exp(entropy of the client's class shares): the number of
    equally frequent classes with that entropy.

    >>> effective_classes(np.array([[5, 5], [10, 0]]))
    1.5
    """
    shares = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    return float(np.round(np.exp(-(shares * logs).sum(axis=1)).mean(), 12))


def gini(sizes: NDArray[np.int64]) -> float:
    """Return the Gini coefficient of the clients' sizes ``(m,)``: 0 if all are equal, near 1 if one
    client has everything.

    >>> gini(np.array([5, 5])), gini(np.array([0, 10]))
    (0.0, 0.5)
    """
    ordered = np.sort(sizes).astype(np.float64)
    m = len(ordered)
    ranks = np.arange(1, m + 1)
    return float(abs((2 * ranks - m - 1) @ ordered) / (m * ordered.sum()))
