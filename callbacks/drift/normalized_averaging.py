"""FedNova: normalized averaging.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor: Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization (NeurIPS 2020), arXiv:2007.07481. Clients that take more local
steps do not pull the mean towards their own objectives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.callback import (
    Clients,
    FederatedCallback,
    Note,
    Paper,
    RunFacts,
    Server,
    Upload,
)

# Callbacks that add μ (x - w) to the gradient.
PULLS = ("ProximalTerm", "DynamicRegularization", "MixedAscent")


class NormalizedAveraging(FederatedCallback):
    """d = (Σ p_i τ_i) Σ p_i (x_{i,K} - w)/τ_i with τ_i = ‖a_i‖₁.

    τ_i is K_i, or with momentum ρ Σ_{j=1}^{K_i} (1 - ρ^j)/(1 - ρ). With equal K_i it is FedAvg.
    FedNova raises an error with partial averaging, because a kept part moves over several
    rounds.
    Sent and kept: nothing more, because the server knows K_i.

    Raises:
        UserError: the clients' momentum is Nesterov's, dampened or kept over rounds, for which τ_i
            is different.

    Example:
        If all clients take equally many steps it is FedAvg, and otherwise it is not.

        >>> from fl_lightning.callbacks import NormalizedAveraging
        >>> from fl_lightning.testing import tiny_run
        >>> for work in ({"local_steps": 4}, {"local_epochs": 2}):
        ...     fednova, fedavg = tiny_run(NormalizedAveraging(), **work), tiny_run(**work)
        ...     print(fednova.global_vector.allclose(fedavg.global_vector))
        True
        False
    """

    title = "FedNova"
    paper = Paper("wang2020fednova")
    sends = "x"
    cannot_run_with = {
        "step_rate": "τ_i counts steps of one rate",
        "parts": (
            "a part that is not averaged moves over several rounds, for which the paper has no norm"
        ),
    }
    notes = (
        Note(
            "{pulls} pulls clients to w, and τ_i does not count that. With a pull μ (x - w) the "
            "paper's τ_i is (1 - (1 - η μ)^K_i)/(η μ), which is below K_i, so clients that take "
            "many steps get less weight here than in the paper.",
            when=lambda method, run: bool(pulls(run)),
            pulls=lambda method, run: " and ".join(pulls(run)),
        ),
    )
    tau = Upload(sent=False, shape=(), dtype=torch.float64, least=0)  # the server knows K_i

    def work(self, clients: Clients) -> Tensor:
        """Return τ_i ``(n, 1)``: the length of K_i steps with gradient 1, divided by η."""
        k = clients.steps
        rho = clients.momentum
        return (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)

    def on_local_end(self, clients: Clients) -> None:
        self.tau[clients] = self.work(clients)[:, 0]

    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        return (update / self.work(clients)).to(update.dtype)

    def aggregate(self, server: Server) -> Tensor:
        return self.tau.weighted() * server.update


def pulls(run: RunFacts) -> list[str]:
    """Return the callbacks of the run that pull clients to w."""
    return [name for name in run.companions if name in PULLS]
