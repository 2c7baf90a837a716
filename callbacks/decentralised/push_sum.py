"""SGP: averaging over any directed graph, by push-sum.

M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic Gradient Push for Distributed Deep Learning
(ICML 2019), Algorithm 1, arXiv:1811.10792. Weight decay acts on the model y_i; the authors' code
applies it to the numerator x_i.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.callback import AfterExchange, Clients, ClientState, Exchanged, Paper, UserError
from fl_lightning.callbacks.decentralised.without_server import WithoutServer, inverse
from fl_lightning.topologies import Links, OnePeerExponential, Topology


class PushSum(WithoutServer):
    """x_i ← Σ_j V_ij h_j and ω_i ← Σ_j V_ij ω_j; the client's model is y_i = x_i / ω_i.

    A client starts at y_i, and h_i = x_i + (y_{i,K} - y_i) is its numerator after the local steps.
    What a client sends has weights that add up to 1 with what it keeps, on any graph and with any
    participation, and dividing by ω_i makes up for what it gets. w moves by the mean over all m
    clients of y_{i,K} - y_i. Σ ω_i stays m.
    Sent: h_i and ω_i to each receiver. Kept by each client: x_i, and ω_i, a number.

    Args:
        topology: to whom a client sends. Each message has the weight 1/(1 + the sender's
            out-degree), or the topology's own.
        keeps: parameters that are not exchanged: patterns of their names, or a group such as
            ``"last"``; there y_i = x_i.

    Raises:
        UserError: the topology's weights are negative, or what a client sends is more than 1.

    Example:
        the clients' ω always add up to their number.

        >>> from fl_lightning.callbacks import PushSum
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(PushSum(), participation="all", buffers="own")
        >>> rows = [run.client_rows.read("PushSum.weight", i) for i in range(6)]
        >>> float(sum(rows))
        6.0
    """

    title = "SGP"
    paper = Paper("assran2019sgp")
    x = ClientState(initial="initial_model", synchronised=False)
    weight = ClientState(initial=lambda w: 1.0, synchronised=False, shape=(), dtype=torch.float64)
    h = Exchanged()
    omega = Exchanged(shape=(), dtype=torch.float64)

    def __init__(self, topology: Topology | None = None, keeps: str | Sequence[str] = ()) -> None:
        super().__init__(OnePeerExponential() if topology is None else topology, keeps)

    def model(self, clients: Clients) -> Tensor:
        x = self.x[clients]
        y = x / self.weight[clients][:, None].to(x)
        return y if self._kept is None else torch.where(self._kept.to(x.device), x, y)

    def on_local_end(self, clients: Clients) -> None:
        self.h[clients] = self.x[clients] + (clients.x - self.model(clients))
        self.omega[clients] = self.weight[clients]

    def mix(self, clients: AfterExchange) -> None:
        self.x[clients] = self.h[clients]
        self.weight[clients] = self.omega[clients]

    def weights_of(self, links: Links) -> NDArray[np.float64]:
        weights = links.weights
        if weights is None:
            return inverse(links.sent[links.senders])
        gives = np.bincount(links.senders, weights, minlength=len(links.sent))
        wrong = [*links.senders[~(weights >= 0)], *np.flatnonzero(gives > 1 + 1e-9)]
        if wrong:
            worst = wrong[0]
            raise UserError(
                f"PushSum: the weights with which client {worst} sends are negative, or add up to "
                f"{gives[worst]:g}, more than 1. Give weights from 0 that leave the sender a share."
            )
        return weights
