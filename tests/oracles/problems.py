"""Small problems with gradients by hand, and who trains on what: what the oracle runs on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Batch = Any  # (x, y) for TwoLayer, ignored by Quadratic


class Problem(Protocol):
    def gradient(self, w: Vector, client: int, batch: Batch) -> Vector: ...


class TwoLayer:
    """linear, tanh, linear, mean softmax cross-entropy.

    w is weight1 (hidden, d_in), bias1, weight2 (classes, hidden), bias2, each in C order.
    """

    def __init__(self, d_in: int, hidden: int, classes: int) -> None:
        self.shapes = [(hidden, d_in), (hidden,), (classes, hidden), (classes,)]
        self.size = sum(math.prod(shape) for shape in self.shapes)

    def split(self, w: Vector) -> list[npt.NDArray[np.float64]]:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        pieces: list[Vector] = np.split(w, ends)
        return [piece.reshape(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def loss_and_gradient(
        self, w: Vector, x: npt.NDArray[Any], y: npt.NDArray[Any]
    ) -> tuple[float, Vector]:
        weight1, bias1, weight2, bias2 = self.split(w)
        rows, x = np.arange(len(y)), np.asarray(x, dtype=np.float64).reshape(len(y), -1)
        h = np.tanh(x @ weight1.T + bias1)
        z = h @ weight2.T + bias2
        z = z - z.max(axis=1, keepdims=True)
        log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
        loss = -log_p[rows, y].mean()
        dz = np.exp(log_p)
        dz[rows, y] -= 1.0
        dz /= len(y)
        da = (dz @ weight2) * (1.0 - h * h)
        parts = [da.T @ x, da.sum(axis=0), dz.T @ h, dz.sum(axis=0)]
        return float(loss), np.concatenate([part.ravel() for part in parts])

    def gradient(self, w: Vector, client: int, batch: Batch) -> Vector:
        return self.loss_and_gradient(w, *batch)[1]


class Quadratic:
    """f_i(w) = 0.5 (w - b_i)^T A_i (w - b_i); the batch is ignored.

    Curvature (m, D, D), centre (m, D).
    """

    def __init__(self, curvature: npt.NDArray[np.float64], centre: npt.NDArray[np.float64]) -> None:
        self.curvature, self.centre, self.size = curvature, centre, centre.shape[1]

    def gradient(self, w: Vector, client: int, batch: Batch) -> Vector:
        g: Vector = self.curvature[client] @ (w - self.centre[client])
        return g

    def optimum(self) -> Vector:
        """Of the uniform mean of all clients' objectives."""
        pull = np.einsum("idk,ik->d", self.curvature, self.centre)
        optimum: Vector = np.linalg.solve(self.curvature.sum(axis=0), pull)
        return optimum


@dataclass(frozen=True)
class Schedule:
    """Who takes part and on what: rounds[t][i] is the list of the K_i batches of client i in round
    t.

    Clients that dropped out are not listed. data[i], all of a client's samples as one batch, is
    read by SCAFFOLD's "gradient" estimate alone. sizes: N_i of all m registered clients.
    """

    rounds: Sequence[Mapping[int, Sequence[Batch]]]
    sizes: Sequence[int]
    data: Mapping[int, Batch] | Sequence[Batch] = ()


def local_steps(size: int, batch_size: int, epochs: float) -> int:
    """K_i: whole epochs of ceil(N_i / B) batches, then the started share of one, in exact
    decimals."""
    batches = -(-size // batch_size)
    whole = math.floor(Fraction(str(epochs)))
    return whole * batches + math.ceil((Fraction(str(epochs)) - whole) * batches)
