"""FedDecorr: features must not collapse to a few directions.

Y. Shi, J. Liang, W. Zhang, V. Y. F. Tan, S. Bai: Towards Understanding and Mitigating Dimensional
Collapse in Heterogeneous Federated Learning (ICLR 2023), arXiv:2210.00226. The rule is that of the
authors' code; the paper prints the squared norm of the correlation matrix over F².
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning.callback import (
    Clients,
    Coefficient,
    FederatedCallback,
    Paper,
    Schedule,
    UserError,
)


class DecorrelatedFeatures(FederatedCallback):
    """The loss gains β/B times the mean of R_jk² over j ≠ k, R = ẑᵀẑ of the standardised features.

    z ``(B, F)`` are the features of a batch; ẑ = (z - mean)/√(10⁻⁸ + var), with the variance over
    B - 1. A batch of one sample adds nothing. The term is (B - 1)²/B times the mean squared
    correlation, so β depends on the batch size.
    Sent and kept: nothing more than by FedAvg. One gradient per step.

    Args:
        strength: β; 0 is FedAvg.
        features: the module whose output, or with ``:in`` whose input, is z.

    Raises:
        UserError: strength is negative, or neither a finite number nor a schedule; or the features
            are not ``(B, F)`` with F from 2.

    Example:
        with β = 0 it is FedAvg, to the last bit.

        >>> from fl_lightning.callbacks import DecorrelatedFeatures
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(DecorrelatedFeatures(strength=0.0))
        >>> run.global_vector.equal(tiny_run().global_vector)
        True
    """

    title = "FedDecorr"
    paper = Paper("shi2023feddecorr")
    tolerates_staleness = True
    neutral = {"strength": 0.0}
    strength = Coefficient(least=0)

    def __init__(self, strength: float | Schedule = 0.1, features: str = "last:in") -> None:
        super().__init__()
        self.strength = strength
        self.features = features
        self.taps = {"features": features}

    def local_loss(
        self, clients: Clients, loss: Tensor, seen: dict[str, Any], batch: Any
    ) -> Tensor:
        z = seen["features"]
        if not isinstance(z, Tensor) or z.dim() != 2 or z.shape[1] < 2:
            shape = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise UserError(
                f"DecorrelatedFeatures: features={self.features!r} gives {shape}, and has to be a "
                "module with at least two features per sample, (B, F)."
            )
        samples, width = z.shape
        if samples < 2:
            return loss
        centred = z - z.mean(0)
        scaled = centred / torch.sqrt(1e-8 + centred.square().sum(0) / (samples - 1))
        r = scaled.T @ scaled
        others = r.square().sum() - r.diagonal().square().sum()
        term = others / (width * (width - 1) * samples)
        return loss.add(term, alpha=self.strength)
