"""The methods added in 2026 once more, in NumPy float64 and without the package. Plain loops over
rounds, clients and steps. A method changes the loop at a few places; several stand side by side. N2
to N11 are the sections of the page that has the rules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.oracles.adapters import Layer, cut
from tests.oracles.problems import Quadratic, TwoLayer

Array = npt.NDArray[np.float64]
Coefficient = float | Callable[[int], float]


def at(value: Coefficient, t: int) -> float:
    return float(value(t)) if callable(value) else float(value)


@dataclass(frozen=True)
class Setting:
    """What a run has beside its methods."""

    lr: float = 0.3
    lr_decay: Coefficient = 0.9  # lr * lr_decay ** t, or lr * lr_decay(t)
    weight_decay: float = 0.01
    momentum: float = 0.0  # of the client's SGD, fresh in every round
    adamw: bool = False  # in place of SGD
    clip_norm: float | None = 0.9
    weighting: str = "uniform"
    server_rate: float = 1.0
    server_momentum: float = 0.0
    radius: float | None = None  # FedSAM
    beta: float | None = None  # relaxed initialization

    def rate(self, t: int) -> float:
        decay = self.lr_decay
        return self.lr * (float(decay(t)) if callable(decay) else float(decay) ** t)


@dataclass
class Now:
    """A round: w is w^t, D numbers; m clients are registered."""

    t: int
    w: Array
    eta: float
    p: dict[int, float]
    m: int
    relaxed: bool

    @property
    def n(self) -> int:
        return len(self.p)


@dataclass
class Ended:
    """What a client did: u = x_K - w^t, and moved = x_0 - x_K in K steps."""

    u: Array
    moved: Array
    steps: int


@dataclass
class Outcome:
    """What there is after a round; down and up are the numbers sent in it."""

    w: Array
    clients: dict[str, dict[int, Array]]
    server: dict[str, Array]
    down: int
    up: int
    clipped: int


class Method:
    """FedAvg. ``clients`` and ``server`` are states by the names that ours have."""

    def __init__(self) -> None:
        self.clients: dict[str, dict[int, Array]] = {}
        self.server: dict[str, Array] = {}

    def prepare(self, w0: Array, sizes: Sequence[int], data: Any) -> None:
        self.w0, self.zeros, self.sizes, self.data = w0, np.zeros(len(w0)), sizes, data

    def row(self, name: str, i: int, initial: Array) -> Array:
        return self.clients.get(name, {}).get(i, initial)

    def keep(self, name: str, i: int, value: Array) -> None:
        self.clients.setdefault(name, {})[i] = value

    def trained(self) -> Any:
        return True

    def open(self, now: Now) -> None:
        """The round begins."""

    def begin(self, now: Now, i: int) -> None:
        """Client i begins."""

    def on_features(self, h: Array) -> Any:
        """The slope, in the last layer's inputs, of what is added to the loss."""
        return 0.0

    def on_hidden(self, a: Array) -> Any:
        """The same in the first layer's outputs."""
        return 0.0

    def on_logits(self, z: Array, inputs: Array, net: Any) -> Any:
        return 0.0

    def correct(self, now: Now, i: int, x: Array) -> Any:
        return 0.0

    def direction(self, now: Now, k: int, g: Array) -> Array:
        return g

    def end(self, now: Now, i: int, ended: Ended) -> None:
        """Client i ends."""

    def transmit(self, now: Now, i: int, x: Array, message: Array) -> Array:
        return message

    def update(self, now: Now, d: Array, ends: dict[int, Ended]) -> Array:
        """The server's update, of the mean of messages; and its states."""
        return d

    def after(self, now: Now, w: Array) -> Array:
        return w

    def down(self, now: Now, i: int) -> int:
        """Numbers more than FedAvg's."""
        return 0

    def up(self, now: Now, i: int) -> int:
        return 0


# --------------------------------------------------------------------------- networks


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


