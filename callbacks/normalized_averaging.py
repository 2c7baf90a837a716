"""FedNova: normalized averaging.

J. Wang et al.: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization (NeurIPS 2020).
Clients that take more local steps do not pull the mean towards their own objectives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.callback import Clients, FederatedCallback, Server, Upload


class NormalizedAveraging(FederatedCallback):
    """d = (Σ p_i τ_i) Σ p_i (x_{i,K} - w)/τ_i, τ_i = ‖a_i‖₁: K_i, or with momentum ρ Σ_{j=1}^{K_i} (1 - ρ^j)/(1 - ρ).

    With equal K_i it is FedAvg. Refused together with partial averaging: a kept part moves over several rounds.
    """

    title = "FedNova"
    sends = "x"
    cannot_run_with = {
        "parts": "a part that is not averaged moves over several rounds, for which the paper has no norm"
    }
    tau = Upload(sent=False, shape=(), dtype=torch.float64)  # the server knows K_i

    def work(self, clients: Clients) -> Tensor:
        """τ_i ``(n, 1)``: what the client's optimizer makes of K_i gradients of one."""
        k, rho = clients.steps, clients.momentum
        return (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)

    def on_local_end(self, clients: Clients) -> None:
        self.tau[clients] = self.work(clients)[:, 0]

    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        return (update / self.work(clients)).to(update.dtype)

    def aggregate(self, server: Server) -> Tensor:
        return self.tau.weighted() * server.update
