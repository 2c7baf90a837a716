"""Federated fine-tuning with adapters once more, in NumPy and without the package. A network of two
layers, each W + s B A with a bias; masks of what clients train; and the servers of FedIT, FFA-LoRA,
RoLoRA, FlexLoRA, HetLoRA, FLoRA, FedEx-LoRA and LoRA-FAIR."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Layer:
    """Where one layer's numbers lie in the vector: bias (out), A (r, in), B (out, r)."""

    d_in: int
    out: int
    rank: int
    scale: float
    start: int

    @property
    def end(self) -> int:
        return self.start + self.out + self.rank * (self.d_in + self.out)

    @property
    def a(self) -> slice:
        begin = self.start + self.out
        return slice(begin, begin + self.rank * self.d_in)

    @property
    def b(self) -> slice:
        return slice(self.a.stop, self.end)

    @property
    def bias(self) -> slice:
        return slice(self.start, self.start + self.out)

    def factors(self, w: Array) -> tuple[Array, Array]:
        return w[self.a].reshape(self.rank, self.d_in), w[self.b].reshape(self.out, self.rank)


class Network:
    """linear, tanh, linear, mean cross-entropy, each linear map with an adapter."""

    def __init__(self, sizes: Sequence[tuple[int, int, int, float]]) -> None:
        self.layers: list[Layer] = []
        start = 0
        for d_in, out, rank, scale in sizes:
            self.layers.append(Layer(d_in, out, rank, scale, start))
            start = self.layers[-1].end
        self.size = start

    def gradient(self, w: Array, base: Sequence[Array], x: Any, y: Any) -> Array:
        one, two = self.layers
        weights = []
        for layer, frozen in zip(self.layers, base, strict=True):
            a, b = layer.factors(w)
            weights.append(frozen + layer.scale * b @ a)
        h = np.tanh(x @ weights[0].T + w[one.bias])
        z = h @ weights[1].T + w[two.bias]
        z = z - z.max(axis=1, keepdims=True)
        dz = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        dz[np.arange(len(y)), y] -= 1.0
        dz /= len(y)
        dh = (dz @ weights[1]) * (1.0 - h * h)
        g = np.zeros_like(w)
        for layer, before, after in ((one, x, dh), (two, h, dz)):
            a, b = layer.factors(w)
            of_weight = after.T @ before
            g[layer.bias] = after.sum(axis=0)
            g[layer.a] = (layer.scale * b.T @ of_weight).ravel()
            g[layer.b] = (layer.scale * of_weight @ a.T).ravel()
        return g

    def numbers(self) -> npt.NDArray[np.int64]:
        """Of each coordinate of A and B its row or column; -1 elsewhere."""
        found = np.full(self.size, -1)
        for layer in self.layers:
            found[layer.a] = np.repeat(np.arange(layer.rank), layer.d_in)
            found[layer.b] = np.tile(np.arange(layer.rank), layer.out)
        return found


@dataclass
class Client:
    """What the server has of a client that finished."""

    x: Array
    mask: Mask
    p: float


class Rule:
    """FedAvg: what methods change."""

    untrained = "given"
    over = "holders"
    start_round: dict[int, Array]

    def __init__(self, net: Network) -> None:
        self.net = net
        self.last: dict[int, int] = {}

    def mask(self, t: int, i: int) -> Mask:
        return np.ones(self.net.size, bool)

    def begin(self, t: int, i: int, w: Array) -> Array:
        return np.where(self.mask(t, i), w, 0.0 if self.untrained == "zero" else w)

    def extra(self, i: int, x: Array, mask: Mask) -> Array | float:
        return 0.0

    def ended(self, t: int, i: int, start: Array, x: Array, mask: Mask) -> Mask:
        return mask

    def mean(self, w: Array, clients: Mapping[int, Client]) -> Array:
        total = sum(c.p for c in clients.values())
        new = w.copy()
        for j in range(len(w)):
            holders = [c for c in clients.values() if c.mask[j]]
            if self.over == "holders" and holders:
                weight = sum(c.p for c in holders)
                new[j] += sum(c.p * (c.x[j] - w[j]) for c in holders) / weight
            elif self.over == "all":
                new[j] += sum(c.p * (c.x[j] - w[j]) for c in holders) / total
            elif self.over == "zeros":
                new[j] = sum(c.p * c.x[j] for c in holders) / total
        return new

    def server(
        self, t: int, w: Array, base: list[Array], clients: Mapping[int, Client]
    ) -> tuple[Array, list[Array]]:
        return self.mean(w, clients), base

    def down(self, t: int, i: int) -> int:
        return self.net.size if self.untrained == "given" else int(self.mask(t, i).sum())

    def factors(self, clients: Mapping[int, Client], layer: Layer) -> list[tuple[Array, Array]]:
        return [layer.factors(np.where(c.mask, c.x, 0.0)) for c in clients.values()]

    def product(self, clients: Mapping[int, Client], layer: Layer) -> Array:
        total = sum(c.p for c in clients.values())
        pairs = zip(clients.values(), self.factors(clients, layer), strict=True)
        return np.asarray(sum(c.p / total * b @ a for c, (a, b) in pairs))


