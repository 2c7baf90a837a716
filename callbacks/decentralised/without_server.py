"""Base class of methods without a server: their graph, their w, and methods that they refuse.

Each client has its own model. In a round each participant trains its model, and then mixes it with
its neighbours' models. The run validates and exports w, the mean of all clients' models.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.callback import (
    AfterExchange,
    Clients,
    FederatedCallback,
    Layout,
    Neighbourhood,
    Note,
    Refusal,
    Server,
    ServerState,
    Upload,
    UserError,
)
from fl_lightning.topologies import (
    LARGEST_MATRIX,
    FullyConnected,
    Links,
    Topology,
    components,
    drawn,
    links_of,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NO_SERVER = "without a server no values can be sent to it or computed by it"
_OWN_MODEL = "each client has its own model, which it mixes with its neighbours' models"


class WithoutServer(FederatedCallback):
    """Base class of :class:`Gossip` and :class:`PushSum`.

    Args:
        topology: the graph, which defines each client's neighbours.
        keeps: patterns of parameter names, or a group such as ``"last"``. Clients do not exchange
            these parameters; each client has its own.
    """

    order = -1
    draws_by_client = True
    sends = ""
    personal_of_all = True
    cannot_run_with = {
        **dict.fromkeys(("broadcast", "transmit", "aggregate", "on_updates"), _NO_SERVER),
        **dict.fromkeys(("evaluated", "parts", "personal", "clients.w"), _OWN_MODEL),
        **dict.fromkeys(("ServerState", "Upload"), _NO_SERVER),
        "VirtualClock": "it simulates a server that waits for its clients",
    }
    notes: ClassVar[tuple[Note, ...]] = (
        Refusal(
            "weighting='samples' has no meaning without a server, because the topology defines the "
            "weights. Use weighting='uniform'.",
            when=lambda method, run: run.weighting == "samples",
            settings={"weighting": "uniform"},
        ),
        Refusal(
            "server_optimizer is {server}, but this run has no server: w is always the mean of the "
            "clients' models. Remove server_optimizer.",
            when=lambda method, run: bool(run.server),
            settings={"server_optimizer": None},
        ),
        Refusal(
            "the server's learning rate is {rate}, but this run has no server: w is always the "
            "mean of the clients' models. Remove server_optimizer and server_lr_decay.",
            when=lambda method, run: not run.server and run.server_rate != 1.0,
            settings={"server_optimizer": None, "server_lr_decay": 1.0},
            rate=lambda method, run: (
                "not constant" if run.server_rate is None else f"{run.server_rate:g}"
            ),
        ),
        Refusal(
            "this run has no server that could average the buffers of the clients' learners "
            "({averaged_buffers}). Use buffers='own'.",
            when=lambda method, run: bool(run.averaged_buffers),
            settings={"buffers": "own"},
        ),
        Note(
            "the topology is not connected: it falls into {parts} components, whose clients never "
            "learn from each other.",
            when=lambda method, run: method.parts_of(run.m) > 1,
            parts=lambda method, run: method.parts_of(run.m),
        ),
    )
    # Σ_i (model_i - w^0) and Σ_i ‖model_i - w^0‖² over all clients, and their changes in a round.
    offsets = ServerState(dtype=torch.float64, synchronised=False)
    squares = ServerState(dtype=torch.float64, synchronised=False, shape=())
    moved = Upload(dtype=torch.float64, sent=False)
    spread = Upload(dtype=torch.float64, sent=False, shape=())

    def __init__(self, topology: Topology, keeps: Sequence[str] | str) -> None:
        super().__init__()
        if not isinstance(topology, Topology):
            raise UserError(
                f"{type(self).__name__}: {topology!r} is not a topology. Give one of "
                "fl_lightning.topologies, such as Torus()."
            )
        self.topology = topology
        self.keeps = keeps

    @abstractmethod
    def model(self, clients: Clients) -> Tensor:
        """Return the clients' own models ``(n, D)``."""

    @abstractmethod
    def weights_of(self, links: Links) -> NDArray[np.float64]:
        """Return V[receiver, sender] for each message of the graph ``(P,)``."""

    def on_layout(self, layout: Layout) -> None:
        self._kept = None
        if self.keeps:
            self._kept = layout.mask(layout.named(self.keeps, f"{type(self).__name__}.keeps"))

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.topology.name_clients(getattr(trainer.datamodule, "client_names", ()))
        # In another fit the same names may be other clients.
        links_of.cache_clear()
        weights_in.cache_clear()

    def check_layout(self, layout: Layout, num_clients: int, w: Tensor) -> None:
        super().check_layout(layout, num_clients, w)
        self._num_clients = num_clients
        if not self._complete:
            weights_in(self, num_clients, 0, self._run.seed)

    def on_local_start(self, clients: Clients) -> None:
        clients.x = self.model(clients)

    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        # Nothing is sent to a server: this is what moves w, the mean of all models.
        return clients.x - self.model(clients)

    def on_server_update(self, server: Server) -> None:
        server.update *= server.n / server.num_clients

    def neighbours(self, server: Server) -> Neighbourhood:
        ids = np.array(server.ids.tolist(), dtype=np.int64)
        shared = None if self._kept is None else ~self._kept
        return replace(self.links_among(ids, server.num_clients, server.round), shared=shared)

    def links_among(self, ids: NDArray[np.int64], m: int, t: int) -> Neighbourhood:
        """Return the messages among these clients, with the weights of the whole graph."""
        if self._complete and len(ids) == m:
            return Neighbourhood(everyone=True)
        if self._complete:
            receivers, senders = (each.ravel() for each in np.meshgrid(ids, ids, indexing="ij"))
            others = senders != receivers
            weights = np.full(int(others.sum()), 1 / m)
            return Neighbourhood(senders[others], receivers[others], weights)
        seed = self._run.seed
        links = links_of(self.topology, m, self._version(t), seed)
        here = np.zeros(m, dtype=bool)
        here[ids] = True
        both = here[links.senders] & here[links.receivers]
        weights = weights_in(self, m, self._version(t), seed)
        return Neighbourhood(links.senders[both], links.receivers[both], weights[both])

    def on_exchange(self, clients: AfterExchange) -> None:
        before = self.model(clients).double() - clients.initial_model.double()
        self.mix(clients)
        after = self.model(clients).double() - clients.initial_model.double()
        self.moved[clients] = after - before
        self.spread[clients] = (after.square() - before.square()).sum(1)

    @abstractmethod
    def mix(self, clients: AfterExchange) -> None:
        """Take over what the client got from its neighbours."""

    def personal(self, clients: Clients) -> Tensor:
        return self.model(clients)

    def on_round_end(self, server: Server) -> None:
        self.offsets += self.moved.sum()
        self.squares += self.spread.sum()
        m = server.num_clients
        w = server.w.double() - server.initial_model.double()
        # Σ ‖model_i - w‖², with all vectors measured from w^0.
        total = self.squares - 2 * self.offsets @ w + m * w @ w
        server.log("gossip/consensus", total.clamp(min=0) / m)
        server.log("gossip/messages", server.messages)

    def facts(self) -> dict[str, str]:
        m = self._num_clients
        return {"topology": self.described(m)} if m else {}

    def announced(self) -> str:
        return f"topology: {self.described(self._num_clients)}"

    def pictures(self) -> dict[str, Figure]:
        if self._complete and self._num_clients > LARGEST_MATRIX:
            return {}
        links = links_of(self.topology, self._num_clients, 0, self._run.seed)
        return {"topology": drawn(links, self.described(self._num_clients))}

    def described(self, m: int) -> str:
        """Return the graph of m clients in a line."""
        edges = m * (m - 1) // 2
        least = most = m - 1
        if not self._complete:
            links = links_of(self.topology, m, 0, self._run.seed)
            edges = links.edges
            least, most = int(links.received.min()), int(links.received.max())
        text = f"{self.topology} of {m:,} clients, {edges:,} edges, degrees {least} to {most}"
        if self.topology.varies:
            return f"{text}, varies"
        gap = self.gap(m, 0)
        return text if gap is None else f"{text}, spectral gap {gap:.3f}"

    def gap(self, m: int, t: int) -> float | None:
        """Return the spectral gap of the weights in round t; None: it is not defined or too dear
        to compute.
        """
        return None

    def parts_of(self, m: int) -> int:
        """Return the number of the graph's components; 1 if it varies."""
        if self._complete or self.topology.varies:
            return 1
        return components(links_of(self.topology, m, 0, self._run.seed), m)

    _kept: Tensor | None = None
    _num_clients = 0

    @property
    def _complete(self) -> bool:
        # A class that extends FullyConnected may have other edges.
        return type(self.topology) is FullyConnected and self.topology.weights is None

    def _version(self, t: int) -> int:
        """Return the round by which the graph of round t is known."""
        return t if self.topology.varies else 0


@lru_cache(maxsize=4)
def weights_in(method: WithoutServer, m: int, t: int, seed: int) -> NDArray[np.float64]:
    """Return the weights of the whole graph's messages in round t, which are checked."""
    return method.weights_of(links_of(method.topology, m, t, seed))


def inverse(degrees: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return 1/(1 + d) for each degree d: the clients' values and the own one count alike."""
    weights: NDArray[np.float64] = 1.0 / (1.0 + degrees.astype(np.float64))
    return weights


def matrix_of(links: Links, weights: NDArray[np.float64], m: int) -> NDArray[np.float64]:
    """Return V ``(m, m)``, with each client's own weight."""
    matrix = np.zeros((m, m))
    matrix[links.receivers, links.senders] = weights
    matrix[np.arange(m), np.arange(m)] = 1 - matrix.sum(0)
    return matrix
