"""A-FedPD: the duals of absent clients move with those of the participants.

Y. Sun, L. Shen, D. Tao: A-FedPD: Aligning Dual-Drift is All Federated Primal-Dual Learning Needs
(NeurIPS 2024), arXiv:2409.18915. In FedDyn the dual of a client that is rarely drawn grows stale.
Here it moves by the participants' mean, as if the client had taken part (virtual updates).
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


class AlignedDuals(FederatedCallback):
    """g ← g - λ_i + a (x - w), with λ_i = deviation_i + λ.

    With u_i = x_{i,K} - w and its uniform mean ū over the participants: λ ← λ - a ū, d ← d - λ/a,
    and for participants deviation_i ← deviation_i - a (u_i - ū). So the dual of an absent client
    moves by -a ū. Σ_i deviation_i stays 0. If all clients take part, it is FedDyn.
    Sent: λ down. Kept by each client: deviation_i.

    Args:
        penalty: a > 0.

    Raises:
        UserError: penalty is not above 0, or neither a finite number nor a schedule.

    Example:
        the deviations add up to 0.

        >>> from fl_lightning.callbacks import AlignedDuals
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(AlignedDuals(), participation="all")
        >>> rows = [run.client_rows.read("AlignedDuals.deviation", i) for i in range(6)]
        >>> bool(sum(rows).abs().max() < 1e-12)
        True
    """

    title = "A-FedPD"
    paper = Paper("sun2024afedpd", vectors=2)
    moves_start = False
    cannot_run_with = {"parts": "the duals of parts that are not averaged are undefined"}
    notes = (UNIFORM_OPTIMUM,)
    not_over_sites = "the rows of clients' duals, which it changes"
    penalty = Coefficient(above=0)
    deviation = ClientState(synchronised=False)
    lambda_mean = ServerState(sent=True, synchronised=False)
    anchor = Scratch()
    moved = Upload(sent="derived from x")

    def __init__(self, penalty: float | Schedule = 0.1) -> None:
        super().__init__()
        self.penalty = penalty

    def on_local_start(self, clients: Clients) -> None:
        dual = self.deviation[clients] + self.lambda_mean
        self.anchor[clients] = dual.add(clients.w, alpha=self.penalty)

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient.add_(clients.x, alpha=self.penalty).sub_(self.anchor[clients])

    def on_local_end(self, clients: Clients) -> None:
        moved = clients.x - clients.w
        self.deviation[clients].sub_(moved, alpha=self.penalty)
        self.moved[clients] = moved

    def on_server_update(self, server: Server) -> None:
        self.lambda_mean -= self.penalty * self.moved.mean()
        server.update -= self.lambda_mean / self.penalty

    def on_round_end(self, server: Server) -> None:
        back = self.penalty * self.moved.mean()
        for _, deviation in self.deviation.staged(server):
            deviation += back