@dataclass
class Outcome:
    w: Array
    base: list[Array]
    down: int
    up: int
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    lr: float = 0.3
    decay: float = 1.0
    weight_decay: float = 0.01
    adamw: bool = False
    weighting: str = "uniform"


def local_steps(
    rule: Rule, base: list[Array], x: Array, batches: Any, how: Training, t: int, i: int, mask: Mask
) -> Array:
    rate, still = how.lr * how.decay**t, x.copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    for k, (inputs, labels) in enumerate(batches, start=1):
        g = rule.net.gradient(x, base, inputs, labels) + rule.extra(i, x, mask)
        if how.adamw:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            step = m / (1 - 0.9**k) / (np.sqrt(v / (1 - 0.999**k)) + 1e-8)
            x = x - rate * how.weight_decay * x - rate * step
        else:
            x = x - rate * (g + how.weight_decay * x)
        x = np.where(mask, x, still)
    return x


def run(
    rule: Rule, start: Array, base: Sequence[Array], schedule: Any, rounds: int, how: Training
) -> list[Outcome]:
    w, base = start.copy(), [weight.copy() for weight in base]
    outcomes = []
    for t in range(rounds):
        clients: dict[int, Client] = {}
        down = up = 0
        for i in sorted(schedule.rounds[t]):
            mask = rule.mask(t, i)
            down += rule.down(t, i)
            begun = rule.begin(t, i, w)
            x = local_steps(rule, base, begun, schedule.rounds[t][i], how, t, i, mask)
            mask = rule.ended(t, i, begun, x, mask)
            up += int(mask.sum())
            p = float(schedule.sizes[i]) if how.weighting == "samples" else 1.0
            clients[i] = Client(x, mask, p)
        for i in schedule.rounds[t]:
            rule.last[i] = t
        w, base = rule.server(t, w, base, clients)
        outcomes.append(Outcome(w, base, down, up, {"ranks": dict(getattr(rule, "rho", {}))}))
    return outcomes


# --------------------------------------------------------------------------- factors in turn


class Turns(Rule):
    """FFA-LoRA and RoLoRA."""

    def __init__(self, net: Network, factors: Sequence[str]) -> None:
        super().__init__(net)
        self.turns = factors

    def of(self, letters: str) -> Mask:
        mask = self.net.numbers() < 0
        for layer in self.net.layers:
            mask[layer.a] = "A" in letters
            mask[layer.b] = "B" in letters
        return mask

    def mask(self, t: int, i: int) -> Mask:
        return self.of(self.turns[t % len(self.turns)])

    def down(self, t: int, i: int) -> int:
        ever = self.of("".join(self.turns))
        if i not in self.last:
            return int(ever.sum())
        since = np.zeros(self.net.size, bool)
        for v in range(self.last[i], t):
            since |= self.mask(v, i)
        return int(since.sum())


class OwnFactor(Rule):
    """FedSA-LoRA: each client keeps its B, and A is averaged."""

    def __init__(self, net: Network) -> None:
        super().__init__(net)
        self.own: dict[int, Array] = {}
        self.kept = np.zeros(net.size, bool)
        for layer in net.layers:
            self.kept[layer.b] = True

    def begin(self, t: int, i: int, w: Array) -> Array:
        x = w.copy()
        x[self.kept] = self.own.get(i, w[self.kept])
        return x

    def ended(self, t: int, i: int, start: Array, x: Array, mask: Mask) -> Mask:
        self.own[i] = x[self.kept]
        return ~self.kept

    def down(self, t: int, i: int) -> int:
        return self.net.size if i not in self.last else int((~self.kept).sum())


