"""FedGMT: distillation from an average of the global models, with FedDyn's duals.

Y. Li, T. Liu, Y. Cui, M. Hu, X. Li: One Arrow, Two Hawks: Sharpness-aware Minimization for
Federated Learning via Global Model Trajectory (ICML 2025),
https://openreview.net/forum?id=80mK2Mqaph. The loss keeps a client near the predictions of an
exponential average of w^0, w^1, …, which stands for a flat region of the global loss. FedGMT
combines this class with ``DynamicRegularization(penalty=0.1, pull=False)``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from fl_lightning.callback import (
    BelowOne,
    Clients,
    Coefficient,
    FederatedCallback,
    Paper,
    Schedule,
    Server,
    ServerState,
)


class TrajectoryDistillation(FederatedCallback):
    """Add γ τ² KL(softmax(z_e/τ) ‖ softmax(z/τ)) to the loss: a sum over classes, a mean over B.

    z_e are the logits of the model e, in evaluation mode. e starts at w^0; each round begins with
    e ← α e + (1 - α) w^t.
    Sent: e down. Kept: nothing. Each step takes one gradient and one forward pass at e.

    Args:
        decay: α, from 0 to below 1; 0 distils from w^t.
        strength: γ; 0 is FedAvg.
        temperature: τ, above 0.

    Raises:
        UserError: a value is not accepted.

    Example:
        In round 0 e is w^0. So with one local step the method equals FedAvg.

        >>> from fl_lightning.callbacks import TrajectoryDistillation
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(TrajectoryDistillation(), rounds=1, local_steps=1)
        >>> run.global_vector.allclose(tiny_run(rounds=1, local_steps=1).global_vector)
        True
    """

    title = "trajectory distillation"
    paper = Paper("li2025fedgmt")
    neutral = {"strength": 0.0}
    every_round = True  # e follows w even in rounds that no client finishes
    taps = {"logits": "last"}
    cannot_run_with = {"parts": "the average of parts that are not averaged is undefined"}
    strength = Coefficient(least=0)
    temperature = Coefficient(above=0)
    e = ServerState(initial="initial_model", sent=True, synchronised=False)

    def __init__(
        self,
        decay: BelowOne = 0.95,
        strength: float | Schedule = 1.0,
        temperature: float | Schedule = 3.0,
    ) -> None:
        super().__init__()
        self.decay = decay
        self.strength = strength
        self.temperature = temperature

    def on_round_start(self, server: Server) -> None:
        self.e = self.decay * self.e + (1 - self.decay) * server.w

    def local_loss(
        self, clients: Clients, loss: Tensor, seen: dict[str, Any], batch: Any
    ) -> Tensor:
        teacher = clients.seen_at(self.e)["logits"] / self.temperature
        student = seen["logits"] / self.temperature
        apart = kl_div(
            log_softmax(student, 1), log_softmax(teacher, 1), log_target=True, reduction="batchmean"
        )
        return loss.add(apart, alpha=self.strength * (self.temperature * self.temperature))
