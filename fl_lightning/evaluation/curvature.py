"""The Hessian of clients' mean loss: its largest eigenvalue by Lanczos, its trace by Hutchinson.

G. H. Golub, C. F. Van Loan: Matrix Computations, ch. 10. M. F. Hutchinson: A stochastic estimator
of the trace of the influence matrix for Laplacian smoothing splines (1990). Products with the
Hessian are computed by differentiating twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_lightning.client.step_hooks import Gradients, dense, differentiated
from fl_lightning.errors import UserError
from fl_lightning.evaluation.evaluator import GRAPH_BYTES, Evaluator, OverSamples, Samples
from fl_lightning.learner.layout import flatten
from fl_lightning.sampling import generator

Vector = NDArray[np.float64]
DENSE = 20  # up to this number of parameters the whole Hessian is computed
RESTARTS = 100
SKETCH = 2 * 10**7  # numbers


@dataclass(frozen=True)
class Curvature:
    """The curvature of the mean loss at a vector.

    Args:
        top_eigenvalue: the largest eigenvalue (not in absolute value); NaN if a value is not
            finite.
        top_residual: its ‖Hv - λv‖ / |λ|.
        trace, trace_stderr: the estimate of the trace, and its standard error over the probes.
        norm: norm of the vector.
        products: number of products with the Hessian.
    """

    top_eigenvalue: float
    top_residual: float
    trace: float
    trace_stderr: float
    norm: float
    products: int


class Hessian:
    """H of the mean loss over ``samples`` at x ``(D,)``: ``hessian(v)`` is Hv ``(D,)``, float64.

    The batches of ``samples`` are read once and stay in memory. Every process has to make the same
    products.

    Raises:
        UserError: the loss cannot be differentiated twice.
    """

    def __init__(self, evaluator: Evaluator, x: Tensor, samples: Samples) -> None:
        self.evaluator = evaluator
        self.x = x.detach()
        self.size = x.numel()
        number = sum(map(len, samples.values()))
        most = evaluator.size(x, samples, GRAPH_BYTES // 4)  # two more passes use the same graph
        self._shares = evaluator.shares(samples, most, keep=True)
        self._number = max(1, number)
        self.products = 0

    def __call__(self, v: Vector) -> Vector:
        copy = self.evaluator.copy
        self.products = self.products + 1
        direction = torch.as_tensor(v.reshape(-1)).to(copy.x)
        directions = copy.layout.views(direction)

        def term(batch: Any, number: int, index: int) -> OverSamples:
            copy.logging = False
            with torch.enable_grad():
                # A part that can be differentiated only once fails here only if its incoming
                # gradient requires a graph. A constant 1 does not require one.
                one = torch.ones_like(direction[:1]).requires_grad_()
                loss = (self.evaluator.loss(batch, index, graph=True) * one).sum()
                gradients = torch.autograd.grad(
                    loss, copy.parameters, create_graph=True, allow_unused=True
                )
                if self.products == 1 and any(g is None for g in gradients):
                    self._check_missing(gradients, batch, index)
                first = dense(gradients, copy.parameters)
                products = [(g * d).sum() for g, d in zip(first, directions, strict=True)]
                along = torch.stack(products).sum()
                if self.products == 1 and _differentiable_once(along.grad_fn):
                    raise RuntimeError("a part of it is marked with once_differentiable")
                second = torch.autograd.grad(
                    along, copy.parameters, allow_unused=True, materialize_grads=True
                )
            return OverSamples(product=flatten(second).detach().double() * number)

        try:
            # Other attention kernels cannot be differentiated twice.
            with sdpa_kernel(SDPBackend.MATH):
                total = self.evaluator.sum(self.x, self._shares, term)
        except RuntimeError as error:
            phrases = ("not implemented", "not support", "once_differentiable")
            if not any(phrase in str(error) for phrase in phrases):
                raise
            raise UserError(
                f"learner {type(copy.learner).__name__}: its loss cannot be differentiated twice, "
                f"which curvature needs ({' '.join(str(error).split())[:200]})."
            ) from error
        if total.product is None:
            return np.zeros(self.size)
        return (total.product / self._number).cpu().numpy()

    def _check_missing(self, gradients: Gradients, batch: Any, index: int) -> None:
        """Refuse gradients by `backward()` that no second derivative includes."""
        copy = self.evaluator.copy
        loss = self.evaluator.loss(batch, index, graph=True)
        by_backward = differentiated(loss, copy.parameters)
        for name, g, other in zip(copy.layout, gradients, by_backward, strict=True):
            if g is None and other is not None:
                raise RuntimeError(
                    f"the gradient of {name} comes from a backward call inside a backward pass, "
                    "which does not support second derivatives; activation checkpointing supports "
                    "them with use_reentrant=False"
                )


def measure(hessian: Hessian, tolerance: float, probes: int, seed: int) -> Curvature:
    return measure_with_vector(hessian, tolerance, probes, seed)[0]


def measure_with_vector(
    hessian: Hessian, tolerance: float, probes: int, seed: int
) -> tuple[Curvature, Vector]:
    vector = np.zeros(hessian.size)
    try:
        value, vector = top(hessian, tolerance, seed)
        residual = 0.0
        if value:
            residual = float(np.linalg.norm(hessian(vector) - value * vector)) / abs(value)
        mean, error = trace(hessian, probes, seed, vector)
    except FloatingPointError:
        value = residual = mean = error = math.nan
    norm = float(torch.linalg.vector_norm(hessian.x.double()))
    return Curvature(value, residual, mean, error, norm, hessian.products), vector


def top(hessian: Hessian, tolerance: float, seed: int) -> tuple[float, Vector]:
    """Return the largest eigenvalue (not in absolute value), and its eigenvector of length 1.

    Both come from ARPACK's restarted Lanczos iteration, with ‖Hv - λv‖ ≤ ``tolerance`` |λ|. If its
    restarts do not suffice, the tolerance is loosened. The residual shows the error that remains.

    Raises:
        FloatingPointError: a product is not finite.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

    n = hessian.size

    def product(v: Vector) -> Vector:
        image = hessian(v)
        if not np.isfinite(image).all():
            raise FloatingPointError("a product with the Hessian is not finite")
        return image

    if n <= DENSE:
        whole = np.stack([product(row) for row in np.eye(n)])
        values, vectors = np.linalg.eigh((whole + whole.T) / 2)
        return float(values[-1]), vectors[:, -1]
    start = generator(seed, "lanczos").standard_normal(n)
    start /= np.linalg.norm(start)
    if not product(start).any():
        return 0.0, start
    # SciPy's types name these arguments differently in different versions.
    operator = LinearOperator(  # type: ignore[call-arg,unused-ignore]
        (n, n), matvec=product, dtype=np.float64
    )
    kept = 20 if n <= 10**6 else 10  # vectors
    for allowed in (tolerance, 10 * tolerance, 100 * tolerance, 1.0):
        try:
            values, vectors = eigsh(
                operator, k=1, which="LA", v0=start, ncv=min(n, kept), tol=allowed, maxiter=RESTARTS
            )
            break
        except ArpackNoConvergence:
            continue
    else:
        return math.nan, start
    return float(values[0]), vectors[:, 0]


