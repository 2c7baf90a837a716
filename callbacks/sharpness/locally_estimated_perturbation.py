"""FedLESAM: sharpness-aware local steps, by a perturbation that costs no gradient.

Z. Fan, S. Hu, J. Yao, G. Niu, Y. Zhang, M. Sugiyama, Y. Wang: Locally Estimated Global
Perturbations are Better than Local Perturbations for Federated Sharpness-aware Minimization (ICML
2024), arXiv:2405.18890. The client received a global model in its previous active round and another
one in this round. The difference of these two models estimates the global gradient, and the
perturbation goes along it. With ControlVariates it is FedLESAM-S, with DynamicRegularization
FedLESAM-D.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fl_lightning.callback import (
    Clients,
    ClientState,
    Coefficient,
    FederatedCallback,
    Paper,
    Schedule,
    Scratch,
    Server,
    ServerState,
)


class LocallyEstimatedPerturbation(FederatedCallback):
    """The gradient is taken at x + e, e = ρ (o_i - w^t)/‖o_i - w^t‖ in the whole round; then o_i ←
    w^t.

    o_i is the model that client i received in its previous round. e is 0 in its first round, and if
    o_i = w^t. The norm is over all D coordinates. One gradient per step; the logged loss is at x +
    e.
    Sent: nothing more than by FedAvg; with ``source="last"`` one vector more down. Kept: o_i by
    each client; with ``source="last"`` only w^{t-1}, by the server.

    Args:
        radius: ρ, from 0; 0 is FedAvg.
        source: ``"received"``: the rule above. ``"last"``, as in the authors' code: o_i = w^{t-1}
            for all clients, which the server sends; a round in which no client finished does not
            count.

    Example:
        In round 0 no client has received a model before, so it is FedAvg's, at one gradient per
        step.

        >>> from fl_lightning.callbacks import LocallyEstimatedPerturbation
        >>> from fl_lightning.testing import tiny_run
        >>> one = tiny_run(LocallyEstimatedPerturbation(), rounds=1)
        >>> fedavg = tiny_run(rounds=1)
        >>> one.global_vector.equal(fedavg.global_vector)
        True
        >>> ours, theirs = one.trainer.callback_metrics, fedavg.trainer.callback_metrics
        >>> bool(ours["cost/gradients"] == theirs["cost/gradients"])
        True
    """

    title = "FedLESAM"
    paper = Paper("fan2024fedlesam")
    tolerates_staleness = True
    moves_start = False
    neutral = {"radius": 0.0}
    radius = Coefficient(least=0)
    e = Scratch()

    def __init__(
        self,
        radius: float | Schedule = 0.1,
        source: Literal["received", "last"] = "received",
    ) -> None:
        super().__init__()
        self.radius = radius
        self.source = source
        if source == "last":
            self.declare("previous", ServerState("current_model", sent=True, synchronised=False))
        else:
            self.declare("received", ClientState("current_model", synchronised=False))

    def on_local_start(self, clients: Clients) -> None:
        old = self.received[clients] if self.source == "received" else self.previous
        # Before round 0 no client was given a model.
        if not clients.round:
            old = clients.w
        back = (old - clients.w).expand_as(clients.x)
        self.e[clients] = back * (self.radius / clients.norm(back)).nan_to_num(posinf=0.0)

    def perturbation(self, clients: Clients) -> Tensor:
        return self.e[clients]

    def on_local_end(self, clients: Clients) -> None:
        if self.source == "received":
            self.received[clients] = clients.w

    def on_server_update(self, server: Server) -> None:
        if self.source == "last":
            self.previous = server.given
