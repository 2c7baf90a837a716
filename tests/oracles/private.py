"""DP-SGD at the clients once more, in NumPy float64 and without the package. Plain loops over
rounds, clients, steps and samples. FedAvg, and beside it FedProx, SCAFFOLD and relaxed starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.oracles.problems import TwoLayer

Array = npt.NDArray[np.float64]
# (purpose, round, client, step) -> a generator
Draw = Callable[[str, int, int, int], np.random.Generator]


@dataclass
class Setting:
    """What a run has: σ, C, the batch size (None: all samples), and FedAvg's settings."""

    sigma: float
    clip: float
    batch: int | None = 4
    accumulate: int = 1
    shuffled: bool = False
    lr: float = 0.3
    lr_decay: float = 1.0
    weight_decay: float = 0.01
    clip_norm: float | None = None
    weighted: bool = False
    mu: float = 0.0  # FedProx
    scaffold: bool = False
    trained: Any = None  # (D,) bool: the coordinates that clients train; None: all


@dataclass
class Left:
    """After each round: w, and what ε is composed of, by client."""

    w: list[Array]
    counts: list[dict[int, int]]


def run(
    net: TwoLayer,
    w: Array,
    clients: Sequence[tuple[Any, Any]],
    rounds: Sequence[dict[int, Any]],
    how: Setting,
    draw: Draw,
) -> Left:
    """``rounds[t][i]``: K_i, or with ``shuffled`` the batches of each of client i's steps."""
    left = Left([], [])
    counts: dict[int, int] = {}
    c = np.zeros_like(w)
    c_i = {i: np.zeros_like(w) for i in range(len(clients))}
    for t, taking_part in enumerate(rounds):
        eta = how.lr * how.lr_decay**t
        updates, weights, changes = [], [], []
        for i, steps in taking_part.items():
            x, y = clients[i]
            size = len(y)
            full = size if how.batch is None else how.batch * how.accumulate
            expected = min(full, size)
            point = w.copy()
            number = len(steps) if how.shuffled else steps
            for k in range(number):
                if how.shuffled:
                    of_step = [(bx[[j]], by[[j]]) for bx, by in steps[k] for j in range(len(by))]
                else:
                    coins = draw("record samples", t, i, k).random(size) < expected / size
                    of_step = [(x[[j]], y[[j]]) for j in np.flatnonzero(coins)]
                g = np.zeros_like(w)
                for sample in of_step:
                    own = net.gradient(point, i, sample)
                    if how.trained is not None:
                        own = np.where(how.trained, own, 0.0)
                    g += own * min(1.0, how.clip / np.linalg.norm(own))
                if how.sigma > 0:
                    noise = draw("record noise", t, i, k).standard_normal(len(w))
                    g += how.sigma * how.clip * noise
                g /= expected
                g = g + how.mu * (point - w)
                if how.scaffold:
                    g = g + c - c_i[i]
                if how.trained is not None:
                    g = np.where(how.trained, g, 0.0)
                if how.clip_norm is not None:
                    g = g * min(1.0, how.clip_norm / np.linalg.norm(g))
                step = g + how.weight_decay * point
                if how.trained is not None:
                    step = np.where(how.trained, step, 0.0)
                point = point - eta * step
            if how.scaffold:
                change = (w - point) / (eta * number) - c
                changes.append(change)
                c_i[i] = c_i[i] + change
            updates.append(point - w)
            weights.append(size if how.weighted else 1.0)
            batches = -(-size // (how.batch or size))
            epoch = -(-batches // how.accumulate)
            counts[i] = counts.get(i, 0) + (-(-number // epoch) if how.shuffled else number)
        if updates:
            w = w + np.average(updates, axis=0, weights=weights)
        if changes:
            c = c + np.sum(changes, axis=0) / len(clients)
        left.w.append(w.copy())
        left.counts.append(dict(counts))
    return left
