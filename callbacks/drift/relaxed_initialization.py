"""FedInit: relaxed initialization.

Y. Sun, L. Shen, D. Tao: Understanding How Consistency Works in Federated Learning via Stage-wise
Relaxed Initialization (NeurIPS 2023), Algorithm 1, arXiv:2306.05706. Each client starts beyond w,
as seen from the point where it last ended: x_{i,0} = w + β (w - last_i).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fl_lightning.callback import (
    Clients,
    ClientState,
    Coefficient,
    FederatedCallback,
    Note,
    Paper,
    RunFacts,
    Schedule,
    Server,
    ServerState,
    Upload,
)


def unbounded(method: RelaxedInitialization, run: RunFacts) -> bool:
    """Return whether a constant drift is amplified without bound."""
    beta = vars(method)["beta"]
    grows = method.average == "models" and method.offset != "centred" and run.n < run.m
    return grows and not isinstance(beta, Schedule) and beta >= run.n / (run.m - run.n)


class RelaxedInitialization(FederatedCallback):
    """x_{i,0} = w^t + β (w^t - x_{i,K} of the client's latest round).

    Before a client's first round its latest x_{i,K} is w^0. With ``average="models"`` and β ≥ 0 a
    constant drift is amplified without bound if and only if β ≥ n/(m - n); a warning says so.
    Sent: nothing more; with ``"updates"`` x_{i,K} - x_{i,0} in place of x_{i,K}. Kept: the latest
    x_{i,K}, by each client.

    Args:
        beta: β; 0 is FedAvg; it may be negative.
        average: what the server averages. ``"models"``: x_{i,K}, as in the paper; ``"updates"``:
            x_{i,K} - x_{i,0}, as in the authors' simulator.
        offset: ``"own"``: the rule above. Two control arms each take a part of this offset:
            ``"mean"`` takes β (w - l), the same for all clients, and ``"centred"`` takes β (l -
            last_i). Here l is the mean of last_i over all m clients; last_i is w^0 for clients that
            never trained. The server sends l, and participants send x_{i,K} - last_i, with which
            the server updates l. The control arms have no defined meaning with partial averaging,
            and are refused.

    Example:
        With learning rate 0 a round ends where it starts, at w + β (w - last_i).

        >>> from fl_lightning.callbacks import RelaxedInitialization
        >>> from fl_lightning.schedules import Steps
        >>> from fl_lightning.testing import tiny_run
        >>> options = {"participation": "all", "lr_decay": Steps({0: 1.0, 1: 0.0})}
        >>> one, two = (
        ...     tiny_run(RelaxedInitialization(beta=0.1), rounds=t, **options) for t in (1, 2)
        ... )
        >>> last = one.client_rows.read("RelaxedInitialization.last", 0)
        >>> start = two.client_rows.read("RelaxedInitialization.last", 0)
        >>> start.allclose(one.global_vector + 0.1 * (one.global_vector - last))
        True
    """

    title = "FedInit"
    paper = Paper("sun2023fedinit", beside={"Gossip": "li2024oledfl"})
    tolerates_staleness = True
    neutral = {"beta": 0.0}
    sends = "displacement"  # what transmit sends, with average="updates"
    beta = Coefficient()
    last = ClientState(initial="initial_model", synchronised=False)
    notes = (
        Note(
            "beta={beta:g} with {n} of {m} clients per round amplifies a constant drift without "
            "bound. Give beta below n/(m - n) = {bound:.3g}, or average='updates'.",
            when=unbounded,
            bound=lambda method, run: run.n / (run.m - run.n),
        ),
    )

    def __init__(
        self,
        beta: float | Schedule = 0.1,
        average: Literal["models", "updates"] = "models",
        offset: Literal["own", "mean", "centred"] = "own",
    ) -> None:
        super().__init__()
        self.beta = beta
        self.average = average
        self.offset = offset
        if average == "updates":
            self.use("transmit", self.displacement)
        if offset != "own":
            self._keep_the_mean()

    def on_local_start(self, clients: Clients) -> None:
        if self.offset == "own":
            clients.x += self.beta * (clients.x - self.last[clients])
        elif self.offset == "mean":
            clients.x += self.beta * (clients.x - self.last_mean)
        else:
            clients.x += self.beta * (self.last_mean - self.last[clients])

    def on_local_end(self, clients: Clients) -> None:
        if self.offset != "own":
            self.moved_on[clients] = clients.x - self.last[clients]
        self.last[clients] = clients.x

    def on_server_update(self, server: Server) -> None:
        if self.offset != "own":
            self.last_mean += self.moved_on.sum() / server.num_clients

    def displacement(self, clients: Clients, update: Tensor) -> Tensor:
        """The message of a client with ``average="updates"``."""
        return clients.x - clients.origin

    def _keep_the_mean(self) -> None:
        """Declare the states of the control arms: l at the server, and the upload of each change of
        last_i.
        """
        self.declare(
            "last_mean", ServerState(initial="initial_model", sent=True, synchronised=False)
        )
        self.declare("moved_on", Upload())
        self.cannot_run_with = {
            "parts": f"offset={self.offset!r} is not defined where clients keep parts"
        }
