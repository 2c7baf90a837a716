"""The loss around a model: on a plane of two random directions, and along an eigenvector.

H. Li, Z. Xu, G. Taylor, C. Studer, T. Goldstein: Visualizing the Loss Landscape of Neural Nets
(NeurIPS 2018), arXiv:1712.09913: each filter of a direction gets the norm of the model's filter at
the same place; biases and the weights of norms, which have one dimension, are not moved. So a
network and one with scaled weights show the same landscape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.evaluation.curvature import Vector
from fl_lightning.evaluation.evaluator import Evaluator, Samples
from fl_lightning.lab.analysis.opened import Opened
from fl_lightning.learner.layout import Layout
from fl_lightning.sampling import generator

Grid = NDArray[np.float64]
# Points along an eigenvector.
SLICE = 41


@dataclass(frozen=True)
class Landscape:
    """Losses ``(points, points)`` at w + a d_1 + b d_2: rows by a, columns by b.

    The model itself is in the middle. ``loss``: the model's own loss; ``samples``: the number of
    samples.
    """

    run: Opened
    steps: Grid
    losses: Grid
    loss: float
    samples: int


def directions(layout: Layout, w: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return two filter-normalised Gaussian directions ``(D,)`` at w.

    Before they are normalised, they are functions of the seed.
    """
    first = _normalised(layout, w, generator(seed, "landscape", 0))
    second = _normalised(layout, w, generator(seed, "landscape", 1))
    return first, second


def _normalised(layout: Layout, w: Tensor, draw: np.random.Generator) -> Tensor:
    direction = torch.zeros_like(w)
    for where, shape in layout.values():
        drawn = torch.from_numpy(draw.standard_normal(tuple(shape))).to(w)
        # Give each filter of the direction the norm of the model's filter; biases and norms stay 0.
        if len(shape) > 1:
            filters = drawn.flatten(1)
            norms = w[where].view(shape).flatten(1).norm(dim=1, keepdim=True)
            scale = norms / filters.norm(dim=1, keepdim=True).clamp(min=1e-12)
            direction[where] = (filters * scale).reshape(-1)
    return direction


def landscape(run: Opened, points: int, reach: float, samples: int | None, seed: int) -> Landscape:
    """Return the loss at ``points`` × ``points`` places, up to ``reach`` lengths of filters in each
    direction.

    Args:
        points: odd, so that the model itself is one of them.
        samples: number of the clients' samples, drawn by the run's seed; None: all.
        seed: seed of the directions.
    """
    evaluator = run.evaluator(exact=False)
    w = run.vector
    chosen = run.samples(samples, "landscape")
    first, second = directions(run.layout, w, seed)
    steps = np.linspace(-reach, reach, points)
    # The middle has to be exactly the model, without a rounding error.
    steps[points // 2] = 0.0
    # Make the batches once and keep them for all points.
    shares = evaluator.shares(chosen, evaluator.size(w, chosen), keep=True)
    losses = np.empty((points, points))
    for i, a in enumerate(steps):
        for j, b in enumerate(steps):
            losses[i, j] = evaluator.mean_of(w + a * first + b * second, shares).loss
    here = evaluator.mean(w, chosen)
    return Landscape(run, steps, losses, here.loss, here.samples)


def along_top(
    run: Opened, evaluator: Evaluator, samples: Samples, vector: Vector, eigenvalue: float
) -> tuple[list[float], list[float]]:
    """Return steps s and the losses at w + s v, for the first eigenvector v of the Hessian.

    The steps end where the parabola has risen by the loss itself, or at ‖w‖.
    """
    w = run.vector
    # Make the batches once and keep them for all steps.
    shares = evaluator.shares(samples, evaluator.size(w, samples), keep=True)
    loss = evaluator.mean_of(w, shares).loss
    norm = float(w.norm())
    rise = norm
    if eigenvalue and math.isfinite(eigenvalue):
        rise = math.sqrt(2 * max(loss, 1e-6) / abs(eigenvalue))
    # A step longer than ‖w‖ leaves nothing of the model.
    reach = min(rise, norm) if norm > 0 else rise
    direction = torch.from_numpy(vector).to(w)
    # The middle has to be exactly the model, without a rounding error.
    steps = np.linspace(-reach, reach, SLICE)
    steps[SLICE // 2] = 0.0
    losses = [evaluator.mean_of(w + float(s) * direction, shares).loss for s in steps]
    return [float(s) for s in steps], losses
