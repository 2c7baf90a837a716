"""FedADMM: clients send how their augmented models x_i - λ_i/a changed.

Y. Gong, Y. Li, N. M. Freris: FedADMM: A Robust Federated Deep Learning Framework with Adaptivity to
System Heterogeneity (ICDE 2022), arXiv:2204.03529. Each client minimises its augmented Lagrangian;
there is no dual at the server.
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
)


class AugmentedModels(FederatedCallback):
    """g ← g - λ_i + a (x - w); λ_i⁺ = λ_i - a (x_{i,K} - w); d = rate · Σ p_i messages.

    A client sends (x_{i,K} - y) - (λ_i⁺ - λ_i)/a.
    Sent: nothing more than by FedAvg. Kept by each client: λ_i, with ``previous="own"`` also its
    last x_{i,K}.

    Args:
        penalty: a > 0.
        rate: the server's factor; a schedule is allowed.
        previous: y. ``"received"``: w, as in the authors' code, so the message is 2 (x_{i,K} - w);
            ``"own"``: the client's own last x_{i,K}, as printed.

    Raises:
        UserError: penalty is not above 0, a value is neither a finite number nor a schedule, or
            another method decides what clients send.

    Example:
        Without drift duals are 0, and one step is two of FedAvg.

        >>> from fl_lightning.callbacks import AugmentedModels
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(AugmentedModels(rate=0.5), rounds=1, local_steps=1)
        >>> run.global_vector.allclose(tiny_run(rounds=1, local_steps=1).global_vector)
        True
    """

    title = "FedADMM"
    paper = Paper("gong2022fedadmm")
    order = -1
    moves_start = False
    cannot_run_with = {"parts": "the duals of parts that are not averaged are undefined"}
    penalty = Coefficient(above=0)
    rate = Coefficient()
    lambda_i = ClientState(synchronised=False)
    anchor = Scratch()

    def __init__(
        self,
        penalty: float | Schedule = 0.01,
        rate: float | Schedule = 1.0,
        previous: Literal["received", "own"] = "received",
    ) -> None:
        super().__init__()
        self.penalty = penalty
        self.rate = rate
        self.previous = previous
        if previous == "own":
            self.declare("last", ClientState(initial="initial_model", synchronised=False))

    def on_local_start(self, clients: Clients) -> None:
        self.anchor[clients] = self.lambda_i[clients].add(clients.w, alpha=self.penalty)

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient.add_(clients.x, alpha=self.penalty).sub_(self.anchor[clients])

    def on_local_end(self, clients: Clients) -> None:
        self.lambda_i[clients].sub_(clients.x - clients.w, alpha=self.penalty)

    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        # -(λ_i⁺ - λ_i)/a is x_{i,K} - w.
        moved = clients.x - clients.w
        if self.previous == "received":
            return moved + moved
        message: Tensor = (clients.x - self.last[clients]) + moved
        self.last[clients] = clients.x
        return message

    def on_server_update(self, server: Server) -> None:
        server.update *= self.rate