def trace(hessian: Hessian, probes: int, seed: int, along: Vector) -> tuple[float, float]:
    """Return an estimate of the trace, and its standard error over the probes z, with rounding.

    tr H = tr Q'HQ + tr PHP with P = I - QQ'. The first part is computed exactly, and z'PHPz
    estimates the second. Q has ``along``, best the first eigenvector, and up to ``probes`` / 2 more
    directions in which H is large: H times random vectors. So only the estimate for the small part
    has an error (R. A. Meyer et al.: Hutch++, 2021).
    """
    n = hessian.size
    more = min(probes // 2, n // 2, SKETCH // n)
    wide = [hessian(generator(seed, "sketch", k).standard_normal(n)) for k in range(more)]
    q, _ = np.linalg.qr(np.stack([along, *wide], axis=1))
    exact = np.array([column @ hessian(column) for column in q.T])
    estimates = np.empty(probes)
    for k in range(probes):
        z = 2.0 * generator(seed, "hutchinson", k).integers(0, 2, n) - 1.0
        across: Vector = z - q @ (q.T @ z)
        estimates[k] = across @ hessian(across)
    size = np.abs(exact).sum() + np.abs(estimates).mean()
    rounding = 10 * torch.finfo(hessian.x.dtype).eps * size
    error = math.hypot(estimates.std(ddof=1) / math.sqrt(probes), rounding)
    return float(exact.sum() + estimates.mean()), error


def _differentiable_once(node: Any) -> bool:
    """Return whether another gradient would silently miss a part of a gradient's graph."""
    seen = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("Error"):
            return True
        waiting.extend(following for following, _ in node.next_functions)
    return False
