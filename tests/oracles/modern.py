"""The oracle of the methods of 2023 to 2026: NumPy float64, plain loops, on the network TwoLayer.

Written from the papers' rules and from nothing of the package. A dictionary per component, absent
where it is not there; they compose as the callbacks do. Order of a local step: gradient,
perturbation, mixing, corrections, clipping, preconditioning, direction, SGD at a rate of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracles.problems import Schedule, TwoLayer, Vector

Components = Mapping[str, Any]


@dataclass
class Round:
    """What there is after a round: models, rows of clients by name, and states of the server."""

    w: Vector
    evaluated: Vector
    clients: dict[str, dict[int, Any]]
    server: dict[str, Any]
    personal: dict[int, Vector] = field(default_factory=dict)


class Federation:
    """A run from w0; ``lr``, ``decay`` of it per round, ``weight_decay``, ``clip``, ``weighting``.

    ``rounds``: who takes part with which batches; a round without clients changes nothing.
    """

    def __init__(
        self,
        network: TwoLayer,
        schedule: Schedule,
        w0: Vector,
        parts: Components,
        *,
        lr: float,
        decay: float = 1.0,
        weight_decay: float = 0.0,
        clip: float | None = None,
        weighting: str = "uniform",
        server_lr: float = 1.0,
    ) -> None:
        self.network = network
        self.schedule = schedule
        self.parts = parts
        self.lr = lr
        self.decay = decay
        self.weight_decay = weight_decay
        self.clip = clip
        self.weighting = weighting
        self.server_lr = server_lr
        self.m = len(schedule.sizes)
        self.D = len(w0)
        self.w0 = np.array(w0)
        self.w = self.w0.copy()
        self.clients: dict[str, dict[int, Any]] = {}
        zeros = np.zeros(self.D)
        self.server: dict[str, Any] = {
            name: zeros.copy() for name in ("delta", "c", "C", "m", "last", "lambda", "M", "toga")
        }
        self.server |= {"first": zeros.copy(), "q": 1.0, "r": 1.0}
        self.server["mixing"] = parts.get("wmsam", {}).get("alpha", 0.1)
        ends = np.cumsum([0, *(math.prod(shape) for shape in network.shapes)])
        self.slices = [slice(a, b) for a, b in itertools.pairwise(ends)]
        self.head = np.zeros(self.D, dtype=bool)
        self.head[self.slices[2]] = self.head[self.slices[3]] = True
        # FedALS: of each client where its copy counts, and since when and how far it has moved.
        self.valid: dict[int, Any] = {}
        self.origin: dict[int, Vector] = {}
        self.elapsed: dict[int, Vector] = {}
        if "adam" in parts:
            self.server["second"] = np.zeros(len(self.blocks(zeros)))
        self.server["P"] = np.zeros((3, 4))
        self.server["a"] = np.zeros(3)

    # ------------------------------------------------------------------ small helpers

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

    def run(self) -> list[Round]:
        history = []
        evaluated = self.w0
        for t, cohort in enumerate(self.schedule.rounds):
            if cohort:
                evaluated = self.round(t, {i: list(cohort[i]) for i in sorted(cohort)})
            clients = {name: dict(table) for name, table in self.clients.items()}
            server = {name: np.array(value) for name, value in self.server.items()}
            history.append(Round(self.w.copy(), evaluated.copy(), clients, server))
        for i in range(self.m):
            history[-1].personal[i] = self.personal(i)
        return history

    def round(self, t: int, cohort: dict[int, list[Any]]) -> Vector:
        parts, n, m = self.parts, len(cohort), self.m
        self.eta = self.lr * self.decay**t
        total = sum(self.schedule.sizes[i] for i in cohort)
        p = {i: 1.0 / n for i in cohort}
        if self.weighting == "samples":
            p = {i: self.schedule.sizes[i] / total for i in cohort}
        at_server = self.w
        ahead = np.zeros(self.D)
        if "lookahead" in parts:
            ahead = parts["lookahead"] * self.server["m"]
            self.given = at_server + ahead
        elif "ascent" in parts:
            self.given = at_server - length(self.server["last"], parts["ascent"])
        else:
            self.given = at_server
        kept = np.zeros(self.D, dtype=bool)
        if "fixed_head" in parts:
            kept = self.head
        if "proto" in parts:
            kept = np.ones(self.D, dtype=bool)
        self.kept = kept
        self.averaged = np.ones(self.D, dtype=bool)
        for layer, period in parts.get("als", {}).items():
            self.averaged[self.slices[layer]] = period is not None and (t + 1) % period == 0
        ends = {i: self.train(i, batches) for i, batches in cohort.items()}
        x = {i: end["x"] for i, end in ends.items()}
        mean_of = {
            name: sum((np.asarray(end[name]) for end in ends.values()), 0.0) / n
            for name in next(iter(ends.values()))
        }
        moved = sum((p[i] * (x[i] - self.given) for i in cohort), np.zeros(self.D))
        if "fair" in parts:
            d = self.fair(cohort, ends, x)
        else:
            d = moved
        if parts.get("muon", {}).get("average") == "all":
            d = d * n / m
        d = d + ahead
        self.momenta(ahead, moved)
        self.corrections(n, mean_of)
        if "feddyn" in parts:
            a = parts["feddyn"]
            moves = sum((x[i] - self.given for i in cohort), np.zeros(self.D))
            old = self.server["lambda"]
            self.server["lambda"] = np.where(self.averaged, old - a / m * moves, old)
            d = d - self.server["lambda"] / a
        self.moments(n, mean_of)
        self.prototypes(ends)
        stays = kept | ~self.averaged
        self.w = np.where(stays, at_server, at_server + self.server_lr * d)
        for i in cohort:
            self.valid[i] = np.ones(self.D, dtype=bool)
        self.valid = {i: where & ~self.averaged for i, where in self.valid.items()}
        copies = sum((p[i] * x[i] for i in cohort), np.zeros(self.D))
        return np.where(stays, copies, self.w)

    def momenta(self, ahead: Vector, moved: Vector) -> None:
        """What the server remembers of its own movement."""
        parts = self.parts
        if "lookahead" in parts:
            self.server["m"] = ahead + moved
        if "ascent" in parts:
            self.server["last"] = moved

    def corrections(self, n: int, mean_of: dict[str, Any]) -> None:
        """SCAFFOLD's c, and FedWMSAM's states."""
        parts, m = self.parts, self.m
        if "scaffold" in parts:
            gamma = parts["scaffold"].get("momentum")
            if gamma is None:
                self.server["c"] = self.server["c"] + n / m * mean_of["change"]
            else:
                c = self.server["c"]
                c_plus = (1 - gamma) * c + gamma * mean_of["c_plus"]
                self.server["c"] = np.where(self.averaged, c_plus, c)
        if "wmsam" in parts:
            given = parts["wmsam"]
            changes = n * (mean_of["velocity"] - self.server["c"])
            self.server["c"] = self.server["c"] + changes / self.m
            self.server["delta"] = mean_of["velocity"]
            nu = min(given["upper"], max(given["lower"], float(mean_of["nu"])))
            rate = given["rate"]
            self.server["mixing"] = (1 - rate) * self.server["mixing"] + rate * nu

    def moments(self, n: int, mean_of: dict[str, Any]) -> None:
        """Averaged moments, and mean directions."""
        parts, m = self.parts, self.m
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

    def fair(self, cohort: Any, ends: Any, x: dict[int, Vector]) -> Vector:
        """q-FedAvg."""
        q = self.parts["fair"]
        above, below = np.zeros(self.D), 0.0
        for i in cohort:
            u, loss = x[i] - self.given, max(ends[i]["loss"], 1e-10)
            above = above + loss**q * u
            below += q * loss ** (q - 1) * float(np.sum(u**2)) / self.eta + loss**q
        return above / below

    # ------------------------------------------------------------------ a client

    def start(self, i: int) -> Vector:
        w = self.given
        own = self.kept | self.valid.get(i, np.zeros(self.D, dtype=bool))
        x = np.where(own, self.row("x", i, w), w)
        if "ri" in self.parts:
            x = x + self.parts["ri"] * (x - self.row("x", i, self.w0))
        if "ala" in self.parts:
            x = self.between(i)
        return x

    def between(self, i: int) -> Vector:
        """FedALA's θ."""
        last = self.row("x", i, self.given)
        W = self.row("W", i, np.ones(self.D))
        return np.where(self.head, last + (self.given - last) * W, self.given)

    def train(self, i: int, batches: list[Any]) -> dict[str, Any]:
        parts, eta, K, w = self.parts, self.eta, len(batches), self.given
        end: dict[str, Any] = {}
        if "fair" in parts:
            end["loss"] = self.loss(w, i)
        if "ala" in parts:
            rate, steps = parts["ala"]
            last = self.row("x", i, w)
            for _ in range(steps):
                theta = self.between(i)
                G = self.gradient(theta, self.schedule.data[i], i)
                W = self.row("W", i, np.ones(self.D))
                moved = np.clip(W - rate * G * (w - last), 0, 1)
                self.keep("W", i, np.where(self.head, moved, W))
        x = x_0 = self.start(i)
        state = self.begin(i)
        elapsed = 0.0
        for k, batch in enumerate(batches):
            g = self.loss_gradient(x, i, k, batch, state)
            if "mu" in parts:
                g = g + parts["mu"] * (x - w)
            if "scaffold" in parts:
                g = g + self.server["c"] - self.row("c_i", i, np.zeros(self.D))
            if "feddyn" in parts:
                g = g - self.row("lambda_i", i, np.zeros(self.D)) + parts["feddyn"] * (x - w)
            if "toga" in parts:
                g = g + parts["toga"]["beta"] * self.server["toga"]
            if "fixed_head" in parts:
                g = np.where(self.head, 0.0, g)
            if self.clip is not None:
                g = g * min(1.0, self.clip / max(float(np.linalg.norm(g)), 1e-300))
            g = self.direction(g, i, k, state)
            rate = eta
            if "decay" in parts:
                rate = eta * (1 - k / K * (1 - parts["decay"]))
            elapsed += rate
            moved = x - rate * (g + self.weight_decay * x)
            x = np.where(self.head, x_0, moved) if "fixed_head" in parts else moved
        own = self.valid.get(i, np.zeros(self.D, dtype=bool))
        self.origin[i] = np.where(own, self.origin.get(i, x_0), x_0)
        self.elapsed[i] = np.where(own, self.elapsed.get(i, 0.0), 0.0) + elapsed
        velocity = (self.origin[i] - x) / self.elapsed[i]
        end |= {"x": x, "velocity": velocity, "moved_a_step": (x_0 - x) / K}
        self.finish(i, x, x_0, K, velocity, state, end)
        self.keep("x", i, x)
        return end

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
        state["M"] = {
            "zeros": zeros,
            "averaged": self.server["M"],
            "own": self.row("M", i, zeros),
        }[start]
        state["M_begun"] = state["M"]
        if "wmsam" in parts:
            a = self.server["mixing"]
            state["guide"] = self.server["delta"] + a / (1 - a) * (
                self.server["c"] - self.row("c_i", i, zeros)
            )
        state["sums"], state["counts"] = np.zeros((3, 4)), np.zeros(3)
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
        if "sam" in parts:
            g = self.gradient(x + length(g, parts["sam"]), batch, i)
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
            corrects = adam.get("bias_correction", True)
            m_hat = state["m"] / (1 - q * b1 ** (k + 1)) if corrects else state["m"]
            v_hat = state["v"] / (1 - r * b2 ** (k + 1)) if corrects else state["v"]
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
        self, i: int, x: Vector, x_0: Vector, K: int, velocity: Vector, state: Any, end: Any
    ) -> None:
        parts, zeros = self.parts, np.zeros(self.D)
        if "scaffold" in parts:
            old = self.row("c_i", i, zeros)
            new = np.where(self.averaged, old - self.server["c"] + velocity, old)
            end["change"], end["c_plus"] = new - old, new
            self.keep("c_i", i, new)
        if "feddyn" in parts:
            old = self.row("lambda_i", i, zeros)
            new = np.where(self.averaged, old - parts["feddyn"] * (x - self.given), old)
            self.keep("lambda_i", i, new)
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

    def personal(self, i: int) -> Vector:
        """What client i uses itself after the last round, of those methods that say it."""
        self.given = self.w
        if "mixed" in self.parts:
            alpha = self.row("alpha_i", i, self.parts["mixed"][0])
            return alpha * self.row("v", i, self.w0) + (1 - alpha) * self.w
        if "ala" in self.parts:
            return self.between(i)
        if "rod" in self.parts:
            return self.w + self.row("P", i, np.zeros(self.D))
        return self.w


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
