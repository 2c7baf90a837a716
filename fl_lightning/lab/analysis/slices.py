"""The loss along the first eigenvector of its Hessian, next to the parabola of the eigenvalue."""

from __future__ import annotations

import math

import numpy as np
import torch

from fl_lightning.evaluation.curvature import Vector
from fl_lightning.evaluation.evaluator import Evaluator
from fl_lightning.evaluation.measured_samples import Samples
from fl_lightning.lab.analysis.opened import Opened

POINTS = 41


def along_top(
    run: Opened, evaluator: Evaluator, samples: Samples, vector: Vector, eigenvalue: float
) -> tuple[list[float], list[float]]:
    """Return steps s and the losses at w + s v.

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
    steps = np.linspace(-reach, reach, POINTS)
    steps[POINTS // 2] = 0.0
    losses = [evaluator.mean_of(w + float(s) * direction, shares).loss for s in steps]
    return [float(s) for s in steps], losses
