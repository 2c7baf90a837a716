"""FedProx: a pull towards the server's model in the local steps.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith: Federated Optimization in
Heterogeneous Networks (MLSys 2020), Algorithm 2, arXiv:1812.06127. Each client minimises f_i(x) +
(μ/2)‖x - w‖² (the norm is squared).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fl_lightning.callback import Clients, Coefficient, FederatedCallback, Paper, Schedule


class ProximalTerm(FederatedCallback):
    """g ← g + μ (x - w^t), or g ← g + μ (x - x_{i,0}).

    The pull is towards w^t under relaxed initialization too.
    Sent and kept: nothing more than by FedAvg.

    Args:
        mu: μ, from 0; 0 is FedAvg.
        anchor: to where the pull leads. ``"w"``: the server's model; ``"start"``: the point from
            which the client started, as in DFedCata, which has no server.

    Example:
        without a pull it is FedAvg, to the last bit.

        >>> from fl_lightning.callbacks import ProximalTerm
        >>> from fl_lightning.testing import tiny_run
        >>> tiny_run(ProximalTerm(mu=0.0)).global_vector.equal(tiny_run().global_vector)
        True
    """

    title = "FedProx"
    paper = Paper("li2020fedprox", beside={"Gossip": "li2024dfedcata"})
    tolerates_staleness = True
    neutral = {"mu": 0.0}
    mu = Coefficient(least=0)

    def __init__(self, mu: float | Schedule = 0.01, anchor: Literal["w", "start"] = "w") -> None:
        super().__init__()
        self.mu = mu
        self.anchor = anchor

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        towards = clients.w if self.anchor == "w" else clients.start
        gradient.add_(clients.x - towards, alpha=self.mu)
