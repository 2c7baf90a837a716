"""Graphs on which clients exchange models in runs without a server.

A topology says which clients are neighbours. :class:`~fl_lightning.callbacks.Gossip` and
:class:`~fl_lightning.callbacks.PushSum` turn it into weights. ``m`` is the number of registered
clients, E the number of edges. For a graph of your own, extend :class:`Topology` with ``edges``, or
give the edges to :class:`FromEdges` or :class:`FromFile`.
"""

from __future__ import annotations

import csv
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.errors import UserError, suggest
from fl_lightning.introspection.accepted import Above, AtMost, Checked, NonNegativeInt, PositiveInt
from fl_lightning.machine.escaping import is_number
from fl_lightning.sampling import generator
from fl_lightning.schedules import arguments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LARGEST_MATRIX = 512
"""Up to so many clients the m × m matrix of weights is made, for the spectral gap."""


class Topology(Checked, ABC):
    """Which of m clients are neighbours, in round t.

    ``directed``: whether an edge goes one way, from a sender to a receiver. ``varies``: whether the
    edges differ from round to round. ``weights``: one number per edge, by which a receiver
    multiplies what it gets; None: the method chooses weights.
    """

    directed: bool = False
    varies: bool = False
    weights: Floats | None = None

    @abstractmethod
    def edges(self, m: int, t: int, seed: int) -> Ints:
        """Return the edges ``(E, 2)``, int64, sorted, each pair once, without loops.

        Undirected: (i, j) with i < j. Directed: (sender, receiver). The result may depend only on
        the arguments, because each process of a run asks for it, and a resumed run asks again.
        """

    def name_clients(self, names: Sequence[str]) -> None:
        """Take the clients' names by their numbers, before the first round; empty: no names."""

    def __repr__(self) -> str:
        # Arguments that were left at None or False say nothing.
        given = [
            text for text in arguments(self).split(", ") if not text.endswith(("=None", "=False"))
        ]
        return f"{type(self).__name__}({', '.join(given)})"


class Ring(Topology):
    """Client i and client i + 1, modulo m.

    >>> Ring().edges(4, t=0, seed=0).tolist()
    [[0, 1], [0, 3], [1, 2], [2, 3]]
    """

    def edges(self, m: int, t: int, seed: int) -> Ints:
        clients = np.arange(m)
        return _sorted(clients, (clients + 1) % m)


