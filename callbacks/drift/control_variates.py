"""SCAFFOLD: control variates.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh: SCAFFOLD: Stochastic
Controlled Averaging for Federated Learning (ICML 2020), Algorithm 1, arXiv:1910.06378. Each local
step follows g + c - c_i, where c_i estimates the client's mean gradient, and c is the mean of c_i
over all clients.
"""

from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from fl_lightning.callback import (
    MEAN_GRADIENT,
    UNIFORM_OPTIMUM,
    Above,
    AtMost,
    Clients,
    ClientState,
    FederatedCallback,
    Paper,
    Scratch,
    Server,
    ServerState,
    Upload,
)


class ControlVariates(FederatedCallback):
    """g ← g + c - c_i; then c_i⁺ = c_i - c + (x_{i,0} - x_{i,K}) / (η K_i).

    At the server c ← c + (n/m) mean(c_i⁺ - c_i). With ``momentum`` γ instead (FedMoSWA)
    c ← (1 - γ) c + γ mean c_i⁺, which is no longer the mean of all c_i.
    Sent: c down and c_i⁺ - c_i up; with ``momentum`` c_i⁺ - c up. Kept: c_i by each client, c by
    the server.

    Args:
        estimate: ``"displacement"`` (Option II, above) or ``"gradient"`` (Option I: c_i⁺ =
            ∇f_i(w^t), including weight decay, which costs one pass over the client's samples per
            round).
        momentum: γ, above 0, at most 1; None: the rule above.

    Example:
        c is the mean of all c_i, after every round.

        >>> import torch
        >>> from fl_lightning.callbacks import ControlVariates
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(ControlVariates(), participation="all")
        >>> c_i = [run.client_rows.read("ControlVariates.c_i", i) for i in range(6)]
        >>> torch.stack(c_i).mean(0).allclose(run.server_states["ControlVariates.c"])
        True
    """

    title = "SCAFFOLD"
    paper = Paper(
        "karimireddy2020scaffold",
        beside={
            "DynamicRegularization": "gao2022feddc",
            "SharpnessAwareMinimization": "dai2023fedgamma",
            "DecayWithinRound": "liu2025fedswa",
        },
        vectors=2,
    )
    moves_start = False
    notes = (UNIFORM_OPTIMUM, MEAN_GRADIENT)
    c_i = ClientState(synchronised=True)
    c = ServerState(sent=True, synchronised=True)
    correction = Scratch()
    change = Upload()

    def __init__(
        self,
        estimate: Literal["displacement", "gradient"] = "displacement",
        momentum: Annotated[float, Above(0), AtMost(1)] | None = None,
    ) -> None:
        super().__init__()
        self.estimate = estimate
        self.momentum = momentum

    def on_local_start(self, clients: Clients) -> None:
        self.correction[clients] = self.c - self.c_i[clients]

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient.add_(self.correction[clients])

    def on_local_end(self, clients: Clients) -> None:
        if self.estimate == "gradient":
            change = clients.full_gradient(clients.w) - self.c_i[clients]
        else:
            change = clients.mean_gradient - self.c
        # At rate 0 a client does not move, and c_i does not change.
        change = change * (clients.elapsed > 0)
        self.c_i[clients] += change
        if self.momentum is not None:
            change = self.c_i[clients] - self.c
        self.change[clients] = change

    def on_server_update(self, server: Server) -> None:
        share = self.momentum
        if share is None:
            share = server.n / server.num_clients
        self.c += share * self.change.mean()
