"""Problems and schedules that tests run the oracle on."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracles.oracle import Quadratic, Schedule, TwoLayer
from tests.oracles.problems import Vector

M, D = 6, 4
FIRST = np.arange(D) < 2  # a part of two coordinates


def quadratics(seed: int = 0, m: int = M) -> Quadratic:
    """Curvatures between 0.5 and 2, so that the mean optimum is not the mean of the centres."""
    rng = np.random.default_rng(seed)
    rotations = [np.linalg.qr(rng.normal(size=(D, D)))[0] for _ in range(m)]
    curvature = np.stack([q @ np.diag(rng.uniform(0.5, 2.0, D)) @ q.T for q in rotations])
    return Quadratic(curvature, rng.normal(size=(m, D)))


def constant(slopes: list[Any]) -> Any:
    """Client i's gradient is slopes[i] everywhere: a number, or a vector."""

    class Constant:
        def gradient(self, w: Vector, client: int, batch: Any) -> Vector:
            return np.full_like(w, slopes[client])

    return Constant()


def sampled(rounds: int, n: int, steps: list[int], seed: int = 1) -> Schedule:
    rng, m = np.random.default_rng(seed), len(steps)
    cohorts = [rng.choice(m, n, replace=False) for _ in range(rounds)]
    return Schedule(
        [{int(i): [None] * steps[i] for i in ids} for ids in cohorts], list(range(3, 3 + m))
    )


def learning(rounds: int = 7) -> tuple[TwoLayer, Vector, Schedule]:
    """Three of six clients a round on a network.

    Unequal sizes, a client with one sample, short last batches.
    """
    rng, net = np.random.default_rng(2), TwoLayer(3, 4, 3)
    sizes = [1, 5, 9, 4, 12, 7]
    data = [(rng.normal(size=(n, 3)), rng.integers(0, 3, n)) for n in sizes]
    table: list[dict[int, list[Any]]] = []
    for _ in range(rounds):
        table.append({})
        for i in map(int, rng.choice(M, 3, replace=False)):
            order = rng.permutation(sizes[i])
            x, y = data[i]
            table[-1][i] = [
                (x[order[k : k + 4]], y[order[k : k + 4]]) for k in range(0, sizes[i], 4)
            ]
    return net, 0.5 * rng.normal(size=net.size), Schedule(table, sizes, data)