class Grid(Topology):
    """A rectangle: client r · columns + c lies at (r, c), and has the clients beside, above and
    below it as neighbours.

    Args:
        rows: they have to divide m; None: the largest divisor of m up to √m.

    >>> Grid().edges(4, t=0, seed=0).tolist()
    [[0, 1], [0, 2], [1, 3], [2, 3]]
    """

    wraps = False

    def __init__(self, rows: PositiveInt | None = None) -> None:
        self.rows = rows

    def edges(self, m: int, t: int, seed: int) -> Ints:
        rows = self._rows_of(m)
        columns = m // rows
        at = np.arange(m).reshape(rows, columns)
        if self.wraps:
            right, below = np.roll(at, -1, axis=1), np.roll(at, -1, axis=0)
            return _sorted(np.concatenate([at, at]), np.concatenate([right, below]))
        senders = np.concatenate([at[:, :-1].ravel(), at[:-1].ravel()])
        return _sorted(senders, np.concatenate([at[:, 1:].ravel(), at[1:].ravel()]))

    def _rows_of(self, m: int) -> int:
        name = type(self).__name__
        rows = self.rows
        if rows is None:
            rows = next(k for k in range(math.isqrt(m), 0, -1) if m % k == 0)
        if m % rows or min(rows, m // rows) < 2:
            raise UserError(
                f"topology: {name} of {m} clients would have {rows} rows of {m / rows:g}, and both "
                "have to be whole numbers from 2. Use other rows, another number of clients, or "
                "Ring."
            )
        return rows


class Torus(Grid):
    """A :class:`Grid` whose rows and columns are closed to rings; double edges count once.

    Args:
        rows: they have to divide m; None: the largest divisor of m up to √m.

    >>> len(Torus().edges(9, t=0, seed=0))
    18
    """

    wraps = True


class FullyConnected(Topology):
    """Every client and every other one.

    >>> FullyConnected().edges(3, t=0, seed=0).tolist()
    [[0, 1], [0, 2], [1, 2]]
    """

    def edges(self, m: int, t: int, seed: int) -> Ints:
        return np.stack(np.triu_indices(m, 1), axis=1).astype(np.int64)


class Star(Topology):
    """The client ``hub`` and every other one.

    >>> Star(hub=1).edges(3, t=0, seed=0).tolist()
    [[0, 1], [1, 2]]
    """

    def __init__(self, hub: NonNegativeInt = 0) -> None:
        self.hub = hub

    def edges(self, m: int, t: int, seed: int) -> Ints:
        return _sorted(np.full(m, self.hub), np.arange(m))


class ExponentialGraph(Topology):
    """Directed: client i sends to clients i + 1, i + 2, i + 4, … modulo m, all 2^k < m.

    >>> ExponentialGraph().edges(3, t=0, seed=0).tolist()
    [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1]]
    """

    directed = True

    def edges(self, m: int, t: int, seed: int) -> Ints:
        clients = np.arange(m)
        steps = [2**k for k in range(m.bit_length()) if 2**k < m]
        receivers = [(clients + step) % m for step in steps]
        return _sorted(np.tile(clients, len(steps)), np.concatenate([*receivers, []]), True)


class OnePeerExponential(Topology):
    """Directed, and varies: in round t client i sends to client i + 2^(t mod τ) modulo m alone,
    with τ = ⌈log2 m⌉.

    >>> [OnePeerExponential().edges(4, t, seed=0)[0].tolist() for t in range(3)]
    [[0, 1], [0, 2], [0, 1]]
    """

    directed = True
    varies = True

    def edges(self, m: int, t: int, seed: int) -> Ints:
        clients = np.arange(m)
        period = max(1, (m - 1).bit_length())
        return _sorted(clients, (clients + 2 ** (t % period)) % m, True)


class RandomRegular(Topology):
    """A random graph in which each client has ``degree`` neighbours.

    Args:
        degree: from 1 to m - 1; m · degree has to be even.
        varying: whether each round has another graph.
    """

    def __init__(self, degree: PositiveInt, varying: bool = False) -> None:
        self.degree = degree
        self.varying = varying
        self.varies = varying

    def edges(self, m: int, t: int, seed: int) -> Ints:
        if self.degree >= m or m * self.degree % 2:
            raise UserError(
                f"topology: {self}: there is no such graph of {m} clients. degree has to be below "
                f"{m}, and degree times {m} even."
            )
        return _drawn(self, "random_regular_graph", self.degree, m, t=t, seed=seed)


class ErdosRenyi(Topology):
    """A random graph in which each pair of clients is an edge with probability ``p``.

    Args:
        p: above 0, up to 1.
        varying: whether each round has another graph.
    """

    def __init__(self, p: Annotated[float, Above(0), AtMost(1)], varying: bool = False) -> None:
        self.p = p
        self.varying = varying
        self.varies = varying

    def edges(self, m: int, t: int, seed: int) -> Ints:
        return _drawn(self, "fast_gnp_random_graph", m, self.p, t=t, seed=seed)


class FromEdges(Topology):
    """The edges that you give.

    Args:
        edges: pairs of clients ``(E, 2)``, each once.
        weights: a number per edge; of an undirected one it counts both ways, of a directed one it
            is what the receiver multiplies the sender's model by. None: the method chooses them.
        directed: whether a pair is (sender, receiver).

    Raises:
        UserError: a pair is no pair of clients, is a loop or is given twice; or there are fewer
            weights than edges.
    """

    source = "edges"

    def __init__(
        self,
        edges: Sequence[Sequence[int]],
        weights: Sequence[float] | None = None,
        directed: bool = False,
    ) -> None:
        self.directed = directed
        pairs = _numbers(edges)
        pairs = pairs if pairs.size else pairs.reshape(0, 2)
        # Other shapes, such as (2, E), have as many numbers, and would be another graph.
        whole = (pairs == np.floor(pairs)) & (pairs >= 0) & (pairs < 2**53)
        if pairs.ndim != 2 or pairs.shape[1] != 2 or not whole.all():
            raise UserError(
                f"topology: {self.source}: edges have to be pairs of clients, whole numbers from "
                f"0, of shape (E, 2), and have shape {pairs.shape}."
            )
        self._pairs = pairs.astype(np.int64)
        if not directed:
            self._pairs = np.sort(self._pairs, axis=1)
        order = np.lexsort(self._pairs.T[::-1])
        self._pairs = self._pairs[order]
        if weights is not None:
            self.weights = _numbers(weights)
        check_edges(f"topology: {self.source}", self._pairs, self.weights)
        self.weights = None if self.weights is None else self.weights[order]

    def edges(self, m: int, t: int, seed: int) -> Ints:
        return self._pairs

    def __repr__(self) -> str:
        kind = "directed edges" if self.directed else "edges"
        content = hashlib.sha256(self._pairs.tobytes())
        if self.weights is not None:
            content.update(self.weights.tobytes())
        return f"{type(self).__name__}({len(self._pairs)} {kind}, {content.hexdigest()[:12]})"


class FromFile(FromEdges):
    """The edges of a CSV file with the header ``sender,receiver`` or ``sender,receiver,weight``.

    Clients are written by their numbers from 0, or by their names: the data's ``client_names``. If
    all that the file has are names of the data, they are names, also names such as ``"12"``.

    Args:
        path: of the file.
        directed: whether a line is (sender, receiver); else each pair stands in one line.

    Raises:
        UserError: the file cannot be read as described.
    """

    def __init__(self, path: str, directed: bool = False) -> None:
        self.path = path
        self.source = str(path)
        self.directed = directed
        header, rows = self._read()
        weights = [float(row[2]) for row in rows.values()] if len(header) == 3 else None
        self._lines = {line: row[:2] for line, row in rows.items()}  # sender and receiver
        self._weights = weights
        self._named = not all(map(is_number, chain(*self._lines.values())))
        self._text = ""
        if self._named:
            self.weights = None if weights is None else np.asarray(weights, np.float64)
        else:
            self._by_number()
            self._text = super().__repr__()

    def _by_number(self) -> None:
        numbers: list[Any] = [list(map(float, pair)) for pair in self._lines.values()]
        super().__init__(numbers, self._weights, self.directed)

    def name_clients(self, names: Sequence[str]) -> None:
        numbers = {str(name): number for number, name in enumerate(names)}
        if not self._named and not numbers.keys() >= {*chain(*self._lines.values())}:
            self._by_number()
        else:
            pairs = []
            for line, pair in self._lines.items():
                for name in pair:
                    if name not in numbers:
                        raise self._unknown(line, name, names)
                pairs.append([numbers[name] for name in pair])
            super().__init__(pairs, self._weights, self.directed)

    def _unknown(self, line: int, name: str, names: Sequence[str]) -> UserError:
        place = f"topology: {self.source}, line {line}: "
        if not names:
            return UserError(
                f"{place}{name!r} is a name, and the clients of these data have no names. Write "
                "each client's number from 0, in the order of clients.csv and partition.csv."
            )
        return UserError(
            f"{place}no client has the name {name!r}.{suggest(name, names)} The clients are "
            f"{', '.join(names)[:300]}."
        )

    def edges(self, m: int, t: int, seed: int) -> Ints:
        if self._named and "_pairs" not in vars(self):
            raise UserError(
                f"topology: {self.source} has names of clients, whose numbers are known only in a "
                "run. Write each client's number from 0."
            )
        return super().edges(m, t, seed)

    def __repr__(self) -> str:
        if not self._named:
            return self._text
        content = hashlib.sha256(repr([*self._lines.values(), self._weights]).encode())
        kind = "directed edges" if self.directed else "edges"
        return f"{type(self).__name__}({len(self._lines)} {kind}, {content.hexdigest()[:12]})"

    def _read(self) -> tuple[list[str], dict[int, list[str]]]:
        """Return the header, and the cells of each line."""
        path = self.path
        rows: dict[int, list[str]] = {}
        try:
            # Spreadsheets write a mark before the first name, which this encoding leaves out.
            with Path(path).open(newline="", encoding="utf-8-sig") as file:
                lines = csv.reader(file)
                header = [name.strip() for name in next(lines, [])]
                if header not in (["sender", "receiver"], ["sender", "receiver", "weight"]):
                    raise ValueError(
                        f"it is {','.join(header)!r}, and has to be sender,receiver or "
                        "sender,receiver,weight"
                    )
                for line in lines:
                    if line:
                        rows[lines.line_num] = [cell.strip() for cell in line]
                        if len(line) != len(header):
                            raise ValueError(f"it has {len(line)} fields")
                        if len(line) == 3 and not is_number(line[2]):
                            raise ValueError(f"the weight {line[2]!r} is not a number")
        except OSError as error:
            raise UserError(f"topology: {path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise UserError(
                f"topology: {path}, line {lines.line_num}: {error}. Clients are "
                "numbered from 0, in the order of clients.csv and partition.csv."
            ) from error
        return header, rows


def _numbers(values: Any) -> Floats:
    """Return an array of floats; of shape (1, 2) and negative if the values are not numbers."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        return np.full((1, 2), -1.0)


@dataclass(frozen=True, eq=False)
class Links:
    """The messages of a whole graph: of an undirected edge, one each way.

    Args:
        senders, receivers: ``(P,)``, sorted by receiver, then by sender.
        weights: ``(P,)``, the topology's own; None: it has none.
        sent, received: how many messages each client sends and gets, ``(m,)``.
        edges: their number.
    """

    senders: Ints
    receivers: Ints
    weights: Floats | None
    sent: Ints
    received: Ints
    edges: int


@lru_cache(maxsize=4)
def links_of(topology: Topology, m: int, t: int, seed: int) -> Links:
    """Return a topology's messages in round t.

    Raises:
        UserError: its edges are not edges between the m clients.
    """
    edges = np.asarray(topology.edges(m, t, seed))
    name = getattr(topology, "source", repr(topology))
    if edges.ndim != 2 or edges.shape[1] != 2 or edges.dtype.kind not in "iu":
        raise UserError(
            f"topology: {name}: edges has to return integers of shape (E, 2), and returned "
            f"{edges.dtype} of shape {edges.shape}."
        )
    edges = edges.astype(np.int64)
    outside = edges[(edges < 0) | (edges >= m)]
    if len(outside):
        raise UserError(
            f"topology: {name}: client {outside[0]} does not exist: there are {m} clients, "
            f"numbered from 0 to {m - 1}."
        )
    weights = None if topology.weights is None else np.asarray(topology.weights, np.float64)
    check_edges(
        f"topology: {name}", edges if topology.directed else np.sort(edges, axis=1), weights
    )
    senders, receivers = edges[:, 0], edges[:, 1]
    if not topology.directed:
        senders, receivers = np.append(senders, receivers), np.append(receivers, senders)
        weights = None if weights is None else np.append(weights, weights)
    order = np.lexsort((senders, receivers))
    return Links(
        senders[order],
        receivers[order],
        None if weights is None else weights[order],
        np.bincount(senders, minlength=m),
        np.bincount(receivers, minlength=m),
        len(edges),
    )


@lru_cache(maxsize=4)
def components(links: Links, m: int) -> int:
    """Return into how many parts the graph falls that do not reach each other both ways."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(range(m))
    graph.add_edges_from(zip(links.senders.tolist(), links.receivers.tolist(), strict=True))
    return int(nx.number_strongly_connected_components(graph))


def spectral_gap(matrix: Floats) -> float:
    """Return 1 - σ_2 of a matrix of weights ``(m, m)``: how fast exchanges bring models together.

    σ_2 is its second largest singular value. With one client the gap is 1.

    >>> round(spectral_gap(np.full((4, 4), 0.25)), 6)
    1.0
    """
    if len(matrix) == 1:
        return 1.0
    return 1.0 - float(np.linalg.svd(matrix, compute_uv=False)[1])


# Up to so many clients a picture shows them on a circle; above, edges are points of a matrix.
ON_A_CIRCLE = 200


def drawn(links: Links, title: str) -> Figure:
    """Return a picture of a graph: clients on a circle, or above 200 of them its matrix."""
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    m = len(links.sent)
    figure = Figure(figsize=(6, 6.3))
    axes = figure.add_axes((0.1, 0.08, 0.85, 0.85))
    axes.set_title(title.replace(", ", "\n", 1), fontsize="small", loc="left")
    if m > ON_A_CIRCLE:
        axes.plot(links.senders, links.receivers, ",", color="#2f7ed8")
        axes.set(xlabel="sender", ylabel="receiver", xlim=(-1, m), ylim=(m, -1))
        return figure
    angles = 2 * np.pi * np.arange(m) / m
    at = np.stack([np.sin(angles), np.cos(angles)], axis=1)
    segments = np.stack([at[links.senders], at[links.receivers]], axis=1)
    axes.add_collection(LineCollection(list(segments), colors="#2f7ed8", linewidths=0.8, alpha=0.6))
    axes.plot(at[:, 0], at[:, 1], "o", color="#1b2a41", markersize=3 if m > 40 else 7)
    for client in range(0, m, 1 + m // 40):
        axes.annotate(str(client), 1.08 * at[client], ha="center", va="center", fontsize="x-small")
    axes.set(xlim=(-1.2, 1.2), ylim=(-1.2, 1.2), aspect="equal")
    axes.axis("off")
    return figure


def check_edges(where: str, pairs: Ints, weights: Floats | None) -> None:
    """Refuse loops, edges that are given twice, and weights of another number.

    Raises:
        UserError: it begins with ``where``.
    """
    loops = pairs[pairs[:, 0] == pairs[:, 1]]
    if len(loops):
        raise UserError(f"{where}: client {loops[0, 0]} is given as its own neighbour.")
    unique, counts = np.unique(pairs, axis=0, return_counts=True)
    if len(unique) < len(pairs):
        sender, receiver = unique[counts > 1][0]
        raise UserError(
            f"{where}: the edge ({sender}, {receiver}) is given twice. Without "
            "directed=True an edge goes both ways."
        )
    if weights is not None and weights.shape != (len(pairs),):
        raise UserError(
            f"{where}: there are {len(pairs)} edges, and weights of shape {weights.shape}. Give "
            "one weight per edge."
        )


def _sorted(senders: NDArray[Any], receivers: NDArray[Any], directed: bool = False) -> Ints:
    """Return edges without loops, each once, sorted."""
    pairs = np.stack([np.ravel(senders), np.ravel(receivers)], axis=1).astype(np.int64)
    if not directed:
        pairs = np.sort(pairs, axis=1)
    return np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0)


def _drawn(topology: Topology, graph: str, *sizes: Any, t: int, seed: int) -> Ints:
    """Return the edges of a random graph of networkx, drawn by (seed, "topology", round)."""
    import networkx as nx

    draws = generator(seed, "topology", t if topology.varies else 0)
    # With an integer networkx draws by Python's own generator, which is faster one by one.
    drawn = getattr(nx, graph)(*sizes, seed=int(draws.integers(2**32)))
    pairs = np.array(list(drawn.edges), dtype=np.int64).reshape(-1, 2)
    return _sorted(pairs[:, 0], pairs[:, 1])