class Given(Rule):
    """Any mask, by (round, client)."""

    def __init__(self, net: Network, masks: Any, untrained: str, over: str) -> None:
        super().__init__(net)
        self.masks, self.untrained, self.over = masks, untrained, over

    def mask(self, t: int, i: int) -> Mask:
        return np.asarray(self.masks(t, i), bool)


# --------------------------------------------------------------------------- unequal ranks


class Ranked(Rule):
    untrained = "zero"

    def __init__(self, net: Network, ranks: Mapping[int, int]) -> None:
        super().__init__(net)
        self.ranks = ranks

    def mask(self, t: int, i: int) -> Mask:
        return self.net.numbers() < self.ranks[i]


class Flex(Ranked):
    def server(
        self, t: int, w: Array, base: list[Array], clients: Mapping[int, Client]
    ) -> tuple[Array, list[Array]]:
        new = self.mean(w, clients)
        for layer in self.net.layers:
            a, _ = layer.factors(w)
            left, right = cut(self.product(clients, layer), layer.rank, a)
            new[layer.a], new[layer.b] = right.ravel(), left.ravel()
        return new, base


def cut(product: Array, rank: int, a: Array) -> tuple[Array, Array]:
    """B and A of the product cut to a rank; rows of ``a`` stay where it has no more."""
    u, s, vt = np.linalg.svd(product, full_matrices=False)
    left, right = np.zeros((len(product), rank)), np.array(a[:rank])
    for k in range(min(rank, len(s))):
        if s[0] == 0 or s[k] <= 1e-10 * s[0]:
            continue
        sign = 1.0 if u[np.argmax(np.abs(u[:, k])), k] > 0 else -1.0
        left[:, k], right[k] = sign * s[k] * u[:, k], sign * vt[k]
    return left, right


class Het(Ranked):
    def __init__(
        self,
        net: Network,
        ranks: Mapping[int, int],
        norm_weighted: bool,
        gamma: float,
        penalty: float,
        over: str,
    ) -> None:
        super().__init__(net, ranks)
        self.norm_weighted, self.gamma, self.penalty = norm_weighted, gamma, penalty
        self.over = over
        self.rho = dict(ranks)

    def mask(self, t: int, i: int) -> Mask:
        return self.net.numbers() < self.rho[i]

    def smaller(self, i: int) -> int:
        return max(1, math.floor(Fraction(str(self.gamma)) * self.rho[i]))

    def blocks(self, i: int, x: Array, layer: Layer) -> tuple[Array, Array, float, float]:
        a, b = layer.factors(x)
        rows = slice(self.smaller(i), self.rho[i])
        return a[rows], b[:, rows], np.linalg.norm(a[rows]), np.linalg.norm(b[:, rows])

    def tail(self, i: int, x: Array) -> float:
        return float(sum(np.prod(self.blocks(i, x, layer)[2:]) for layer in self.net.layers))

    def extra(self, i: int, x: Array, mask: Mask) -> Array:
        g = np.zeros_like(x)
        for layer in self.net.layers:
            a, b, of_a, of_b = self.blocks(i, x, layer)
            rows = slice(self.smaller(i), self.rho[i])
            own = np.zeros((layer.rank, layer.d_in)), np.zeros((layer.out, layer.rank))
            own[0][rows] = of_b * a / of_a if of_a else 0.0
            own[1][:, rows] = of_a * b / of_b if of_b else 0.0
            g[layer.a], g[layer.b] = own[0].ravel(), own[1].ravel()
        return np.asarray(self.penalty * g)

    def ended(self, t: int, i: int, start: Array, x: Array, mask: Mask) -> Mask:
        if self.tail(i, x) < self.tail(i, start):
            self.rho[i] = self.smaller(i)
        return self.mask(t, i)

    def server(
        self, t: int, w: Array, base: list[Array], clients: Mapping[int, Client]
    ) -> tuple[Array, list[Array]]:
        strengths = {i: 0.0 for i in clients}
        for layer in self.net.layers:
            for i, (a, b) in zip(clients, self.factors(clients, layer), strict=True):
                strengths[i] += layer.scale**2 * np.linalg.norm(b @ a) ** 2
        new = self.mean(w, clients)
        total = sum(math.sqrt(s) for s in strengths.values())
        if self.norm_weighted and total:
            by_norm = {i: Client(c.x, c.mask, math.sqrt(strengths[i])) for i, c in clients.items()}
            adapters = self.net.numbers() >= 0
            new = np.where(adapters, self.mean(w, by_norm), new)
        return new, base


