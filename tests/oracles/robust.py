"""Robust rules and attacks on the matrix of updates, in NumPy. § 18 of the methods page, in plain
loops."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
Vector = npt.NDArray[np.float64]


def aggregate(
    U: Matrix,
    rule: str,
    trim: float = 0.1,
    byzantine: int = 1,
    keep: int | None = None,
    mixing: bool = False,
) -> Vector:
    """One vector from the rows of U, whatever their weights."""
    n, D = U.shape
    if ((mixing and rule != "bulyan") or rule in ("krum", "multi_krum")) and n < 2 * byzantine + 3:
        byzantine, rule, mixing = ((n - 3) // 2, rule, mixing) if n >= 3 else (0, "median", False)
    if rule == "bulyan" and n < 4 * byzantine + 3:
        byzantine, rule = ((n - 3) // 4, rule) if n >= 3 else (0, "mean")
    if rule == "mean":
        return np.mean(U, axis=0)
    if mixing:
        rows = []
        for i in range(n):
            others = [(float(np.sum((U[i] - U[j]) ** 2)), j) for j in range(n) if j != i]
            near = [i, *(j for _, j in sorted(others)[: n - byzantine - 1])]
            rows.append(sum((U[j] for j in near), np.zeros(D)) / len(near))
        U = np.array(rows)
    if rule == "median":
        return np.array([np.median(U[:, k]) for k in range(D)])
    if rule == "trimmed_mean":
        cut = math.floor(Fraction(str(trim)) * n)
        return np.array([np.mean(sorted(U[:, k])[cut : n - cut]) for k in range(D)])
    if rule == "geometric_median":
        z: Vector = sum(U, np.zeros(D)) / n
        for _ in range(1000):
            w = [1 / max(float(np.linalg.norm(u - z)), 1e-12) for u in U]
            moved = sum((w[i] * U[i] for i in range(n)), np.zeros(D)) / sum(w)
            step, z = float(np.linalg.norm(moved - z)), moved
            if step <= 1e-10 * float(np.linalg.norm(z)):
                break
        return z
    if rule == "bulyan":
        return bulyan(U, byzantine)
    scores = []
    for i in range(n):
        others = sorted(float(np.sum((U[i] - U[j]) ** 2)) for j in range(n) if j != i)
        scores.append(sum(others[: n - byzantine - 2]))
    order = sorted(range(n), key=lambda i: (scores[i], i))
    k = 1 if rule == "krum" else min(n - byzantine if keep is None else keep, n)
    chosen: Vector = np.mean(U[order[:k]], axis=0)
    return chosen


def bulyan(U: Matrix, f: int) -> Vector:
    """Krum's choices one after the other, then a mean around their median."""
    n, D = U.shape
    left, chosen = list(range(n)), []
    for _ in range(n - 2 * f):
        scores = []
        for i in left:
            others = sorted(float(np.sum((U[i] - U[j]) ** 2)) for j in left if j != i)
            scores.append((sum(others[: max(1, len(left) - f - 2)]), i))
        chosen.append(min(scores)[1])
        left.remove(chosen[-1])
    result = np.zeros(D)
    for k in range(D):
        values = [float(U[i, k]) for i in sorted(chosen)]
        middle = float(np.median(values))
        order = sorted(range(len(values)), key=lambda j: (abs(values[j] - middle), j))
        result[k] = np.mean([values[j] for j in order[: len(values) - 2 * f]])
    return result


def attacked(
    U: Matrix,
    ids: Sequence[int],
    attackers: Any,
    attack: str,
    scale: float | None,
    noise: Mapping[int, Vector],
) -> Matrix:
    """What arrives of the rows of U, of clients ``ids``; ``noise``: N(0, I) by client."""
    bad, U = [i in attackers for i in ids], U.copy()
    n, a = len(ids), sum(bad)
    if attack == "alie" and 0 < a < n:
        share = min(1.0, (n - (n // 2 + 1)) / (n - a))
        z = scale
        if z is None:
            z = (
                0.0
                if share <= 0.5
                else 3.0
                if share >= 1
                else min(3.0, NormalDist().inv_cdf(share))
            )
        honest = np.array([u for u, b in zip(U, bad, strict=True) if not b])
        mean = honest.mean(axis=0)
        deviation = np.sqrt(np.mean((honest - mean) ** 2, axis=0))
        U[bad] = mean - z * deviation
    for j, i in enumerate(ids):
        if bad[j] and attack == "sign_flip":
            U[j] = -(1.0 if scale is None else scale) * U[j]
        if bad[j] and attack == "noise":
            U[j] = (1.0 if scale is None else scale) * noise[i]
    return U
