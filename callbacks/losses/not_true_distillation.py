"""FedNTD: distillation preserves the server model's predictions for the other classes.

G. Lee, M. Jeong, Y. Shin, S. Bae, S.-Y. Yun: Preservation of the Global Knowledge by Not-True
Distillation in Federated Learning (NeurIPS 2022), arXiv:2106.03097. A client minimises CE + β τ²
KL(q̃(w^t) ‖ q̃(x)), q̃ the softmax of logits/τ over the classes that are not the sample's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from fl_lightning.callback import (
    CLASS_LABELS,
    Clients,
    Coefficient,
    FederatedCallback,
    Paper,
    Schedule,
)


class NotTrueDistillation(FederatedCallback):
    """The loss gains β τ² KL(q̃(w^t) ‖ q̃(x)), summed over classes, mean over the batch.

    The teacher w^t is in evaluation mode. Under relaxed initialization, too, it is w^t and not the
    client's start. If another method changes the tapped output (LogitCalibration), both logits are
    the module's own, without that method's margins. The margins correct a client's cross entropy
    for its own labels, and the server's knowledge of the other classes needs no margin.
    Sent and kept: nothing more than by FedAvg. Each step takes one gradient and one forward pass of
    the teacher.

    Args:
        strength: β, from 0; 0 is FedAvg.
        temperature: τ, above 0.

    Example:
        In the first step of a round student and teacher are equal, so with one step it is FedAvg.

        >>> from fl_lightning.callbacks import NotTrueDistillation
        >>> from fl_lightning.testing import tiny_run
        >>> def apart(**given):
        ...     ours = tiny_run(NotTrueDistillation(), **given).global_vector
        ...     return float((ours - tiny_run(**given).global_vector).abs().max())
        >>> apart(local_steps=1) < 1e-15, apart(local_steps=2) > 1e-4
        (True, True)
    """

    title = "FedNTD"
    paper = Paper("lee2022fedntd")
    tolerates_staleness = True
    neutral = {"strength": 0.0}
    taps = {"logits": "last"}
    notes = (CLASS_LABELS,)
    strength = Coefficient(least=0)
    temperature = Coefficient(above=0)

    def __init__(
        self, strength: float | Schedule = 1.0, temperature: float | Schedule = 1.0
    ) -> None:
        super().__init__()
        self.strength = strength
        self.temperature = temperature

    def local_loss(
        self, clients: Clients, loss: Tensor, seen: dict[str, Any], batch: Any
    ) -> Tensor:
        teacher = clients.seen_at(clients.w)["logits"]
        student = not_true(seen["logits"] / self.temperature, batch[1])
        known = not_true(teacher / self.temperature, batch[1])
        apart = kl_div(
            log_softmax(student, 1), log_softmax(known, 1), log_target=True, reduction="batchmean"
        )
        return loss.add(apart, alpha=self.strength * (self.temperature * self.temperature))


def not_true(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logits ``(B, C - 1)`` of the classes that are not the sample's own."""
    others = torch.arange(logits.shape[1] - 1, device=logits.device)
    # Skip the true class: indices behind it increase by one.
    kept: Tensor = logits.gather(1, others + (others >= labels[:, None]))
    return kept