class Net:
    """linear, tanh, linear, mean cross-entropy; ``weights`` says of what x the maps are made."""

    size: int

    def weights(self, x: Array) -> list[Array]:
        raise NotImplementedError

    def gather(self, x: Array, slopes: list[Array]) -> Array:
        """The gradient in x of the slopes in the two weights and biases."""
        raise NotImplementedError

    def forward(self, x: Array, inputs: Array) -> tuple[Array, Array, Array]:
        weight1, bias1, weight2, bias2 = self.weights(x)
        a = inputs @ weight1.T + bias1
        h = np.tanh(a)
        return a, h, h @ weight2.T + bias2

    def seen(self, x: Array, inputs: Array) -> Array:
        """The logits in evaluation mode."""
        return self.forward(x, inputs)[2]

    def gradient(self, x: Array, i: int, batch: Any, methods: Sequence[Method]) -> Array:
        labels = np.asarray(batch[1])
        inputs = np.asarray(batch[0], dtype=np.float64).reshape(len(labels), -1)
        a, h, z = self.forward(x, inputs)
        dz = softmax(z)
        dz[np.arange(len(labels)), labels] -= 1.0
        dz /= len(labels)
        for method in methods:
            dz = dz + method.on_logits(z, inputs, self)
        dh = dz @ self.weights(x)[2]
        for method in methods:
            dh = dh + method.on_features(h)
        da = dh * (1.0 - h * h)
        for method in methods:
            da = da + method.on_hidden(a)
        return self.gather(x, [da.T @ inputs, da.sum(axis=0), dz.T @ h, dz.sum(axis=0)])


class Plain(Net):
    """The weights themselves are trained."""

    def __init__(self, d_in: int, hidden: int, classes: int) -> None:
        self.net = TwoLayer(d_in, hidden, classes)
        self.shapes, self.size = self.net.shapes, self.net.size

    def weights(self, x: Array) -> list[Array]:
        return self.net.split(x)

    def gather(self, x: Array, slopes: list[Array]) -> Array:
        return np.concatenate([slope.ravel() for slope in slopes])


class Doubled(Plain):
    """What enters the last layer is doubled in training."""

    def weights(self, x: Array) -> list[Array]:
        weight1, bias1, weight2, bias2 = super().weights(x)
        return [weight1, bias1, 2 * weight2, bias2]

    def gather(self, x: Array, slopes: list[Array]) -> Array:
        return super().gather(x, [*slopes[:2], 2 * slopes[2], slopes[3]])

    def seen(self, x: Array, inputs: Array) -> Array:
        weight1, bias1, weight2, bias2 = super().weights(x)
        return np.asarray(np.tanh(inputs @ weight1.T + bias1) @ weight2.T + bias2)


class Adapters(Net):
    """W + s B A in both layers; biases are trained, W is not."""

    def __init__(self, sizes: Sequence[tuple[int, int, int, float]], frozen: list[Array]) -> None:
        self.layers: list[Layer] = []
        for d_in, out, rank, scale in sizes:
            start = self.layers[-1].end if self.layers else 0
            self.layers.append(Layer(d_in, out, rank, scale, start))
        self.frozen, self.size = frozen, self.layers[-1].end

    def weights(self, x: Array) -> list[Array]:
        found = []
        for layer, weight in zip(self.layers, self.frozen, strict=True):
            a, b = layer.factors(x)
            found += [weight + layer.scale * b @ a, x[layer.bias]]
        return found

    def gather(self, x: Array, slopes: list[Array]) -> Array:
        g = np.zeros(self.size)
        for k, layer in enumerate(self.layers):
            a, b = layer.factors(x)
            slope = layer.scale * slopes[2 * k]
            g[layer.a], g[layer.b] = (b.T @ slope).ravel(), (slope @ a.T).ravel()
            g[layer.bias] = slopes[2 * k + 1]
        return g


@dataclass
class Heads:
    """One layer of several heads: what is frozen, and where the rest lies (None: frozen too)."""

    weight: Array
    bias: Array
    a: Array  # (h, r, in)
    b: Array  # (h, out, r)
    cores: slice
    scales: slice
    where_weight: slice | None = None
    where_bias: slice | None = None


