"""The oracle of decentralised rounds: graphs, weights, Gossip, gradient tracking and push-sum in
NumPy float64. Plain loops over clients and steps, written from the rule and from nothing of the
package. D n is the section of the rule that a block follows, § 1 the methods page's order of a
local step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.oracles.looking import Looking
from tests.oracles.modern import Modern
from tests.oracles.problems import Problem, Schedule, TwoLayer, Vector

Matrix = npt.NDArray[np.float64]
Edges = list[tuple[int, int]]
Coefficient = float | Callable[[int], float]  # a number, or a function of the round


@dataclass(frozen=True)
class Graph:
    """``edges(m, t)``: pairs i < j, or (sender, receiver); ``weights(m, t)``: one an edge."""

    edges: Callable[[int, int], Edges]
    directed: bool = False
    weights: Callable[[int, int], list[float]] | None = None


@dataclass(frozen=True)
class Config:
    """One field a component; None is "not there"."""

    graph: Graph
    push_sum: bool = False  # or Gossip
    weights: str | None = None  # Gossip's: None, "metropolis" or "uniform"
    gossip_steps: int = 1
    keeps: npt.NDArray[np.bool_] | None = None  # coordinates that are not exchanged
    tracking: bool = False  # of gradients
    lr: float = 0.3
    lr_decay: Coefficient = 1.0  # a number: lr * lr_decay ** t; a function: lr * lr_decay(t)
    within: float | None = None  # step k of K at eta (1 - k / K (1 - within))
    weight_decay: float = 0.01
    momentum: float = 0.0
    keep_momentum: bool = False  # over rounds
    clip_norm: float | None = None
    beta: Coefficient | None = None  # relaxed initialization, offset "own"
    sam: Coefficient | None = None  # radius
    mu: Coefficient | None = None  # of the pull to the start
    calibration: tuple[float, bool] | None = None  # FedLC: tau, the true class left out
    modern: Mapping[str, Any] = field(default_factory=dict)  # in modern.py: adam, muon, meta


@dataclass
class Round:
    """What there is after a round; ``rows[name][i]`` for all clients i, written or not."""

    w: Vector
    models: Matrix  # each client's own
    rows: dict[str, Matrix]
    finished: list[int]
    ends: dict[int, Vector]  # x_{i,K} of those that finished
    metrics: dict[str, float]


# ---------------------------------------------------------------------------------- D2: graphs


def pairs(found: set[tuple[int, int]]) -> Edges:
    """Undirected edges in order, each once, without loops."""
    return sorted({(min(i, j), max(i, j)) for i, j in found if i != j})


def ring(m: int, t: int = 0) -> Edges:
    return pairs({(i, (i + 1) % m) for i in range(m)})


def sides(m: int, rows: int | None) -> tuple[int, int]:
    """Rows and columns: rows given, or the largest divisor of m up to its root."""
    if rows is None:
        rows = max(r for r in range(1, m + 1) if m % r == 0 and r * r <= m)
    assert m % rows == 0
    return rows, m // rows


def grid(rows: int | None = None, wraps: bool = False) -> Callable[[int, int], Edges]:
    def edges(m: int, t: int = 0) -> Edges:
        height, width = sides(m, rows)
        found = set()
        for r in range(height):
            for c in range(width):
                here = r * width + c
                if r + 1 < height or wraps:
                    found.add((here, (r + 1) % height * width + c))
                if c + 1 < width or wraps:
                    found.add((here, r * width + (c + 1) % width))
        return pairs(found)

    return edges


def torus(rows: int | None = None) -> Callable[[int, int], Edges]:
    return grid(rows, wraps=True)


def fully_connected(m: int, t: int = 0) -> Edges:
    return [(i, j) for i in range(m) for j in range(i + 1, m)]


def star(hub: int = 0) -> Callable[[int, int], Edges]:
    def edges(m: int, t: int = 0) -> Edges:
        return pairs({(hub, i) for i in range(m)})

    return edges


def exponential(m: int, t: int = 0) -> Edges:
    hops = [2**k for k in range(m) if 2**k < m]
    return sorted({(i, (i + hop) % m) for i in range(m) for hop in hops})


def one_peer(m: int, t: int) -> Edges:
    tau = 0
    while 2**tau < m:
        tau += 1
    return [] if tau == 0 else sorted((i, (i + 2 ** (t % tau)) % m) for i in range(m))


def as_given(
    edges: Sequence[tuple[int, int]], weights: Sequence[float] | None = None, directed: bool = False
) -> Graph:
    """The graph of a list of edges, with the weights in the list's order."""
    order = [(i, j) if directed else (min(i, j), max(i, j)) for i, j in edges]
    in_order = sorted(order)
    if weights is None:
        return Graph(lambda m, t: in_order, directed)
    table = dict(zip(order, weights, strict=True))
    return Graph(lambda m, t: in_order, directed, lambda m, t: [table[e] for e in in_order])


