"""The rules of 2023 to 2026 on the network TwoLayer, which the oracle's rounds call. Written from
the papers' rules and from nothing of the package. A dictionary per component, absent where it is
not there. Order of a local step: gradient, perturbation, mixing, corrections, clipping,
preconditioning, direction, SGD at a rate of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.oracles.problems import Schedule, TwoLayer, Vector

Components = Mapping[str, Any]


class Modern:
    """The components ``parts`` of a run from w0, with what clients and the server keep. ``given``:
    the model of this round's clients; ``eta``: their rate; ``averaged``: coordinates."""

    given: Vector
    eta: float
    averaged: Any

    def __init__(
        self, network: TwoLayer, schedule: Schedule, w0: Vector, parts: Components, decay: float
    ) -> None:
        self.network = network
        self.schedule = schedule
        self.parts = parts
        self.weight_decay = decay
        self.D = len(w0)
        self.w0 = np.array(w0)
        self.clients: dict[str, dict[int, Any]] = {}
        zeros = np.zeros(self.D)
        self.server: dict[str, Any] = {
            name: zeros.copy() for name in ("delta", "c", "C", "m", "last", "M", "toga", "first")
        }
        self.server |= {"q": 1.0, "r": 1.0}
        self.server["mixing"] = parts.get("wmsam", {}).get("alpha", 0.1)
        ends = np.cumsum([0, *(math.prod(shape) for shape in network.shapes)])
        self.slices = [slice(a, b) for a, b in itertools.pairwise(ends)]
        self.head = np.zeros(self.D, dtype=bool)
        self.head[self.slices[2]] = self.head[self.slices[3]] = True
        if "adam" in parts:
            self.server["second"] = np.zeros(len(self.blocks(zeros)))
        self.server["P"] = np.zeros((3, 4))
        self.server["a"] = np.zeros(3)

    def kept(self) -> Any:
        """The coordinates that are never averaged."""
        return self.head if "fixed_head" in self.parts else np.full(self.D, "proto" in self.parts)

    def row(self, name: str, i: int, initial: Any) -> Any:
        return self.clients.get(name, {}).get(i, initial)

    def keep(self, name: str, i: int, value: Any) -> None:
        table = dict(self.clients.get(name, {}))
        table[i] = value
        self.clients[name] = table

    def gradient(self, x: Vector, batch: Any, i: int, context: Any = None) -> Vector:
        """∇ℓ, of the loss that FedRoD or FedProto change."""
        inputs, labels = batch
        inputs = np.asarray(inputs, dtype=np.float64).reshape(len(labels), -1)
        if "rod" in self.parts:
            return self.balanced(x, inputs, labels, i)[0]
        if "proto" in self.parts:
            return self.pulled(x, inputs, labels)[0]
        return self.network.gradient(x, i, (inputs, labels))

    def forward(self, x: Vector, inputs: Any) -> tuple[Any, Any, list[Any]]:
        weight1, bias1, weight2, bias2 = parts = self.network.split(x)
        h = np.tanh(inputs @ weight1.T + bias1)
        return h, h @ weight2.T + bias2, parts

    def backward(self, x: Vector, inputs: Any, h: Any, dz: Any, dh: Any = 0.0) -> Vector:
        _, _, weight2, _ = self.network.split(x)
        da = (dz @ weight2 + dh) * (1.0 - h * h)
        pieces = [da.T @ inputs, da.sum(axis=0), dz.T @ h, dz.sum(axis=0)]
        return np.concatenate([piece.ravel() for piece in pieces])

    def balanced(self, x: Vector, inputs: Any, labels: Any, i: int) -> tuple[Vector, Any, Any]:
        """FedRoD: the gradient of CE(z + γ log N), the features, and the raw logits."""
        gamma = self.parts["rod"]
        n = np.bincount(self.schedule.data[i][1], minlength=3).astype(np.float64)
        h, z, _ = self.forward(x, inputs)
        with np.errstate(divide="ignore"):
            shifted = z + (gamma * np.log(n) if gamma > 0 else 0.0)
        dz = softmax(shifted)
        dz[np.arange(len(labels)), labels] -= 1.0
        return self.backward(x, inputs, h, dz / len(labels)), h, z

    def pulled(self, x: Vector, inputs: Any, labels: Any) -> tuple[Vector, Any]:
        """FedProto: the gradient of CE and of the pull to prototypes, and the features."""
        strength = self.parts["proto"]
        h, z, _ = self.forward(x, inputs)
        dz = softmax(z)
        dz[np.arange(len(labels)), labels] -= 1.0
        away = h - self.server["P"][labels]
        dh = strength * 2 * away / h.shape[1] * self.server["a"][labels][:, None] / len(labels)
        return self.backward(x, inputs, h, dz / len(labels), dh), h

    def loss(self, x: Vector, i: int) -> float:
        return float(self.network.loss_and_gradient(x, *self.schedule.data[i])[0])

    def blocks(self, v: Vector) -> Vector:
        """The means of v over the blocks of AdamDirection."""
        share = self.parts["adam"].get("share", "rows")
        means: list[float] = []
        for where, shape in zip(self.slices, self.network.shapes, strict=True):
            piece = v[where]
            if share == "full":
                means += piece.tolist()
            elif share == "rows" and len(shape) >= 2:
                means += [float(np.mean(row)) for row in piece.reshape(shape)]
            else:
                means.append(float(np.mean(piece)))
        return np.array(means)

    def spread(self, means: Vector) -> Vector:
        """The reverse: each coordinate gets its block's mean."""
        share = self.parts["adam"].get("share", "rows")
        values: list[float] = []
        left = list(means)
        for shape in self.network.shapes:
            size = math.prod(shape)
            if share == "full":
                number = size
            else:
                number = shape[0] if share == "rows" and len(shape) >= 2 else 1
            for _ in range(number):
                values += [left.pop(0)] * (size // number)
        return np.array(values)

    # ------------------------------------------------------------------ a round

    def broadcast(self, w: Vector) -> Vector:
        """What clients get as w."""
        if "lookahead" in self.parts:
            return w + self.ahead()
        if "ascent" in self.parts:
            return w - length(self.server["last"], self.parts["ascent"])
        return w

    def ahead(self) -> Vector:
        return np.asarray(self.parts.get("lookahead", 0.0) * self.server["m"])

    def rate(self, k: int, K: int) -> float:
        """The share of η in step k."""
        return 1 - k / K * (1 - self.parts["decay"]) if "decay" in self.parts else 1.0

    def update(self, d: Vector, n: int, p: dict[int, float], ends: dict[int, Any]) -> Vector:
        """The server's update, and what it remembers; ``d``: the mean of the updates."""
        parts, m = self.parts, len(self.schedule.sizes)
        moved = sum((p[i] * (end["x"] - self.given) for i, end in ends.items()), np.zeros(self.D))
        mean_of = {
            name: sum((np.asarray(end[name]) for end in ends.values()), 0.0) / n
            for name in next(iter(ends.values()))
        }
        if "fair" in parts:
            d = self.fair(ends)
        if parts.get("muon", {}).get("average") == "all":
            d = d * n / m
        ahead = self.ahead()
        self.server["m"], self.server["last"] = ahead + moved, moved
        if "wmsam" in parts:
            self.guide(n, m, mean_of)
        self.moments(n, mean_of)
        self.prototypes(ends)
        return d + ahead

    def guide(self, n: int, m: int, mean_of: dict[str, Any]) -> None:
        """FedWMSAM's states."""
        given = self.parts["wmsam"]
        self.server["c"] = self.server["c"] + n * (mean_of["velocity"] - self.server["c"]) / m
        self.server["delta"] = mean_of["velocity"]
        nu = min(given["upper"], max(given["lower"], float(mean_of["nu"])))
        rate = given["rate"]
        self.server["mixing"] = (1 - rate) * self.server["mixing"] + rate * nu

    def moments(self, n: int, mean_of: dict[str, Any]) -> None:
        """Averaged moments, and mean directions."""
        parts, m = self.parts, len(self.schedule.sizes)
        if "direction" in parts:
            old = self.server["delta"]
            self.server["delta"] = np.where(self.averaged, mean_of["velocity"], old)
        if "toga" in parts:
            self.server["toga"] = mean_of["moved_a_step"]
        if "adam" in parts:
            if parts["adam"].get("first") == "averaged":
                self.server["first"] = mean_of["m"]
                self.server["q"] = self.server["q"] * mean_of["faded_first"]
            if parts["adam"].get("second") == "averaged":
                self.server["second"] = mean_of["v_blocks"]
                self.server["r"] = self.server["r"] * mean_of["faded_second"]
        if "muon" in parts:
            if parts["muon"].get("start") == "averaged":
                self.server["M"] = mean_of["M"]
            if parts["muon"].get("variates"):
                self.server["C"] = self.server["C"] + n / m * mean_of["M_change"]

    def prototypes(self, ends: dict[int, dict[str, Any]]) -> None:
        parts = self.parts
        if "proto" in parts:
            sums = sum((end["sums"] for end in ends.values()), 0.0)
            counts = sum((end["counts"] for end in ends.values()), 0.0)
            for c in range(3):
                if counts[c] > 0:
                    self.server["P"][c] = sums[c] / counts[c]
                    self.server["a"][c] = 1.0

    def fair(self, ends: dict[int, Any]) -> Vector:
        """q-FedAvg."""
        q = self.parts["fair"]
        above, below = np.zeros(self.D), 0.0
        for end in ends.values():
            u, loss = end["x"] - self.given, max(end["loss"], 1e-10)
            above = above + loss**q * u
            below += q * loss ** (q - 1) * float(np.sum(u**2)) / self.eta + loss**q
        return above / below

    # ------------------------------------------------------------------ a client

    def start(self, i: int, x: Vector) -> Vector:
        """Where client i begins: FedALA's θ, after its W has learned."""
        if "ala" not in self.parts:
            return x
        rate, steps = self.parts["ala"]
        last = self.row("last_i", i, self.given)
        for _ in range(steps):
            G = self.gradient(self.between(i), self.schedule.data[i], i)
            W = self.row("W", i, np.ones(self.D))
            moved = np.clip(W - rate * G * (self.given - last), 0, 1)
            self.keep("W", i, np.where(self.head, moved, W))
        return self.between(i)

    def between(self, i: int) -> Vector:
        """FedALA's θ."""
        last = self.row("last_i", i, self.given)
        W = self.row("W", i, np.ones(self.D))
        return np.where(self.head, last + (self.given - last) * W, self.given)

    def begin(self, i: int) -> dict[str, Any]:
        """What a client has at the start of its steps."""
        zeros, parts = np.zeros(self.D), self.parts
        state: dict[str, Any] = {"m": zeros, "v": zeros, "slope": 0.0}
        adam = parts.get("adam", {})
        if adam.get("first") == "averaged":
            state["m"] = self.server["first"]
        if adam.get("second") == "averaged":
            state["v"] = self.spread(self.server["second"])
        muon = parts.get("muon", {})
        start = muon.get("start", "zeros")
        state["M"] = {"zeros": zeros, "averaged": self.server["M"], "own": self.row("M", i, zeros)}[
            start
        ]
        state["M_begun"] = state["M"]
        if "wmsam" in parts:
            a = self.server["mixing"]
            state["guide"] = self.server["delta"] + a / (1 - a) * (
                self.server["c"] - self.row("c_i", i, zeros)
            )
        state["sums"], state["counts"] = np.zeros((3, 4)), np.zeros(3)
        state["loss"] = self.loss(self.given, i) if "fair" in parts else 0.0
        return state

    def loss_gradient(self, x: Vector, i: int, k: int, batch: Any, state: Any) -> Vector:
        """The gradient, at a perturbed point, and mixed."""
        parts, eta, labels = self.parts, self.eta, np.asarray(batch[1])
        inputs = np.asarray(batch[0], dtype=np.float64).reshape(len(labels), -1)
        if "mixed" in parts:  # APFL, before x moves
            alpha = self.row("alpha_i", i, parts["mixed"][0])
            v = self.row("v", i, self.w0)
            middle = alpha * v + (1 - alpha) * x
            own = self.gradient(middle, batch, i) + self.weight_decay * middle
            state["slope"] = eta * float(np.dot(v - x, own))
            self.keep("v", i, v - eta * alpha * own)
        if "rod" in parts:
            g, h, z = self.balanced(x, inputs, labels, i)
            P = self.row("P", i, np.zeros(self.D))
            weight, bias = P[self.slices[2]].reshape(3, 4), P[self.slices[3]]
            error = softmax(z + h @ weight.T + bias)
            error[np.arange(len(labels)), labels] -= 1.0
            error = error / len(labels)
            slope = np.zeros(self.D)
            slope[self.slices[2]] = (error.T @ h).ravel()
            slope[self.slices[3]] = error.sum(axis=0)
            self.keep("P", i, P - eta * (slope + self.weight_decay * P))
            return g
        if "proto" in parts:
            g, h = self.pulled(x, inputs, labels)
            for row, label in zip(h, labels, strict=True):
                state["sums"][label] += row
                state["counts"][label] += 1
            return g
        if "wmsam" in parts:
            away = self.given + k * state["guide"] - x
            g = self.gradient(x + length(away, parts["wmsam"]["radius"]), batch, i)
            a = self.server["mixing"]
            return a * g + (1 - a) * state["guide"]
        g = self.gradient(x, batch, i)
        if "toga" in parts:
            q = g + parts["toga"]["kappa"] * self.server["toga"]
            g = self.gradient(x + length(q, parts["toga"]["radius"]), batch, i)
        if "meta" in parts:
            a, hessian, delta = parts["meta"]
            g = self.gradient(x - a * g, batch, i)
            if hessian == "free":
                up = self.gradient(x + delta * g, batch, i)
                down = self.gradient(x - delta * g, batch, i)
                g = g - a * (up - down) / (2 * delta)
        return g

    def direction(self, g: Vector, i: int, k: int, state: Any) -> Vector:
        """What SGD follows, of the clipped gradient."""
        parts = self.parts
        if "adam" in parts:
            adam = parts["adam"]
            b1, b2 = adam.get("betas", (0.9, 0.999))
            state["m"] = b1 * state["m"] + (1 - b1) * g
            state["v"] = b2 * state["v"] + (1 - b2) * g**2
            q = self.server["q"] if adam.get("first") == "averaged" else 1.0
            r = self.server["r"] if adam.get("second") == "averaged" else 1.0
            m_hat = state["m"] / (1 - q * b1 ** (k + 1))
            v_hat = state["v"] / (1 - r * b2 ** (k + 1))
            g = m_hat / (np.sqrt(v_hat) + adam.get("epsilon", 1e-8))
        if "muon" in parts:
            g = self.muon(g, k, state)
        if "direction" in parts:
            alpha, mode = parts["direction"]
            g = (g if mode == "add" else (1 - alpha) * g) + alpha * self.server["delta"]
        return g

    def muon(self, g: Vector, k: int, state: Any) -> Vector:
        given = self.parts["muon"]
        mu, nesterov = given.get("momentum", 0.95), given.get("nesterov", True)
        direction, M = np.zeros(self.D), state["M"].copy()
        for place, (where, shape) in enumerate(zip(self.slices, self.network.shapes, strict=True)):
            matrix = len(shape) >= 2 and place not in given.get("exclude", ())
            if not matrix and given.get("vectors", "adam") == "adam":
                b1, b2 = 0.9, 0.95
                m, v = state["m"].copy(), state["v"].copy()
                m[where] = b1 * m[where] + (1 - b1) * g[where]
                v[where] = b2 * v[where] + (1 - b2) * g[where] ** 2
                state["m"], state["v"] = m, v
                root = np.sqrt(v[where] / (1 - b2 ** (k + 1))) + 1e-10
                direction[where] = m[where] / (1 - b1 ** (k + 1)) / root
                continue
            M[where] = mu * M[where] + (1 - mu) * g[where]
            u = (1 - mu) * g[where] + mu * M[where] if nesterov else M[where]
            if given.get("variates"):
                u = M[where] - state["M_begun"][where] + self.server["C"][where]
            if not matrix:
                direction[where] = length(u, 1.0)
                continue
            a, b = shape[0], math.prod(shape) // shape[0]
            s = {
                "original": math.sqrt(max(1.0, a / b)),
                "match_rms_adamw": 0.2 * math.sqrt(max(a, b)),
                "none": 1.0,
            }[given.get("adjust", "original")]
            polar = orthogonal(u.reshape(a, b), given)
            direction[where] = s * given.get("matrix_lr_scale", 1.0) * polar.ravel()
        state["M"] = M
        return direction

    def finish(
        self, i: int, x: Vector, x_0: Vector, K: int, velocity: Vector, state: Any
    ) -> dict[str, Any]:
        """What client i leaves."""
        parts, zeros = self.parts, np.zeros(self.D)
        end = {"x": x, "velocity": velocity, "moved_a_step": (x_0 - x) / K, "loss": state["loss"]}
        if "adam" in parts:
            b1, b2 = parts["adam"].get("betas", (0.9, 0.999))
            end |= {"m": state["m"], "v_blocks": self.blocks(state["v"])}
            end |= {"faded_first": b1**K, "faded_second": b2**K}
        if "muon" in parts:
            end |= {"M": state["M"], "M_change": state["M"] - state["M_begun"]}
            if parts["muon"].get("start") == "own":
                self.keep("M", i, state["M"])
        if "wmsam" in parts:
            old = self.row("c_i", i, zeros)
            self.keep("c_i", i, old - self.server["c"] + velocity)
            moved, delta = x - x_0, self.server["delta"]
            lengths = float(np.linalg.norm(moved)) * float(np.linalg.norm(delta))
            end["nu"] = 1 + float(moved @ delta) / lengths if lengths > 0 else 0.0
        if "mixed" in parts and parts["mixed"][1]:
            alpha = self.row("alpha_i", i, parts["mixed"][0])
            self.keep("alpha_i", i, min(1.0, max(0.0, alpha - state["slope"])))
        end |= {"sums": state["sums"], "counts": state["counts"]}
        self.keep("last_i", i, x)
        return end

    def personal(self, i: int, w: Vector) -> Vector:
        """What client i uses itself after the last round, of those methods that say it."""
        self.given = w
        if "mixed" in self.parts:
            alpha = self.row("alpha_i", i, self.parts["mixed"][0])
            return alpha * self.row("v", i, self.w0) + (1 - alpha) * w
        if "ala" in self.parts:
            return self.between(i)
        if "rod" in self.parts:
            return w + self.row("P", i, np.zeros(self.D))
        return w


def softmax(z: Any) -> Any:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def length(v: Vector, wanted: float) -> Vector:
    """v at another length; 0 where v is 0."""
    norm = float(np.linalg.norm(v))
    return wanted * v / norm if norm > 0 else np.zeros_like(v)


def orthogonal(u: Any, given: Components) -> Any:
    """The polar factor of u, exact or by Newton–Schulz."""
    if given.get("orthogonaliser") == "svd":
        left, values, right = np.linalg.svd(u, full_matrices=False)
        keep = values > 1e-12 * values[0]
        return left[:, keep] @ right[keep]
    x = u / (np.linalg.norm(u) + 1e-7)
    tall = u.shape[0] > u.shape[1]
    x = x.T if tall else x
    for _ in range(given.get("ns_steps", 5)):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x