class ManyHeads(Net):
    """W + Σ s_h B_h H_h A_h in both layers (N11)."""

    def __init__(self, layers: Sequence[Heads], size: int) -> None:
        self.layers, self.size = layers, size

    def parts(self, x: Array, layer: Heads) -> tuple[Array, Array]:
        heads, rank = layer.a.shape[:2]
        return x[layer.cores].reshape(heads, rank, rank), x[layer.scales]

    def weights(self, x: Array) -> list[Array]:
        found = []
        for layer in self.layers:
            cores, scales = self.parts(x, layer)
            weight, bias = layer.weight, layer.bias
            if layer.where_weight is not None:
                weight = x[layer.where_weight].reshape(weight.shape)
            if layer.where_bias is not None:
                bias = x[layer.where_bias]
            for s, b, core, a in zip(scales, layer.b, cores, layer.a, strict=True):
                weight = weight + s * b @ core @ a
            found += [weight, bias]
        return found

    def gather(self, x: Array, slopes: list[Array]) -> Array:
        g = np.zeros(self.size)
        for k, layer in enumerate(self.layers):
            cores, scales = self.parts(x, layer)
            slope = slopes[2 * k]
            of_cores, of_scales = np.zeros_like(cores), np.zeros_like(scales)
            for h in range(len(scales)):
                of_cores[h] = scales[h] * layer.b[h].T @ slope @ layer.a[h].T
                of_scales[h] = np.sum(slope * (layer.b[h] @ cores[h] @ layer.a[h]))
            g[layer.cores], g[layer.scales] = of_cores.ravel(), of_scales
            if layer.where_weight is not None:
                g[layer.where_weight] = slope.ravel()
            if layer.where_bias is not None:
                g[layer.where_bias] = slopes[2 * k + 1]
        return g


class Bowls:
    """Quadratic losses, whatever the batch."""

    def __init__(self, problem: Quadratic) -> None:
        self.problem, self.size = problem, problem.size

    def gradient(self, x: Array, i: int, batch: Any, methods: Sequence[Method]) -> Array:
        return self.problem.gradient(x, i, batch)


# --------------------------------------------------------------------------- a run


def to_length(v: Array, length: float) -> Array:
    norm = float(np.linalg.norm(v))
    return length * v / norm if norm > 0 else np.zeros_like(v)


class Local:
    """The steps of one client, in the order of § 1."""

    def __init__(self, net: Any, methods: Sequence[Method], how: Setting) -> None:
        self.net, self.methods, self.how, self.clipped = net, methods, how, 0

    def train(self, now: Now, i: int, x: Array, batches: Sequence[Any]) -> Array:
        how, mask = self.how, np.ones(len(x), bool)
        for method in self.methods:
            mask = mask & method.trained()
        buffer, m, v = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
        for k, batch in enumerate(batches):
            g = np.where(mask, self.net.gradient(x, i, batch, self.methods), 0.0)
            if how.radius is not None:
                g = self.net.gradient(x + to_length(g, how.radius), i, batch, self.methods)
            for method in self.methods:
                g = g + method.correct(now, i, x)
            g = np.where(mask, g, 0.0)
            if how.clip_norm is not None and np.linalg.norm(g) > how.clip_norm:
                g = to_length(g, how.clip_norm)
                self.clipped += 1
            for method in self.methods:
                g = method.direction(now, k, g)
            if how.adamw:
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
                m_hat, v_hat = m / (1 - 0.9 ** (k + 1)), v / (1 - 0.999 ** (k + 1))
                buffer = m_hat / (np.sqrt(v_hat) + 1e-8) + how.weight_decay * x
            else:
                buffer = how.momentum * buffer + g + how.weight_decay * x
            x = np.where(mask, x - now.eta * buffer, x)
        return x