# --------------------------------------------------------------------------- a base that changes


class Stacked(Ranked):
    """FLoRA; ``draw(t)`` → U of the next round."""

    def __init__(self, net: Network, ranks: Mapping[int, int], draw: Any, own: Any = None) -> None:
        super().__init__(net, ranks)
        self.draw, self.own = draw, own
        self.costs: list[list[int]] = []

    def placed(self, w: Array, u: Array) -> Array:
        new, begin = w.copy(), 0
        for layer in self.net.layers:
            k = layer.rank * layer.d_in
            new[layer.a] = (2 * u[begin : begin + k] - 1) / math.sqrt(layer.d_in)
            begin += k
        return new

    def begin(self, t: int, i: int, w: Array) -> Array:
        if self.own is not None:
            w = self.placed(w, self.own(t, i))
        return np.where(self.mask(t, i), w, 0.0)

    def server(
        self, t: int, w: Array, base: list[Array], clients: Mapping[int, Client]
    ) -> tuple[Array, list[Array]]:
        new = self.mean(w, clients)
        changed, costs = [], []
        for layer, frozen in zip(self.net.layers, base, strict=True):
            changed.append(frozen + layer.scale * self.product(clients, layer))
            columns = sum(min(self.ranks[i], layer.rank) for i in clients)
            costs.append(min(columns * (layer.d_in + layer.out), layer.d_in * layer.out))
            new[layer.b] = 0.0
        self.costs.append(costs)
        return self.placed(new, self.draw(t + 1)), changed

    def down(self, t: int, i: int) -> int:
        others = int((self.net.numbers() < 0).sum())
        own = int(self.mask(t, i).sum()) if t == 0 else others
        return own + missing(self, t, i)


def missing(rule: Any, t: int, i: int) -> int:
    """What a client lacks of the base: the additions since it was there, at most the weights."""
    total = 0
    for k, layer in enumerate(rule.net.layers):
        since = sum(rule.costs[v][k] for v in range(rule.last.get(i, 0), t))
        total += min(since, layer.d_in * layer.out)
    return total


class Residual(Rule):
    """FedEx-LoRA."""

    def __init__(self, net: Network, rank: int | None) -> None:
        super().__init__(net)
        self.rank = rank
        self.costs: list[list[int]] = []

    def server(
        self, t: int, w: Array, base: list[Array], clients: Mapping[int, Client]
    ) -> tuple[Array, list[Array]]:
        new = self.mean(w, clients)
        changed, costs = [], []
        for layer, frozen in zip(self.net.layers, base, strict=True):
            a, b = layer.factors(new)
            delta = self.product(clients, layer) - b @ a
            columns = (len(clients) - 1) * layer.rank
            if self.rank is not None:
                left, right = cut(delta, self.rank, np.zeros((self.rank, layer.d_in)))
                delta, columns = left @ right, min(self.rank, columns)
            changed.append(frozen + layer.scale * delta)
            costs.append(min(columns * (layer.d_in + layer.out), layer.d_in * layer.out))
        self.costs.append(costs)
        return new, changed

    def down(self, t: int, i: int) -> int:
        return self.net.size + missing(self, t, i)


class Fair(Rule):
    """LoRA-FAIR."""

    def __init__(self, net: Network, penalty: float) -> None:
        super().__init__(net)
        self.penalty = penalty

    def server(
        self, t: int, w: Array, base: list[Array], clients: Mapping[int, Client]
    ) -> tuple[Array, list[Array]]:
        new = self.mean(w, clients)
        for layer in self.net.layers:
            a, b = layer.factors(new)
            rest = self.product(clients, layer) - b @ a
            if self.penalty == 0:
                new[layer.b] = (b + rest @ np.linalg.pinv(a)).ravel()
            else:
                # argmin ‖rest - X a‖² + λ ‖X‖² as least squares of a longer system
                tall = np.vstack([a.T, math.sqrt(self.penalty) * np.eye(layer.rank)])
                right = np.vstack([rest.T, np.zeros((layer.rank, layer.out))])
                new[layer.b] = (b + np.linalg.lstsq(tall, right, rcond=None)[0].T).ravel()
        return new, base
