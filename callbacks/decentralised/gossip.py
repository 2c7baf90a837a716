"""DFedAvg: clients train, and then average their models with their neighbours.

T. Sun, D. Li, B. Wang: Decentralized Federated Averaging (IEEE TPAMI 2023), arXiv:2104.11375. With
one local step it is D-PSGD (X. Lian et al., NeurIPS 2017, arXiv:1705.09056), which mixes before its
step, and here after it: X ← W (X - η G). With SharpnessAwareMinimization it is DFedSAM (Y. Shi et
al., ICML 2023, arXiv:2302.04083), with RelaxedInitialization OledFL (Q. Li et al., 2024,
arXiv:2410.06482).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.callback import (
    AfterExchange,
    Clients,
    ClientState,
    Exchanged,
    Neighbourhood,
    Paper,
    PositiveInt,
    Refusal,
    RunFacts,
    Server,
    UserError,
)
from fl_lightning.callbacks.decentralised.without_server import (
    WithoutServer,
    inverse,
    matrix_of,
    weights_in,
)
from fl_lightning.topologies import (
    LARGEST_MATRIX,
    Links,
    Ring,
    Topology,
    links_of,
    spectral_gap,
)


def not_all_there(method: Gossip, run: RunFacts) -> bool:
    """Return whether a directed graph's clients may be away, so that models lose their mean."""
    # Independent participation may leave out clients even if its mean rounds to all of them.
    drawn = run.n < run.m or run.sampling != "uniform"
    away = drawn or run.on_nonfinite != "stop" or "SystemHeterogeneity" in run.companions
    return method.topology.directed and away


class Gossip(WithoutServer):
    """x_i ← Σ_j V_ij z_j, where z_j = x_{j,K} is what client j has after its local steps.

    Client i starts at its own model x_i, which is w^0 at first. Clients that do not take part keep
    everything; the weight of an edge to one of them returns to its sender. w is the mean of all
    m models. With ``FullyConnected()``, all clients and nothing kept it is FedAvg, to the last bit.
    Sent: z_i to each neighbour. Kept by each client: x_i.

    Args:
        topology: who the neighbours of a client are.
        weights: V of two neighbours. ``"metropolis"``: 1/(1 + max(d_i, d_j)) with degrees d, of a
            directed graph the larger of in and out; ``"uniform"``: 1/(1 + d_i), with the receiver's
            in-degree. None: the topology's own, or else ``"metropolis"``.
        gossip_steps: Q; clients exchange Q times in a row, by the same V.
        keeps: parameters that are not exchanged: patterns of their names, or a group such as
            ``"last"``.

    Raises:
        UserError: an argument is not accepted; weights are negative, or some client's do not add up
            to 1.

    Example:
        fully connected it is FedAvg.

        >>> from fl_lightning.callbacks import Gossip
        >>> from fl_lightning.testing import tiny_run
        >>> from fl_lightning.topologies import FullyConnected, Ring
        >>> options = {"participation": "all", "buffers": "own"}
        >>> fedavg = tiny_run(**options).global_vector
        >>> tiny_run(Gossip(FullyConnected()), **options).global_vector.equal(fedavg)
        True
        >>> tiny_run(Gossip(Ring()), **options).global_vector.equal(fedavg)
        False
    """

    title = "DFedAvg"
    paper = Paper(
        *("sun2023dfedavg", "lian2017dpsgd"),
        beside={"SharpnessAwareMinimization": "shi2023dfedsam"},
    )
    notes = (
        *WithoutServer.notes,
        Refusal(
            "{topology} is directed, and if a client is away the weights of the others do not add "
            "up to 1 any more, so a client's new model is not a mean of models. Use PushSum, "
            "which any directed graph allows; or participation='all', sampling='uniform', "
            "on_nonfinite='stop' and no SystemHeterogeneity.",
            when=not_all_there,
        ),
    )
    x = ClientState(initial="initial_model", synchronised=False)
    z = Exchanged()

    def __init__(
        self,
        topology: Topology | None = None,
        weights: Literal["metropolis", "uniform"] | None = None,
        gossip_steps: PositiveInt = 1,
        keeps: str | Sequence[str] = (),
    ) -> None:
        super().__init__(Ring() if topology is None else topology, keeps)
        self.weights = weights
        self.gossip_steps = gossip_steps
        if weights is not None and self.topology.weights is not None:
            raise UserError(
                f"Gossip: weights={weights!r}, and {self.topology} has weights of its own. Give "
                "one of the two."
            )

    def model(self, clients: Clients) -> Tensor:
        return self.x[clients]

    def on_local_end(self, clients: Clients) -> None:
        self.z[clients] = clients.x

    def neighbours(self, server: Server) -> Neighbourhood:
        return replace(super().neighbours(server), steps=self.gossip_steps)

    def mix(self, clients: AfterExchange) -> None:
        # The mean of all clients is w itself.
        everyone = self._complete and not self.keeps and clients.finished == clients.num_clients
        self.x[clients] = clients.w if everyone else self.z[clients]

    def on_round_end(self, server: Server) -> None:
        super().on_round_end(server)
        gap = self.gap(server.num_clients, self._version(server.round))
        if gap is not None:
            server.log("gossip/spectral_gap", gap)

    def weights_of(self, links: Links) -> NDArray[np.float64]:
        """Return W for each message of the graph, refusing weights that lose the models' mean."""
        if links.weights is not None:
            weights = links.weights
        elif self.weights == "uniform":
            weights = inverse(links.received[links.receivers])
        else:
            degrees = np.maximum(links.sent, links.received)
            weights = inverse(np.maximum(degrees[links.senders], degrees[links.receivers]))
        check_weights(self, links, weights)
        return weights

    def gap(self, m: int, t: int) -> float | None:
        if m > LARGEST_MATRIX:
            return None
        if self._complete:
            return 1.0
        seed = self._run.seed
        links = links_of(self.topology, m, t, seed)
        return spectral_gap(matrix_of(links, weights_in(self, m, t, seed), m))


def check_weights(method: Gossip, links: Links, weights: NDArray[np.float64]) -> None:
    """Refuse weights with which the exchange does not keep the mean of the models."""
    m = len(links.sent)
    negative = np.flatnonzero(~(weights >= 0))
    if len(negative):
        k = negative[0]
        raise UserError(
            f"Gossip: the weight of the edge ({links.senders[k]}, {links.receivers[k]}) is "
            f"{weights[k]:g}. Weights are from 0."
        )
    gets = np.bincount(links.receivers, weights, minlength=m)
    gives = np.bincount(links.senders, weights, minlength=m)
    much = np.flatnonzero(gets > 1 + 1e-9)
    if len(much):
        raise UserError(
            f"Gossip: the weights by which client {much[0]} takes its neighbours' models add up to "
            f"{gets[much[0]]:g}, so its own would be negative. Give smaller ones."
        )
    lost = np.flatnonzero(np.abs(gives - gets) > 1e-9)
    if len(lost):
        raise UserError(
            f"Gossip: the weights by which others take the model of client {lost[0]}, and its own, "
            f"add up to {1 - gets[lost[0]] + gives[lost[0]]:.9g} and not to 1, so the models would "
            "lose their mean. Use weights='metropolis', weights of your own with columns that add "
            "up to 1, or PushSum."
        )
