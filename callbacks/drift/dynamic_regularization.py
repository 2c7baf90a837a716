"""FedDyn: dynamic regularization.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama: Federated
Learning Based on Dynamic Regularization (ICLR 2021), Algorithm 1, arXiv:2111.04263. With penalty a
(their α, FedSMOO's 1/β), each client minimises f_i(x) - ⟨λ_i, x⟩ + (a/2)‖x - w‖²; its dual λ_i
tends to its gradient at the optimum.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import (
    UNIFORM_OPTIMUM,
    Clients,
    ClientState,
    Coefficient,
    FederatedCallback,
    Paper,
    Schedule,
    Scratch,
    Server,
    ServerState,
    Upload,
)


class DynamicRegularization(FederatedCallback):
    """g ← g - λ_i + a (x - w); λ_i ← λ_i - a (x_{i,K} - w), λ ← λ - (a/m) Σ (x_{i,K} - w).

    The server adds -λ/a to its update: d ← d - λ/a. The pull is towards w^t under relaxed
    initialization too. While a is constant, λ is the mean of all λ_i.
    Sent: nothing more, because the server computes λ from x_{i,K} and w. Kept: λ_i by each client,
    λ by the server.

    Args:
        penalty: a > 0.
        pull: whether steps are pulled to w. Without the pull, g ← g - λ_i, as in FedGMT.

    Example:
        λ is the mean of all λ_i, after every round.

        >>> import torch
        >>> from fl_lightning.callbacks import DynamicRegularization
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(DynamicRegularization(), participation="all")
        >>> lambda_i = [run.client_rows.read("DynamicRegularization.lambda_i", i) for i in range(6)]
        >>> lambda_mean = run.server_states["DynamicRegularization.lambda_mean"]
        >>> torch.stack(lambda_i).mean(0).allclose(lambda_mean)
        True
    """

    title = "FedDyn"
    paper = Paper("acar2021feddyn")
    tolerates_staleness = True
    moves_start = False
    notes = (UNIFORM_OPTIMUM,)
    penalty = Coefficient(above=0)
    lambda_i = ClientState(synchronised=True)
    lambda_mean = ServerState(synchronised=True)
    anchor = Scratch()
    moved = Upload(sent="derived from x")

    def __init__(self, penalty: float | Schedule = 0.1, pull: bool = True) -> None:
        super().__init__()
        self.penalty = penalty
        self.pull = pull

    def on_local_start(self, clients: Clients) -> None:
        if not self.pull:
            self.anchor[clients] = self.lambda_i[clients]
            return
        # Each step adds a x and a vector that is fixed for the round. Computing it once saves a
        # vector per step.
        self.anchor[clients] = self.lambda_i[clients].add(clients.w, alpha=self.penalty)

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        if self.pull:
            gradient.add_(clients.x, alpha=self.penalty)
        gradient.sub_(self.anchor[clients])

    def on_local_end(self, clients: Clients) -> None:
        moved = clients.x - clients.w
        self.lambda_i[clients].sub_(moved, alpha=self.penalty)
        self.moved[clients] = moved

    def on_server_update(self, server: Server) -> None:
        self.lambda_mean -= self.penalty / server.num_clients * self.moved.sum()
        server.update -= self.lambda_mean / self.penalty