def run(
    net: Any,
    methods: Sequence[Method],
    how: Setting,
    rounds: int,
    w0: Array,
    schedule: Any,
    chosen: Sequence[Sequence[int]] | None = None,
) -> list[Outcome]:
    """``chosen``: by round who was given w, also those that dropped out and are not listed."""
    w, buffer = np.array(w0), np.zeros_like(w0)
    last: dict[int, Array] = {}
    for method in methods:
        method.prepare(np.array(w0), schedule.sizes, schedule.data)
    history = []
    for t in range(rounds):
        cohort = sorted(schedule.rounds[t])
        weights = {i: schedule.sizes[i] if how.weighting == "samples" else 1 for i in cohort}
        p = {i: weight / sum(weights.values()) for i, weight in weights.items()}
        now = Now(t, w, how.rate(t), p, len(schedule.sizes), how.beta is not None)
        local, ends, d = Local(net, methods, how), {}, np.zeros_like(w)
        for method in methods:
            method.open(now)
        mask = np.ones(len(w), bool)
        for method in methods:
            mask = mask & method.trained()
        given = cohort if chosen is None else chosen[t]
        down = sum(len(w) + sum(method.down(now, i) for method in methods) for i in given)
        up = sum(int(mask.sum()) + sum(method.up(now, i) for method in methods) for i in cohort)
        for i in cohort:
            x_0 = w if how.beta is None else w + how.beta * (w - last.get(i, w0))
            for method in methods:
                method.begin(now, i)
            x = local.train(now, i, x_0, schedule.rounds[t][i])
            ends[i], last[i], message = Ended(x - w, x_0 - x, len(schedule.rounds[t][i])), x, x - w
            for method in methods:
                message = method.transmit(now, i, x, message)
            for method in methods:
                method.end(now, i, ends[i])
            d = d + p[i] * message
        if cohort:
            for method in methods:
                d = method.update(now, d, ends)
            buffer = how.server_momentum * buffer + d
            w = w + how.server_rate * buffer
            for method in methods:
                w = method.after(now, w)
        clients: dict[str, dict[int, Array]] = {}
        server: dict[str, Array] = {}
        for method in methods:
            clients |= copy.deepcopy(method.clients)
            server |= copy.deepcopy(method.server)
        history.append(Outcome(w, clients, server, down, up, local.clipped))
    return history


def mean(values: Any) -> Array:
    return np.asarray(np.mean(list(values), axis=0))


# --------------------------------------------------------------------------- earlier methods


class Proximal(Method):
    """FedProx."""

    def __init__(self, mu: float) -> None:
        super().__init__()
        self.mu = mu

    def correct(self, now: Now, i: int, x: Array) -> Array:
        return self.mu * (x - now.w)


class Variates(Method):
    """SCAFFOLD, by displacement."""

    def prepare(self, w0: Array, sizes: Sequence[int], data: Any) -> None:
        super().prepare(w0, sizes, data)
        self.server["ControlVariates.c"] = self.zeros

    def own(self, i: int) -> Array:
        return self.row("ControlVariates.c_i", i, self.zeros)

    def correct(self, now: Now, i: int, x: Array) -> Array:
        return self.server["ControlVariates.c"] - self.own(i)

    def update(self, now: Now, d: Array, ends: dict[int, Ended]) -> Array:
        c = self.server["ControlVariates.c"]
        change = {i: end.moved / (now.eta * end.steps) - c for i, end in ends.items()}
        for i, by in change.items():
            self.keep("ControlVariates.c_i", i, self.own(i) + by)
        self.server["ControlVariates.c"] = c + now.n / now.m * mean(change.values())
        return d

    def down(self, now: Now, i: int) -> int:
        return len(now.w)

    def up(self, now: Now, i: int) -> int:
        return len(now.w)


