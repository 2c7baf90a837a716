"""q-FedAvg: clients with a larger loss count for more.

T. Li, M. Sanjabi, A. Beirami, V. Smith: Fair Resource Allocation in Federated Learning (ICLR 2020),
arXiv:1905.10497, Algorithm 2. The federation minimises Σ F_i^{q+1}/(q + 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.callback import (
    Clients,
    ClientState,
    Coefficient,
    FederatedCallback,
    Paper,
    Schedule,
    Server,
)

LEAST = 1e-10


class FairAggregation(FederatedCallback):
    """d = Σ F_i^q u_i / Σ (q F_i^{q-1} ‖u_i‖²/η + F_i^q).

    F_i is the client's loss over its training samples at the w that it gets (in evaluation mode,
    before it trains; at least 10⁻¹⁰), and u_i is the update that it transmitted. The weights p_i
    play no part. d = 0 where η = 0. This method costs one pass over each participant's samples per
    round, and the server holds all updates of a round at once.
    Sent: F_i, a number, up. Kept by each client: that number.

    Args:
        q: at least 0; 0 is FedAvg with uniform weights.

    Example:
        with q = 0 it is FedAvg.

        >>> from fl_lightning.callbacks import FairAggregation
        >>> from fl_lightning.testing import tiny_run
        >>> tiny_run(FairAggregation(q=0.0)).global_vector.allclose(tiny_run().global_vector)
        True
    """

    title = "q-FedAvg"
    paper = Paper("li2020qfedavg")
    moves_start = False
    cannot_run_with = {"parts": "its weights would be of parts that are not averaged, too"}
    q = Coefficient(least=0)
    loss = ClientState(
        shape=(), dtype=torch.float64, synchronised=False, reported=True, least=LEAST
    )

    def __init__(self, q: float | Schedule = 0.1) -> None:
        super().__init__()
        self.q = q

    def on_local_start(self, clients: Clients) -> None:
        self.loss[clients] = clients.evaluate(clients.w)["loss"][:, 0].clamp(min=LEAST)

    def on_local_end(self, clients: Clients) -> None:
        # A client without a finite loss has no weight: it diverged, as one without a finite model.
        known = self.loss[clients].isfinite()[:, None]
        clients.x = torch.where(known, clients.x, torch.nan)

    def aggregate(self, server: Server, updates: Tensor) -> Tensor:
        u = updates.double()
        loss = torch.cat([rows for _, rows in self.loss.staged(server)]).to(u)
        # Use η in float64, as the clients' steps do.
        rate = server.client_lr.double()
        weights = loss**self.q
        scale = (self.q * loss ** (self.q - 1) * u.square().sum(1) / rate + weights).sum()
        d = (weights[:, None] * u).sum(0) / scale
        return torch.where(rate > 0, d, 0.0)
