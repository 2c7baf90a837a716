"""FedCM: client-level momentum.

J. Xu et al.: FedCM: Federated Learning with Client-level Momentum (2021). Each local step mixes the gradient with Δ,
the mean direction in which the last round's participants moved.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import Clients, Coefficient, FederatedCallback, Schedule, Server, ServerState, Upload


class ClientMomentum(FederatedCallback):
    """g ← α g + (1 - α) Δ; then Δ ← mean of (x_{i,0} - x_{i,K}) / (η K_i). Weight decay acts beside it, and is in Δ.

    Args:
        alpha: α; 1 is FedAvg.
    """

    title = "FedCM"
    neutral = {"alpha": 1.0}
    alpha = Coefficient()
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
