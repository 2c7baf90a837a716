"""FedProx: a pull to the server's model in the local steps.

T. Li et al.: Federated Optimization in Heterogeneous Networks (MLSys 2020). Each client minimises
f_i(x) + (μ/2)‖x - w‖², the norm squared.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import Clients, Coefficient, FederatedCallback, Schedule


class ProximalTerm(FederatedCallback):
    """g ← g + μ (x - w^t); to w^t under relaxed initialization too.

    Args:
        mu: μ; 0 is FedAvg.
    """

    title = "FedProx"
    neutral = {"mu": 0.0}
    mu = Coefficient()

    def __init__(self, mu: float | Schedule = 0.01) -> None:
        super().__init__()
        self.mu = mu

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient.add_(clients.x - clients.w, alpha=self.mu)
