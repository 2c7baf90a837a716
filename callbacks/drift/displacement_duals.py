"""FedDyn as FL-Simulator runs it, the simulator of FedInit's and FedSMOO's authors.

D. A. E. Acar et al.: Federated Learning Based on Dynamic Regularization (ICLR 2021),
arXiv:2111.04263. The rule was read in github.com/woodenchild95/FL-Simulator. Together with
``GlobalSharpnessAwareMinimization(ignore_last=True)`` it is FedSMOO as that simulator runs it.
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
    Server,
    ServerState,
    Upload,
)


class DisplacementDuals(FederatedCallback):
    """g ← clip(g + a (h_i - x_{i,0})) + a x; h_i ← h_i + x_{i,K} - x_{i,0}.

    The server's model is the mean of x_{i,K} plus the mean of all h_i. It differs from
    DynamicRegularization, where λ_i is -a h_i: the pull is towards the client's own start x_{i,0},
    which is not w under relaxed initialization, and a x is not clipped, as weight decay is not.
    Sent: nothing more, unless clients start from a point other than w. Kept: h_i by each client,
    their mean by the server.

    Args:
        penalty: a > 0.

    Example:
        If clients start at w and nothing is clipped, it is DynamicRegularization.

        >>> from fl_lightning.callbacks import DisplacementDuals, DynamicRegularization
        >>> from fl_lightning.testing import tiny_run
        >>> ours, papers = (tiny_run(m()) for m in (DisplacementDuals, DynamicRegularization))
        >>> ours.global_vector.allclose(papers.global_vector)
        True
    """

    title = "FedDyn of FL-Simulator"
    paper = Paper("acar2021feddyn")
    moves_start = False
    notes = (UNIFORM_OPTIMUM,)
    cannot_run_with = {
        "parts": "the simulator does not say what h_i is where a part is not averaged",
        "transmit": (
            "the server adds to the mean of the clients' models, so it needs them as they are "
            "(RelaxedInitialization with average='models', or -c method/ri, sends them)"
        ),
    }
    penalty = Coefficient(above=0)
    h_i = ClientState(synchronised=True)
    h_mean = ServerState(synchronised=True)
    moved = Upload(sent="derived")

    def __init__(self, penalty: float | Schedule = 0.1) -> None:
        super().__init__()
        self.penalty = penalty

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient.add_(self.h_i[clients] - clients.start, alpha=self.penalty)

    def on_direction(self, clients: Clients, direction: Tensor) -> None:
        direction.add_(clients.x, alpha=self.penalty)

    def on_local_end(self, clients: Clients) -> None:
        moved = clients.x - clients.start
        self.h_i[clients] += moved
        self.moved[clients] = moved

    def on_server_update(self, server: Server) -> None:
        self.h_mean += self.moved.sum() / server.num_clients
        server.update += self.h_mean