class Duals(Method):
    """FedDyn; without ``pull`` its step has the dual alone (N1)."""

    def __init__(self, penalty: Coefficient, pull: bool = True) -> None:
        super().__init__()
        self.penalty, self.pull = penalty, pull

    def prepare(self, w0: Array, sizes: Sequence[int], data: Any) -> None:
        super().prepare(w0, sizes, data)
        self.server["DynamicRegularization.lambda_mean"] = self.zeros

    def own(self, i: int) -> Array:
        return self.row("DynamicRegularization.lambda_i", i, self.zeros)

    def correct(self, now: Now, i: int, x: Array) -> Array:
        pull = at(self.penalty, now.t) * (x - now.w) if self.pull else 0.0
        return -self.own(i) + pull

    def update(self, now: Now, d: Array, ends: dict[int, Ended]) -> Array:
        a, name = at(self.penalty, now.t), "DynamicRegularization.lambda_mean"
        for i, end in ends.items():
            self.keep("DynamicRegularization.lambda_i", i, self.own(i) - a * end.u)
        moved = sum((end.u for end in ends.values()), self.zeros)
        self.server[name] = self.server[name] - a / now.m * moved
        return d - self.server[name] / a


class MeanDirection(Method):
    """GlobalDirection, mode "mix"."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha = alpha

    def prepare(self, w0: Array, sizes: Sequence[int], data: Any) -> None:
        super().prepare(w0, sizes, data)
        self.server["GlobalDirection.delta"] = self.zeros

    def direction(self, now: Now, k: int, g: Array) -> Array:
        return (1 - self.alpha) * g + self.alpha * self.server["GlobalDirection.delta"]

    def update(self, now: Now, d: Array, ends: dict[int, Ended]) -> Array:
        velocities = [end.moved / (now.eta * end.steps) for end in ends.values()]
        self.server["GlobalDirection.delta"] = mean(velocities)
        return d

    def down(self, now: Now, i: int) -> int:
        return len(now.w)

    def up(self, now: Now, i: int) -> int:
        return len(now.w) if now.relaxed else 0


# --------------------------------------------------------------------------- N2 to N4


class Aligned(Method):
    """A-FedPD, N2."""

    def __init__(self, penalty: Coefficient) -> None:
        super().__init__()
        self.penalty = penalty

    def prepare(self, w0: Array, sizes: Sequence[int], data: Any) -> None:
        super().prepare(w0, sizes, data)
        self.server["AlignedDuals.lambda_mean"] = self.zeros

    def deviation(self, i: int) -> Array:
        return self.row("AlignedDuals.deviation", i, self.zeros)

    def dual(self, i: int) -> Array:
        return self.deviation(i) + self.server["AlignedDuals.lambda_mean"]

    def correct(self, now: Now, i: int, x: Array) -> Array:
        return -self.dual(i) + at(self.penalty, now.t) * (x - now.w)

    def update(self, now: Now, d: Array, ends: dict[int, Ended]) -> Array:
        a, name = at(self.penalty, now.t), "AlignedDuals.lambda_mean"
        middle = mean(end.u for end in ends.values())
        for i, end in ends.items():
            self.keep("AlignedDuals.deviation", i, self.deviation(i) - a * (end.u - middle))
        self.server[name] = self.server[name] - a * middle
        return d - self.server[name] / a

    def down(self, now: Now, i: int) -> int:
        return len(now.w)


class Augmented(Method):
    """FedADMM, N3."""

    def __init__(self, penalty: Coefficient, rate: Coefficient, previous: str) -> None:
        super().__init__()
        self.penalty, self.rate, self.previous = penalty, rate, previous

    def dual(self, i: int) -> Array:
        return self.row("AugmentedModels.lambda_i", i, self.zeros)

    def correct(self, now: Now, i: int, x: Array) -> Array:
        return -self.dual(i) + at(self.penalty, now.t) * (x - now.w)

    def transmit(self, now: Now, i: int, x: Array, message: Array) -> Array:
        a, old = at(self.penalty, now.t), self.dual(i)
        new = old - a * (x - now.w)
        y = now.w
        if self.previous == "own":
            y = self.row("AugmentedModels.last", i, self.w0)
            self.keep("AugmentedModels.last", i, x)
        self.keep("AugmentedModels.lambda_i", i, new)
        return (x - y) - (new - old) / a

    def update(self, now: Now, d: Array, ends: dict[int, Ended]) -> Array:
        return at(self.rate, now.t) * d


class Memory(Method):
    """FedVARP and MIFA, N4."""

    def __init__(self, estimator: str, units: str) -> None:
        super().__init__()
        self.estimator, self.units = estimator, units

    def prepare(self, w0: Array, sizes: Sequence[int], data: Any) -> None:
        super().prepare(w0, sizes, data)
        self.server["UpdateMemory.y_mean"] = self.zeros

    def update(self, now: Now, d: Array, ends: dict[int, Ended]) -> Array:
        if now.eta == 0:  # nothing changes
            return self.zeros
        s = 1.0 if self.units == "update" else now.eta
        name, v = "UpdateMemory.y", {i: end.u / s for i, end in ends.items()}
        changes = [v[i] - self.row(name, i, self.zeros) for i in ends]
        for i in ends:
            self.keep(name, i, v[i])
        old = self.server["UpdateMemory.y_mean"]
        self.server["UpdateMemory.y_mean"] = old + sum(changes) / now.m
        return s * (old + sum(changes) / (now.n if self.estimator == "saga" else now.m))


# --------------------------------------------------------------------------- N5 to N7


class Decorrelated(Method):
    """FedDecorr, N5, on what enters the last layer, or on what leaves the first."""

    def __init__(self, strength: Coefficient, hidden: bool = False) -> None:
        super().__init__()
        self.given, self.hidden = strength, hidden

    def open(self, now: Now) -> None:
        self.strength = at(self.given, now.t)

    def on_features(self, h: Array) -> Any:
        return 0.0 if self.hidden else self.slope(h)

    def on_hidden(self, a: Array) -> Any:
        return self.slope(a) if self.hidden else 0.0

    def slope(self, h: Array) -> Any:
        B, F = h.shape
        if B == 1:
            return 0.0
        away = h - h.mean(axis=0)
        s = np.sqrt(1e-8 + h.var(axis=0, ddof=1))
        normed = away / s
        R = normed.T @ normed
        np.fill_diagonal(R, 0.0)
        # In normed: of β / B · Σ_{i≠j} R_ij² / (F (F - 1)).
        slope = 4 * self.strength / (B * F * (F - 1)) * normed @ R
        of_s = -(slope * away).sum(axis=0) / s**2
        return (slope - slope.mean(axis=0)) / s + of_s * away / ((B - 1) * s)


class Discrepancy(Method):
    """FedDisco, N6."""

    def __init__(self, a: float, b: float, metric: str, target: Any = None) -> None:
        super().__init__()
        self.a, self.b, self.metric, self.target = a, b, metric, target
        self.weights: list[dict[int, float]] = []

    def distance(self, i: int, classes: int = 3) -> float:
        counts = np.bincount(self.data[i][1], minlength=classes)
        q = counts / counts.sum()
        T = np.full(classes, 1 / classes) if self.target is None else np.array(self.target)
        if self.metric == "kl":
            return float(sum(a * math.log(a / b) for a, b in zip(q, T, strict=True) if a > 0))
        if self.metric == "l1":
            return float(np.abs(q - T).sum())
        if self.metric == "l2":
            return float(np.linalg.norm(q - T))
        return float(1 - q @ T / (np.linalg.norm(q) * np.linalg.norm(T)))

    def update(self, now: Now, d: Array, ends: dict[int, Ended]) -> Array:
        away = {i: self.distance(i) for i in ends}
        if self.metric == "kl" and sum(away.values()) != 0:
            away = {i: value / sum(away.values()) for i, value in away.items()}
        new = {i: max(0.0, now.p[i] - self.a * away[i] + self.b) for i in ends}
        if sum(new.values()) == 0:
            new = now.p
        total = sum(new.values())
        self.weights.append({i: value / total for i, value in new.items()})
        return sum((new[i] / total * end.u for i, end in ends.items()), self.zeros)

    def up(self, now: Now, i: int) -> int:
        return 1


class Trajectory(Method):
    """FedGMT's distillation, N7."""

    def __init__(self, decay: float, strength: Coefficient, temperature: Coefficient) -> None:
        super().__init__()
        self.decay, self.strength, self.temperature = decay, strength, temperature

    def prepare(self, w0: Array, sizes: Sequence[int], data: Any) -> None:
        super().prepare(w0, sizes, data)
        self.server["TrajectoryDistillation.e"] = w0

    def open(self, now: Now) -> None:
        e = self.server["TrajectoryDistillation.e"]
        self.server["TrajectoryDistillation.e"] = self.decay * e + (1 - self.decay) * now.w
        self.gamma, self.tau = at(self.strength, now.t), at(self.temperature, now.t)

    def on_logits(self, z: Array, inputs: Array, net: Any) -> Array:
        teacher = net.seen(self.server["TrajectoryDistillation.e"], inputs)
        away = softmax(z / self.tau) - softmax(teacher / self.tau)
        return self.gamma * self.tau**2 * away / self.tau / len(z)

    def down(self, now: Now, i: int) -> int:
        return len(now.w)


