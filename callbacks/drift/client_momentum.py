"""FedCM: client-level momentum.

J. Xu, S. Wang, L. Wang, A. C.-C. Yao: FedCM: Federated Learning with Client-level Momentum (2021),
arXiv:2106.10874. Each local step mixes the gradient with Δ, the mean direction in which the last
round's participants moved.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import (
    MEAN_GRADIENT,
    Clients,
    Coefficient,
    FederatedCallback,
    Paper,
    Schedule,
    Server,
    ServerState,
    Upload,
)


class ClientMomentum(FederatedCallback):
    """g ← α g + (1 - α) Δ. After the round Δ ← mean over S_t of (x_{i,0} - x_{i,K}) / (η K_i).

    The optimizer adds weight decay after the mixing, so Δ contains it. Δ = 0 in the first round.
    Sent: Δ down; nothing more up, unless clients start from a point other than w. Kept: Δ by the
    server.

    Args:
        alpha: α, from 0; 1 is FedAvg.

    Example:
        Δ is the direction in which the last round moved w, if all clients take K = 4 steps at η =
        0.2.

        >>> from fl_lightning.callbacks import ClientMomentum
        >>> from fl_lightning.testing import tiny_run
        >>> options = {"local_steps": 4, "lr_decay": 1.0}
        >>> one, two = (tiny_run(ClientMomentum(), rounds=t, **options) for t in (1, 2))
        >>> delta = two.server_states["ClientMomentum.delta"]
        >>> (one.global_vector - two.global_vector).allclose(0.2 * 4 * delta)
        True
    """

    notes = (MEAN_GRADIENT,)
    title = "FedCM"
    paper = Paper("xu2021fedcm", vectors=2)
    neutral = {"alpha": 1.0}
    alpha = Coefficient(least=0)
    delta = ServerState(sent=True, synchronised=True)
    velocity = Upload(sent="derived")

    def __init__(self, alpha: float | Schedule = 0.1) -> None:
        super().__init__()
        self.alpha = alpha

    def on_loss_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient.mul_(self.alpha).add_(self.delta, alpha=1 - self.alpha)

    def on_local_end(self, clients: Clients) -> None:
        self.velocity[clients] = clients.mean_gradient

    def on_server_update(self, server: Server) -> None:
        self.delta = self.velocity.mean()
