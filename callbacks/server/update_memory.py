"""FedVARP and MIFA: the server remembers each client's latest update.

D. Jhunjhunwala, P. Sharma, A. Nagarkatti, G. Joshi: FedVARP: Tackling the Variance Due to Partial
Client Participation in Federated Learning (UAI 2022), arXiv:2207.14130. X. Gu, K. Huang, J. Zhang,
L. Huang: Fast Federated Learning in the Presence of Arbitrary Device Unavailability (NeurIPS 2021),
arXiv:2106.04159. The latest updates of absent clients stand for them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.callback import (
    Clients,
    ClientState,
    FederatedCallback,
    Paper,
    Server,
    ServerState,
    Upload,
)


class UpdateMemory(FederatedCallback):
    """d = s (ȳ + mean_S δ_i) or s (ȳ + (1/m) Σ_S δ_i), with δ_i = u_i/s - y_i; then y_i ← u_i/s.

    ȳ ← ȳ + (1/m) Σ_S δ_i is the mean of all y_i. The weights p_i play no part. If all clients take
    part, both are FedAvg with uniform weights.
    Sent: nothing more. Kept: y_i, which a server could compute from what it gets.

    Args:
        estimator: ``"saga"``: the first d, as FedVARP; ``"sag"``: the second one, as MIFA.
        units: ``"update"``: s = 1; ``"rate"``: s = η, the clients' learning rate. Where η = 0
            nothing changes.

    Raises:
        UserError: a value is not accepted; or another method decides what clients send or how it is
            combined.

    Example:
        in its first round FedVARP is FedAvg.

        >>> from fl_lightning.callbacks import UpdateMemory
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(UpdateMemory(), rounds=1)
        >>> run.global_vector.allclose(tiny_run(rounds=1).global_vector)
        True
    """

    title = "FedVARP"
    paper = Paper(
        by=lambda given: [
            "gu2021mifa" if given.get("estimator") == "sag" else "jhunjhunwala2022fedvarp"
        ]
    )
    cannot_run_with = {
        "transmit": "the server has to know the clients' updates",
        "parts": "updates of parts that are not averaged are undefined",
    }
    y = ClientState(synchronised=False)
    y_mean = ServerState(synchronised=False)
    delta = Upload(sent="derived from x")
    trained_ = Upload(sent=False, shape=(), dtype=torch.float64)  # whether η is above 0

    def __init__(
        self,
        estimator: Literal["saga", "sag"] = "saga",
        units: Literal["update", "rate"] = "update",
    ) -> None:
        super().__init__()
        self.estimator = estimator
        self.units = units
        if estimator == "sag":
            # A title belongs to the class, but this one depends on the arguments.
            vars(self)["title"] = "MIFA"

    def on_local_end(self, clients: Clients) -> None:
        u = clients.x - clients.w
        if self.units == "rate":
            u = u / clients.lr.to(u)
        trained = clients.elapsed > 0
        u = torch.where(trained, u, self.y[clients])
        self.delta[clients] = u - self.y[clients]
        self.y[clients] = u
        self.trained_[clients] = trained[:, 0].double()

    def aggregate(self, server: Server) -> Tensor:
        if not self.trained_.sum():
            return torch.zeros_like(server.update)
        share = self.delta.sum() / server.num_clients
        d = self.y_mean + (self.delta.mean() if self.estimator == "saga" else share)
        self.y_mean += share
        return d * server.client_lr.to(d) if self.units == "rate" else d