def links(graph: Graph, m: int, t: int) -> tuple[Edges, list[float] | None]:
    """Ordered pairs (sender, receiver): an undirected edge is two."""
    edges = graph.edges(m, t)
    weights = None if graph.weights is None else list(graph.weights(m, t))
    if graph.directed:
        return edges, weights
    both = edges + [(j, i) for i, j in edges]
    return both, None if weights is None else weights + weights


# --------------------------------------------------------------------------------- D2: weights


def gossip_matrix(graph: Graph, rule: str | None, m: int, t: int) -> Matrix:
    """W[receiver, sender] of the whole graph."""
    ordered, own = links(graph, m, t)
    to, of = [0] * m, [0] * m  # in- and out-degrees
    for sender, receiver in ordered:
        of[sender] += 1
        to[receiver] += 1
    W = np.zeros((m, m))
    for place, (j, i) in enumerate(ordered):
        if rule is None and own is not None:
            W[i, j] = own[place]
        elif rule == "uniform":
            W[i, j] = 1 / (1 + to[i])
        else:
            W[i, j] = 1 / (1 + max(to[i], of[i], to[j], of[j]))
    for i in range(m):
        W[i, i] = 1 - sum(W[i, j] for j in range(m) if j != i)
    assert (W >= 0).all() and np.allclose(W.sum(axis=0), 1, rtol=0, atol=1e-9)
    return W


def push_matrix(graph: Graph, m: int, t: int) -> Matrix:
    """P[receiver, sender] of the whole graph."""
    ordered, own = links(graph, m, t)
    P = np.zeros((m, m))
    for place, (j, i) in enumerate(ordered):
        degree = sum(sender == j for sender, _ in ordered)
        P[i, j] = 1 / (1 + degree) if own is None else own[place]
    for j in range(m):
        P[j, j] = 1 - sum(P[i, j] for i in range(m) if i != j)
    assert (P >= 0).all()
    return P


def among(W: Matrix, finished: Sequence[int]) -> Matrix:
    """V: what would pass between a client that finished and one that did not stays with its
    sender."""
    V = np.eye(len(W))
    for j in finished:
        for i in finished:
            if i != j:
                V[i, j] = W[i, j]
        V[j, j] = 1 - sum(W[i, j] for i in finished if i != j)
    return V


# ---------------------------------------------------------------------------------- D1: a round


def at(value: Coefficient, t: int) -> float:
    return float(value(t)) if callable(value) else float(value)


def decayed(base: float, decay: Coefficient, t: int) -> float:
    return base * (float(decay(t)) if callable(decay) else float(decay) ** t)


def to_length(v: Vector, length: float) -> Vector:
    norm = float(np.linalg.norm(v))
    return length * v / norm if norm > 0 else np.zeros_like(v)


class Steps:
    """What client i steps along in a round, where its loss or its optimizer is another one."""

    def __init__(
        self, problem: Problem, cfg: Config, t: int, i: int, modern: Modern | None, schedule: Any
    ) -> None:
        self.problem = problem
        self.client = i
        self.modern = modern
        if cfg.calibration is not None:
            assert isinstance(problem, TwoLayer)
            counts = np.bincount(schedule.data[i][1], minlength=3).astype(np.float64)
            none = np.zeros(problem.size)
            self.problem = Looking(problem, none, none, counts, fedlc=cfg.calibration)
        if modern is not None:
            modern.eta = decayed(cfg.lr, cfg.lr_decay, t)
            self.state = modern.begin(i)

    def gradient(self, x: Vector, k: int, batch: Any) -> Vector:
        if self.modern is not None:
            return self.modern.loss_gradient(x, self.client, k, batch, self.state)
        return self.problem.gradient(x, self.client, batch)

    def direction(self, g: Vector, k: int) -> Vector:
        """Of the clipped gradient."""
        return g if self.modern is None else self.modern.direction(g, self.client, k, self.state)


