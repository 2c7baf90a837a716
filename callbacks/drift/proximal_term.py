"""FedProx: a pull towards the server's model in the local steps.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith: Federated Optimization in
Heterogeneous Networks (MLSys 2020), Algorithm 2, arXiv:1812.06127. Each client minimises f_i(x) +
(μ/2)‖x - w‖² (the norm is squared).
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import Clients, Coefficient, FederatedCallback, Paper, Schedule


class ProximalTerm(FederatedCallback):
    """g ← g + μ (x - w^t).

    The pull is towards w^t under relaxed initialization too.
    Sent and kept: nothing more than by FedAvg.

    Args:
        mu: μ; 0 is FedAvg.

    Raises:
        UserError: mu is neither a finite number nor a schedule.

    Example:
        without a pull it is FedAvg, to the last bit.

        >>> from fl_lightning.callbacks import ProximalTerm
        >>> from fl_lightning.testing import tiny_run
        >>> tiny_run(ProximalTerm(mu=0.0)).global_vector.equal(tiny_run().global_vector)
        True
        >>> tiny_run(ProximalTerm(mu=0.1)).global_vector.equal(tiny_run().global_vector)
        False
    """

    title = "FedProx"
    paper = Paper("li2020fedprox")
    tolerates_staleness = True
    neutral = {"mu": 0.0}
    mu = Coefficient(least=0)

    def __init__(self, mu: float | Schedule = 0.01) -> None:
        super().__init__()
        self.mu = mu

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient.add_(clients.x - clients.w, alpha=self.mu)
