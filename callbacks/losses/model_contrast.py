"""MOON: features are pulled towards those of the server's model, and away from those of the
client's own last model.

Q. Li, B. He, D. Song: Model-Contrastive Federated Learning (CVPR 2021), arXiv:2103.16257. A client
minimises CE + μ mean -log(e^{s⁺/τ} / (e^{s⁺/τ} + e^{s⁻/τ})), s⁺ = cos(z(x), z(w^t)), s⁻ = cos(z(x),
z(last_i)); z is the input of the last layer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import cosine_similarity, logsigmoid

from fl_lightning.callback import (
    Clients,
    ClientState,
    Coefficient,
    FederatedCallback,
    Paper,
    Schedule,
)


class ModelContrast(FederatedCallback):
    """The loss gains μ mean -log(e^{s⁺/τ} / (e^{s⁺/τ} + e^{s⁻/τ})).

    last_i is x_{i,K} of the client's latest round, and w^t in its first round, which is therefore
    FedAvg's. Both teachers are in evaluation mode, with the buffers that the client got this round.
    Under relaxed initialization, too, z(w^t) belongs to w^t, not to the client's start.
    Sent: nothing more than by FedAvg. Kept by each client: last_i. One gradient and two forward
    passes per step.

    Args:
        mu: μ, from 0; 0 is FedAvg.
        temperature: τ, above 0.

    Example:
        every client's first round is FedAvg's, to rounding.

        >>> from fl_lightning.callbacks import ModelContrast
        >>> from fl_lightning.testing import tiny_run
        >>> def apart(rounds):
        ...     ours, average = tiny_run(ModelContrast(), rounds=rounds), tiny_run(rounds=rounds)
        ...     return float((ours.global_vector - average.global_vector).detach().abs().max())
        >>> apart(1) < 1e-12, apart(3) > 1e-4
        (True, True)
    """

    title = "MOON"
    paper = Paper("li2021moon")
    tolerates_staleness = True
    neutral = {"mu": 0.0}
    taps = {"features": "last:in"}
    mu = Coefficient(least=0)
    temperature = Coefficient(above=0)
    last = ClientState(initial="current_model", synchronised=False)

    def __init__(self, mu: float | Schedule = 1.0, temperature: float | Schedule = 0.5) -> None:
        super().__init__()
        self.mu = mu
        self.temperature = temperature

    def local_loss(
        self, clients: Clients, loss: Tensor, seen: dict[str, Any], batch: Any
    ) -> Tensor:
        z = seen["features"].flatten(1)
        near = cosine_similarity(z, clients.seen_at(clients.w)["features"].flatten(1))
        far = cosine_similarity(z, clients.seen_at(self.last[clients])["features"].flatten(1))
        contrast = -logsigmoid((near - far) / self.temperature).mean()
        return loss.add(contrast, alpha=self.mu)

    def on_local_end(self, clients: Clients) -> None:
        self.last[clients] = clients.x