# --------------------------------------------------------------------------- N8


class Soap(Method):
    """Local SOAP, and FedPAC's matrices; tensors by their places."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo: float = 0.95,
        epsilon: float = 1e-4,
        frequency: int = 2,
        averaged: bool = False,
        max_dim: int = 10000,
        excluded: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.shapes, self.betas, self.shampoo, self.epsilon = shapes, betas, shampoo, epsilon
        self.frequency, self.averaged = frequency, averaged
        self.turned = [
            (place, j)
            for place, shape in enumerate(shapes)
            for j, d in enumerate(shape)
            if len(shape) >= 2 and place not in excluded and d <= max_dim
        ]
        self.mean_G = {key: np.zeros((self.width(key),) * 2) for key in self.turned}
        self.ended: list[dict[Any, Array]] = []

    def width(self, key: tuple[int, int]) -> int:
        return self.shapes[key[0]][key[1]]

    def open(self, now: Now) -> None:
        self.ended = []

    def begin(self, now: Now, i: int) -> None:
        self.m = [np.zeros(shape) for shape in self.shapes]
        self.v = [np.zeros(shape) for shape in self.shapes]
        self.G = {key: G if self.averaged else np.zeros_like(G) for key, G in self.mean_G.items()}
        self.Q: dict[tuple[int, int], Array] = {}

    def turn(self, place: int, tensor: Array, back: bool = False) -> Array:
        for key in self.turned:
            if key[0] == place:
                Q = self.Q[key] if back else self.Q[key].T
                tensor = np.moveaxis(np.tensordot(Q, tensor, axes=(1, key[1])), 0, key[1])
        return tensor

    def direction(self, now: Now, k: int, g: Array) -> Array:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        found = []
        for place, (piece, shape) in enumerate(zip(np.split(g, ends), self.shapes, strict=True)):
            tensor = piece.reshape(shape)
            found.append(self.of_tensor(place, k, tensor).ravel())
            for key in self.turned:
                if key[0] == place:
                    self.learn(key, k, tensor)
        return np.concatenate(found)

    def of_tensor(self, place: int, k: int, g: Array) -> Array:
        if k == 0:
            return np.zeros_like(g)
        b1, b2 = self.betas
        turned = self.turn(place, g)
        m = b1 * self.turn(place, self.m[place]) + (1 - b1) * turned
        v = b2 * self.v[place] + (1 - b2) * turned**2
        self.m[place], self.v[place] = self.turn(place, m, back=True), v
        scale = math.sqrt(1 - b2**k) / (1 - b1**k)
        return self.turn(place, scale * m / (np.sqrt(v) + self.epsilon), back=True)

    def learn(self, key: tuple[int, int], k: int, g: Array) -> None:
        place, j = key
        d = self.width(key)
        flat = np.moveaxis(g, j, 0).reshape(d, -1)
        G = self.shampoo * self.G[key] + (1 - self.shampoo) * flat @ flat.T
        c = 1e-4 * np.trace(G) / d
        self.G[key] = G
        if k == 0:
            self.Q[key] = basis(G, c)
        elif k % self.frequency == 0:
            Q = self.Q[key]
            lengths = [q @ G @ q for q in Q.T]
            order = np.argsort(-np.array(lengths), kind="stable")
            self.v[place] = np.take(self.v[place], order, axis=j)
            self.Q[key] = np.linalg.qr((G + c * np.eye(d)) @ Q[:, order])[0]

    def end(self, now: Now, i: int, ended: Ended) -> None:
        self.ended.append(dict(self.G))

    def update(self, now: Now, d: Array, ends: dict[int, Ended]) -> Array:
        if self.averaged:
            self.mean_G = {key: mean(each[key] for each in self.ended) for key in self.turned}
            rows = [self.mean_G[key].ravel() for key in self.turned]
            self.server["SoapDirection.G"] = np.concatenate(rows)
        return d

    def numbers(self) -> int:
        return sum(self.width(key) ** 2 for key in self.turned) if self.averaged else 0

    def down(self, now: Now, i: int) -> int:
        return self.numbers()

    def up(self, now: Now, i: int) -> int:
        return self.numbers()


def basis(G: Array, c: float) -> Array:
    """Eigenvectors, largest first; those of small eigenvalues by a matrix of their own."""
    values, vectors = np.linalg.eigh(G)
    values, vectors = values[::-1], vectors[:, ::-1]
    kept = vectors[:, values > c]
    d, missing = len(G), len(G) - kept.shape[1]
    P = np.eye(d) - kept @ kept.T
    _, others = np.linalg.eigh(P @ np.diag(np.arange(1, d + 1) / d) @ P)
    return np.concatenate([kept, others[:, ::-1][:, :missing]], axis=1)


# --------------------------------------------------------------------------- N10, N11


class Orthogonal(Method):
    """FedSVD: B is trained; after some rounds B A is cut into orthogonal factors."""

    def __init__(self, layers: Sequence[Layer], period: int | None) -> None:
        super().__init__()
        self.layers, self.period = layers, period
        self.given: dict[int, int] = {}
        self.changes: list[int] = []

    def trained(self) -> Any:
        mask = np.ones(self.layers[-1].end, bool)
        for layer in self.layers:
            mask[layer.a] = False
        return mask

    def after(self, now: Now, w: Array) -> Array:
        if self.period is None or (now.t + 1) % self.period != 0:
            return w
        w = w.copy()
        for layer in self.layers:
            a, b = layer.factors(w)
            left, right = cut(b @ a, layer.rank, a)
            w[layer.a], w[layer.b] = right.ravel(), left.ravel()
        self.changes.append(now.t)
        return w

    def down(self, now: Now, i: int) -> int:
        """Without A, unless it changed in a round since the client was given w."""
        since = self.given.get(i, 0)
        self.given[i] = now.t
        if any(t >= since for t in self.changes):
            return 0
        return -sum(layer.rank * layer.d_in for layer in self.layers)


class Scaled(Method):
    """RAVAN: what is sent are the cores times their scales."""

    def __init__(self, layers: Sequence[Heads]) -> None:
        super().__init__()
        self.layers = layers

    def transmit(self, now: Now, i: int, x: Array, message: Array) -> Array:
        message = message.copy()
        for layer in self.layers:
            heads = len(x[layer.scales])
            cores = x[layer.scales][:, None] * x[layer.cores].reshape(heads, -1)
            message[layer.cores] = cores.ravel() - now.w[layer.cores]
            message[layer.scales] = 0.0
        return message

    def numbers(self) -> int:
        return -sum(len(layer.a) for layer in self.layers)

    def down(self, now: Now, i: int) -> int:
        return self.numbers()

    def up(self, now: Now, i: int) -> int:
        return self.numbers()
