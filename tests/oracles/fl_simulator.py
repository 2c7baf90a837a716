"""FL-Simulator's rules in NumPy float64, stated again from its files at commit 502bec655701. Its
words are kept: ``params`` are models, ``h`` and ``mu`` duals, ``ratio`` its ``--active-ratio``.
Nothing of the package is used, and no code of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles.problems import Problem, Vector


@dataclass(frozen=True)
class Options:
    """Its command line, with its defaults."""

    method: str = "FedAvg"
    use_ri: bool = False
    ratio: float = 0.1
    local_epochs: int = 5
    batchsize: int = 50
    weight_decay: float = 0.001
    lr: float = 0.1
    global_lr: float = 1.0
    lr_decay: float = 0.998
    seed: int = 20
    alpha: float = 0.1
    beta: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    lamb: float = 0.1
    rho: float = 0.1
    epsilon: float = 0.01
    max_norm: float = 10.0


def coins(t: int, seed: int, m: int, ratio: float) -> Vector:
    """Who takes part in round t: each by its own coin, thrown again if nobody does."""
    while True:
        thrown = np.random.RandomState(t + seed).uniform(size=m)
        if (thrown <= ratio).any():
            return np.flatnonzero(thrown <= ratio)
        seed += 1


def augmented(image: Any, flip: bool, crop: bool, row: int, column: int) -> Any:
    """A normalised image ``(3, 32, 32)``: flipped first, then cropped from a frame of zeros."""
    if flip:
        image = image[:, :, ::-1]
    if crop:
        framed = np.zeros((3, 40, 40), image.dtype)
        framed[:, 4:36, 4:36] = image
        image = framed[:, row : row + 32, column : column + 32]
    return image


def run(
    options: Options,
    problem: Problem,
    w0: Vector,
    m: int,
    samples: int,
    batches: Callable[[int, int], Sequence[Any]],
    rounds: int,
) -> list[Vector]:
    """The server's params after each round.

    Args:
        samples: of client 0, from which the simulator computes the local iterations of all.
        batches: ``(round, client)`` → its batches, of all local epochs.
    """
    o = options
    dual = o.method in ("FedDyn", "FedSMOO")
    iterations = o.local_epochs * (samples / o.batchsize)
    w, lr = w0.copy(), o.lr
    params = np.tile(w0, (m, 1))
    c_i, h, mu = np.zeros_like(params), np.zeros_like(params), np.zeros_like(params)
    c, common, m_1, m_2, averaged = (np.zeros_like(w0) for _ in range(5))
    after: list[Vector] = []
    for t in range(rounds):
        chosen = coins(t, o.seed, m, o.ratio)
        momentum = -averaged / iterations / lr * o.lr_decay
        change = np.zeros_like(w0)
        updates = {}
        for i in chosen:
            start = w + o.beta * (w - params[i]) if o.use_ri else w
            x = start.copy()
            for batch in batches(t, int(i)):
                g = problem.gradient(x, int(i), batch)
                if o.method == "FedSAM":
                    e = o.rho * g / (np.linalg.norm(g) + 1e-7)
                    g = problem.gradient(x + e, int(i), batch)
                if o.method == "FedSMOO":
                    g = g - (mu[i] + common)
                    e = o.rho * g / (np.linalg.norm(g) + 1e-7)
                    mu[i] += e - common
                    g = problem.gradient(x + e, int(i), batch)
                if o.method == "SCAFFOLD":
                    g = g + c - c_i[i]
                if o.method == "FedCM":
                    g = o.alpha * g + (1 - o.alpha) * momentum
                if dual:
                    g = g + o.lamb * (h[i] - start)
                g = g * min(1.0, o.max_norm / (np.linalg.norm(g) + 1e-6))
                decay = o.weight_decay + (o.lamb if dual else 0.0)
                x = x - lr * (g + decay * x)
            updates[i] = x - start
            params[i] = x
            h[i] += updates[i]
            new = c_i[i] - c - updates[i] / iterations / lr
            change += new - c_i[i]
            c_i[i] = new
        averaged = np.mean([updates[i] for i in chosen], axis=0)
        c = c + change / m
        if o.method == "FedAdam":
            m_1 = o.beta1 * m_1 + (1 - o.beta1) * averaged
            m_2 = o.beta2 * m_2 + (1 - o.beta2) * averaged**2
            w = w + o.global_lr * m_1 / (np.sqrt(m_2) + o.epsilon)
        elif dual:
            w = params[chosen].mean(axis=0) + h.mean(axis=0)
            s = mu[chosen].mean(axis=0)
            common = s / (np.linalg.norm(s) + 1e-7) * o.rho
        else:
            w = w + o.global_lr * averaged
        lr *= o.lr_decay
        after.append(w)
    return after
