"""FedLC: each logit loses a margin, which is larger if the client has fewer samples of the class.

J. Zhang, Z. Li, B. Li, J. Xu, S. Wu, S. Ding, C. Wu: Federated Learning with Label Distribution
Skew via Logits Calibration (ICML 2022), arXiv:2209.00189. A client minimises CE(z - m_i, y) with
m_{i,c} = τ N_{i,c}^{-1/4}; N_{i,c} is the number of its training samples of class c.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning.callback import (
    CLASS_LABELS,
    Clients,
    Coefficient,
    FederatedCallback,
    NonNegativeFloat,
    Paper,
    Schedule,
)


class LogitCalibration(FederatedCallback):
    """z ← z - m_i in local training; a class of which the client has no sample is left out of the
    sum.

    The logged loss is computed from the calibrated logits; evaluation uses z. If each client has
    equally many samples of each class, it is FedAvg. Methods that tap the same module
    (NotTrueDistillation) get z, without the margins.
    Sent and kept: nothing more than by FedAvg. One gradient per step.

    Args:
        tau: τ, at least 0. With 0 the method is FedAvg, and the sum includes classes without
            samples, too. With ``exclude_true`` no τ gives FedAvg.
        exclude_true: sum over only the other classes, as the paper prints it. This adds mean
            log(1 - p_y) to the loss, with p = softmax(z - m_i); a sample adds nothing if its client
            has no other class. The loss then has no lower bound.

    Example:
        without a margin it is FedAvg, to the last bit.

        >>> from fl_lightning.callbacks import LogitCalibration
        >>> from fl_lightning.testing import tiny_run
        >>> tiny_run(LogitCalibration(tau=0.0)).global_vector.equal(tiny_run().global_vector)
        True
    """

    title = "FedLC"
    paper = Paper("zhang2022fedlc")
    tolerates_staleness = True
    neutral = {"tau": 0.0}
    taps = {"logits": "last"}
    notes = (CLASS_LABELS,)
    tau = Coefficient(least=0)

    def __init__(self, tau: NonNegativeFloat | Schedule = 1.0, exclude_true: bool = False) -> None:
        super().__init__()
        self.tau = tau
        self.exclude_true = exclude_true
        if exclude_true:
            self.use("local_loss", self.without_true)
            # `neutral` belongs to the class, but without the true class no tau gives FedAvg.
            vars(self)["neutral"] = None

    def local_output(self, clients: Clients, name: str, value: Tensor, batch: Any) -> Tensor:
        return value - self.margins(clients, value)

    def margins(self, clients: Clients, logits: Tensor) -> Tensor:
        """Return m_i ``(1, C)``, infinite for a class of which the client has no sample."""
        n = counts(clients, logits).double()
        absent = torch.inf if self.tau > 0 else 0.0
        margins = torch.where(n > 0, self.tau * n.clamp(min=1) ** -0.25, absent)
        return margins.to(logits.dtype)

    def without_true(
        self, clients: Clients, loss: Tensor, seen: dict[str, Any], batch: Any
    ) -> Tensor:
        """The hook ``local_loss`` for the sum as the paper prints it."""
        z = seen["logits"] - self.margins(clients, seen["logits"])
        own = torch.arange(z.shape[1], device=z.device) == batch[1][:, None]
        others = (counts(clients, z) > 0) & ~own
        has_others = others.any(1, keepdim=True)
        # A sample without other classes keeps all of them, so that every gradient is defined.
        among = z.masked_fill(has_others & ~others, -torch.inf).logsumexp(1)
        return loss + torch.where(has_others[:, 0], among - z.logsumexp(1), 0.0).mean()


def counts(clients: Clients, logits: Tensor) -> Tensor:
    """Return N_i ``(1, C)``; 0 for outputs beyond the data's classes."""
    n = clients.label_counts
    return pad(n, (0, logits.shape[1] - n.shape[1]))
