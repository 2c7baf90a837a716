"""pFedMe: personal models by Moreau envelopes of the clients' losses.

C. T. Dinh, N. H. Tran, T. D. Nguyen: Personalized Federated Learning with Moreau Envelopes (NeurIPS
2020), Algorithm 1, arXiv:2006.08848: the federation minimises the mean of F_i(x) = min_θ f_i(θ) +
(λ/2)‖θ - x‖², whose gradient is λ (x - θ); θ is found by some gradient steps. The paper's server
mixing β is the rate of the server optimizer.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import (
    Clients,
    ClientState,
    Coefficient,
    FederatedCallback,
    Paper,
    PositiveInt,
    Schedule,
)


class MoreauEnvelope(FederatedCallback):
    """In each local step S times θ ← θ - η_in (∇ℓ(θ) + λ (θ - x)); then the gradient for x is
    λ (x - θ).

    All S steps use the local step's batch. θ is w at the start of a client's round and goes on from
    step to step; the client uses it itself. Weight decay acts only on x.
    Sent: nothing more than by FedAvg. Kept by each client: θ. S + 1 gradients per step: one is that
    of the loss at x, whose value is logged.

    Args:
        strength: λ, above 0.
        inner_steps: S, from 1.
        inner_lr: η_in, above 0; the inner steps diverge if η_in (L + λ) > 2, where L is the
            curvature of the loss.

    Example:
        with one inner step from θ = x = w, the gradient of the first local step is λ η_in times
        FedAvg's.

        >>> from fl_lightning.callbacks import MoreauEnvelope
        >>> from fl_lightning.testing import tiny_run
        >>> arguments = dict(rounds=1, local_steps=1, local_epochs=None)
        >>> method = MoreauEnvelope(strength=10.0, inner_steps=1, inner_lr=0.1)
        >>> pfedme = tiny_run(method, **arguments)
        >>> pfedme.global_vector.allclose(tiny_run(**arguments).global_vector)
        True
    """

    title = "pFedMe"
    paper = Paper("dinh2020pfedme")
    moves_start = False
    cannot_run_with = {
        "perturbation": "the gradient of the envelope is λ (x - θ), at no perturbed point",
        "parts": "θ starts at w, and the paper has no parts that clients keep",
    }
    strength = Coefficient(above=0)
    inner_lr = Coefficient(above=0)
    theta = ClientState(initial="current_model", synchronised=False)

    def __init__(
        self,
        strength: float | Schedule = 15.0,
        inner_steps: PositiveInt = 5,
        inner_lr: float | Schedule = 0.05,
    ) -> None:
        super().__init__()
        self.strength = strength
        self.inner_steps = inner_steps
        self.inner_lr = inner_lr

    def on_local_start(self, clients: Clients) -> None:
        self.theta[clients] = clients.w

    def on_loss_gradient(self, clients: Clients, gradient: Tensor) -> Tensor:
        theta = self.theta[clients]
        for _ in range(self.inner_steps):
            theta -= self.inner_lr * (
                clients.gradient_at(theta) + self.strength * (theta - clients.x)
            )
        away: Tensor = self.strength * (clients.x - theta)
        return away

    def personal(self, clients: Clients) -> Tensor:
        return self.theta[clients]
