"""Scaffnew: local gradient steps with a control variate; a coin decides after each step whether
clients communicate.

K. Mishchenko, G. Malinovsky, S. Stich, P. Richtárik: ProxSkip: Yes! Local Gradient Steps Provably
Lead to Communication Acceleration! Finally! (ICML 2022), Algorithm 2, arXiv:2202.09357. In each
step all clients communicate with probability p, so a round has a geometric number of steps. h_i,
the client's share of the gradient at the optimum, corrects its drift.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from fl_lightning.callback import (
    Above,
    AtMost,
    Clients,
    ClientState,
    FederatedCallback,
    Paper,
    Refusal,
    RunFacts,
    Server,
    ServerState,
)

_OF_THE_MEAN = (
    "its control variates add up to 0 only where the clients' mean is the next model, and what "
    "they get"
)


def other_settings(method: RandomSkips, run: RunFacts) -> bool:
    """Return whether the run has settings for which the rule is not defined."""
    of_clients = run.weighting != "uniform" or run.clip_norm is not None or bool(run.optimizer)
    of_server = bool(run.server) or run.server_rate != 1.0
    unfinished = run.deadline or run.on_nonfinite != "stop"
    return of_clients or of_server or unfinished or run.by_step


class RandomSkips(FederatedCallback):
    """x ← x - η (g - h_i), K^t ~ Geometric(p) times; h_i ← h_i + (p/η) (w^{t+1} - x_{i,K}).

    All clients take K^t steps; K^t follows from (seed, t). A client computes h_i when it receives
    w^{t+1}, with the η of the round before. So the ``h`` of a round is the one that its steps used.
    Σ h_i = 0. RandomSkips needs full participation, uniform weights, and plain SGD on both sides,
    with rate 1 at the server.
    Sent: nothing more than by FedAvg. Kept: h_i and x_{i,K} by each client; η, a number, by the
    server.

    Args:
        probability: p, above 0, up to 1; 1 is gradient descent on the clients' mean.

    Example:
        the control variates add up to 0, after every round.

        >>> from fl_lightning.callbacks import RandomSkips
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(RandomSkips(probability=0.5), participation="all")
        >>> total = sum(run.client_rows.read("RandomSkips.h", i) for i in range(6))
        >>> bool(total.abs().max() < 1e-14)
        True
    """

    title = "Scaffnew"
    paper = Paper("mishchenko2022proxskip")
    moves_start = False
    cannot_run_with = {
        "step_rate": "its control variates count steps of one rate",
        **dict.fromkeys(("precondition", "on_direction"), "a step is the gradient times the rate"),
        "parts": "its control variates add up to 0 only where all is averaged",
        **dict.fromkeys(("broadcast", "transmit", "on_updates", "aggregate"), _OF_THE_MEAN),
        **dict.fromkeys(("DynamicRegularization", "MixedAscent"), _OF_THE_MEAN),
        "SystemHeterogeneity": "all clients take the same number of steps, and all of them finish",
    }
    notes = (
        Refusal(
            "Scaffnew's rule needs all clients in every round, but you asked for {n} of {m} with "
            "sampling='{sampling}'. Set participation='all'.",
            when=lambda method, run: run.n < run.m or run.sampling != "uniform",
            settings={"participation": "all"},
        ),
        Refusal(
            "Scaffnew's rule needs every client to finish, each step to be the gradient times one "
            "rate per round, and the clients' uniform mean to be the next model. Use the "
            "defaults: SGD without momentum at the clients and with rate 1 at the server "
            "(server_optimizer=None, server_lr_decay=1.0), weighting='uniform', clip_norm=None, "
            "on_nonfinite='stop', client_scheduler='rounds', and no deadline of a VirtualClock.",
            when=other_settings,
        ),
    )
    h = ClientState(synchronised=False)
    last = ClientState(initial="current_model", synchronised=False)  # x_{i,K}
    # η of the last round, which each client also knows.
    rate = ServerState(sent="known", shape=(), dtype=torch.float64, synchronised=False)

    def __init__(self, probability: Annotated[float, Above(0), AtMost(1)] = 0.1) -> None:
        super().__init__()
        self.probability = probability

    def steps(self, t: int, ids: Tensor) -> list[int]:
        k = int(self._keyed("scaffnew", t).geometric(self.probability))
        return [k] * len(ids)

    def on_local_start(self, clients: Clients) -> None:
        # At rate 0, and before round 0, no client has moved, so h_i stays.
        over_rate = torch.where(self.rate > 0, self.probability / self.rate, 0.0)
        self.h[clients] = self.h[clients] + over_rate * (clients.w - self.last[clients])

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient.sub_(self.h[clients])

    def on_local_end(self, clients: Clients) -> None:
        self.last[clients] = clients.x

    def on_server_update(self, server: Server) -> None:
        self.rate = server.client_lr