def train(
    cfg: Config,
    t: int,
    steps: Steps,
    batches: Sequence[Any],
    start: Vector,
    correction: Vector,
    buffer: Vector,
) -> tuple[Vector, Vector, float]:
    """K local steps from ``start``: x_{i,K}, the momentum, and the sum of the rates."""
    eta, K = decayed(cfg.lr, cfg.lr_decay, t), len(batches)
    x, total = start.copy(), 0.0
    for k, batch in enumerate(batches):
        g = steps.gradient(x, k, batch)  # § 1 (1)
        if cfg.sam is not None:  # (2)
            g = steps.gradient(x + to_length(g, at(cfg.sam, t)), k, batch)
        g = g + correction  # (4): D5's c_i, and D4's pull to the start
        if cfg.mu is not None:
            g = g + at(cfg.mu, t) * (x - start)
        if cfg.clip_norm is not None:  # (5)
            norm = float(np.linalg.norm(g))
            g = g * min(1.0, cfg.clip_norm / norm) if norm > 0 else g
        g = steps.direction(g, k)
        rate = eta if cfg.within is None else eta * (1 - k / K * (1 - cfg.within))
        buffer = cfg.momentum * buffer + g + cfg.weight_decay * x  # (6)
        x = x - rate * buffer
        total += rate
    return x, buffer, total


def run(problem: Problem, cfg: Config, rounds: int, w0: Vector, schedule: Schedule) -> list[Round]:
    """Rounds 0 … rounds - 1; a round's schedule lists those that finish it alone. Entry t holds
    what there is after round t (its ``w`` is w^{t+1})."""
    m, D = len(schedule.sizes), len(w0)
    shared = np.ones(D, dtype=bool) if cfg.keeps is None else ~cfg.keeps
    w = np.array(w0, dtype=np.float64)
    x = np.tile(w, (m, 1))  # models; under push-sum numerators
    omega = np.ones(m)
    c, momentum, last = np.zeros((m, D)), np.zeros((m, D)), np.tile(w, (m, 1))
    up = 0
    history: list[Round] = []
    modern = None
    if cfg.modern:
        assert isinstance(problem, TwoLayer)
        modern = Modern(problem, schedule, w0, cfg.modern, cfg.weight_decay)

    def models() -> Matrix:  # D6: y_i
        return np.where(shared, x / omega[:, None], x)

    for t in range(rounds):
        finished = sorted(schedule.rounds[t])
        W = push_matrix(cfg.graph, m, t) if cfg.push_sum else None
        W = gossip_matrix(cfg.graph, cfg.weights, m, t) if W is None else W
        V = np.linalg.matrix_power(among(W, finished), cfg.gossip_steps)
        begun = models()
        sent, z_mean, moved = x.copy(), np.zeros((m, D)), np.zeros(D)
        ends: dict[int, Vector] = {}
        for i in finished:
            start = begun[i]
            if cfg.beta is not None:  # D4: relaxed initialization
                start = start + at(cfg.beta, t) * (start - last[i])
            batches = schedule.rounds[t][i]
            steps = Steps(problem, cfg, t, i, modern, schedule)
            z, buffer, total = train(cfg, t, steps, batches, start, c[i], momentum[i])
            z_mean[i] = (start - z) / total if total > 0 else 0.0
            sent[i] = x[i] + (z - begun[i]) if cfg.push_sum else z
            moved += (z - begun[i]) / m
            ends[i] = z
            last[i] = z
            if cfg.keep_momentum:
                momentum[i] = buffer
        # The exchange, from the values before it alone.
        arrived, tracked = V @ sent, V @ z_mean
        for i in finished:
            x[i] = np.where(shared, arrived[i], sent[i])
            if cfg.tracking:  # D5
                c[i] = np.where(shared, c[i] - z_mean[i] + tracked[i], 0.0)
        if cfg.push_sum:
            omega = V @ omega
        w = w + moved
        # D8
        own = models()
        messages = (
            sum(i in finished and j in finished for i, j in links(cfg.graph, m, t)[0])
            * cfg.gossip_steps
        )
        numbers = int(shared.sum()) * (1 + cfg.tracking) + cfg.push_sum
        up += messages * numbers
        metrics: dict[str, float] = {
            "communication/up_parameters": up,
            "communication/down_parameters": 0,
            "communication/total_parameters": up,
        }
        if finished:
            metrics["gossip/consensus"] = float(np.mean(np.sum((own - w) ** 2, axis=1)))
            metrics["gossip/messages"] = messages
            centre = sum(ends.values(), np.zeros(D)) / len(ends)
            metrics["consensus/total"] = float(
                np.mean([np.sum((z - centre) ** 2) for z in ends.values()])
            )
        if finished and not cfg.push_sum:
            values = np.linalg.svd(W, compute_uv=False)
            metrics["gossip/spectral_gap"] = 1.0 if m == 1 else 1 - float(values[1])
        rows = {"x": x, "weight": omega, "c_i": c, "last": last, "momentum": momentum}
        kept = {name: value.copy() for name, value in rows.items()}
        history.append(Round(w, own, kept, finished, ends, metrics))
    return history
