"""Losses that look at models, §§ C, D and E of the further methods: MOON, FedNTD, FedLC. Of the
two-layer network, by its backward pass written out; nothing is differentiated by a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracles.problems import Batch, TwoLayer, Vector

Matrix = Any


@dataclass(frozen=True)
class Looking:
    """A client's loss in a round, with what its terms look at. ``moon``: (μ, τ); ``fedntd``: (β,
    τ); ``fedlc``: (τ, whether the true class leaves the sum). ``received``: w^t; ``last``: x_{i,K}
    of its latest round, w^t if none; ``counts``: N_{i,c}."""

    net: TwoLayer
    received: Vector
    last: Vector
    counts: Vector
    moon: tuple[float, float] | None = None
    fedntd: tuple[float, float] | None = None
    fedlc: tuple[float, bool] | None = None

    def gradient(self, w: Vector, client: int, batch: Batch) -> Vector:
        x, y = batch
        x = np.asarray(x, dtype=np.float64).reshape(len(y), -1)
        h, z = forward(self.net, w, x)
        own = np.eye(z.shape[1])[y]
        dz = self.cross_entropy(z, own)
        dh = np.zeros_like(h)
        if self.fedntd is not None:
            dz += self.distillation(z, own, forward(self.net, self.received, x)[1])
        if self.moon is not None:
            teachers = [forward(self.net, v, x)[0] for v in (self.received, self.last)]
            dh += self.contrast(h, *teachers)
        dz /= len(y)
        dh /= len(y)
        _, _, weight2, _ = self.net.split(w)
        da = (dz @ weight2 + dh) * (1.0 - h * h)
        parts = [da.T @ x, da.sum(axis=0), dz.T @ h, dz.sum(axis=0)]
        return np.concatenate([part.ravel() for part in parts])

    def cross_entropy(self, z: Matrix, own: Matrix) -> Matrix:
        """d/dz of each sample's loss, by FedLC: CE(z - m, y); as printed: without the true one."""
        tau, as_printed = self.fedlc or (0.0, False)
        margins = np.zeros(z.shape[1])
        if tau > 0:
            margins = np.full(z.shape[1], np.inf)
            present = self.counts > 0
            margins[present] = tau * self.counts[present] ** -0.25
        if not as_printed:
            return softmax(z - margins) - own
        dz = np.zeros_like(z)
        for b, mine in enumerate(own.astype(bool)):
            # -(z_y - m_y) + log Σ_{c ≠ y, N_c > 0} e^{z_c - m_c}
            others = ~mine & (self.counts > 0)
            if others.any():
                dz[b] = -mine.astype(float)
                dz[b, others] += softmax((z - margins)[b : b + 1, others])[0]
            else:  # only the true class: what CE(z - m, y) has
                dz[b] = (softmax(z[b : b + 1] - margins) - own[b : b + 1])[0]
        return dz

    def distillation(self, z: Matrix, own: Matrix, teacher: Matrix) -> Matrix:
        """d/dz of β τ² KL(q̃(w) ‖ q̃(x)), over the classes that are not the sample's own."""
        assert self.fedntd is not None
        beta, tau = self.fedntd
        dz = np.zeros_like(z)
        for b, mine in enumerate(own.astype(bool)):
            student, known = (
                softmax(z[b : b + 1, ~mine] / tau),
                softmax(teacher[b : b + 1, ~mine] / tau),
            )
            dz[b, ~mine] = (beta * tau**2 * (student - known) / tau)[0]
        return dz

    def contrast(self, h: Matrix, received: Matrix, last: Matrix) -> Matrix:
        """d/dh of μ · -log(e^{s⁺/τ} / (e^{s⁺/τ} + e^{s⁻/τ}))."""
        assert self.moon is not None
        mu, tau = self.moon
        dh = np.zeros_like(h)
        for b in range(len(h)):
            near, d_near = cosine(h[b], received[b])
            far, d_far = cosine(h[b], last[b])
            # the weight that the negative has in the sum
            wrong = 1.0 / (1.0 + np.exp((near - far) / tau))
            dh[b] = mu * wrong * (d_far - d_near) / tau
        return dh


def forward(net: TwoLayer, w: Vector, x: Matrix) -> tuple[Matrix, Matrix]:
    """Features, which enter the last layer, and logits."""
    weight1, bias1, weight2, bias2 = net.split(w)
    h = np.tanh(x @ weight1.T + bias1)
    return h, h @ weight2.T + bias2


def softmax(z: Matrix) -> Matrix:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def cosine(a: Vector, b: Vector) -> tuple[float, Vector]:
    """cos(a, b) and its gradient in a."""
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    value = float(a @ b) / lengths
    return value, b / lengths - value * a / float(a @ a)
