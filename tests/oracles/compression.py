"""What a client sends in place of its update (§ 20 J): quantisers, signs, random coordinates,
matrices of low rank, and EF21. NumPy float64, plain loops over blocks, columns and coordinates
where that is plainest; what is drawn follows from the keys of § 20 by NumPy's Philox, and from
nothing of the package."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tests.oracles.problems import Vector

SEED = 1  # of every run that is compared
NUMBER = 64  # bits of one, in a float64 learner
SCALE = 32


def drawn(purpose: str, *counters: int, seed: int = SEED) -> np.random.Generator:
    counter = [0, *counters, 0, 0, 0][:4]
    key = [seed, zlib.crc32(purpose.encode())]
    return np.random.Generator(
        np.random.Philox(key=np.array(key, np.uint64), counter=np.array(counter, np.uint64))
    )


def upwards(scale: float) -> float:
    """The least float32 that is not smaller."""
    near = np.float32(scale)
    return float(near if float(near) >= scale else np.nextafter(near, np.float32(np.inf)))


def quantised(v: Vector, s: int, norm: str, chance: Vector) -> Vector:
    """One block."""
    scale = upwards(float(np.sqrt(np.sum(v**2)) if norm == "l2" else np.max(np.abs(v))))
    out = np.zeros_like(v)
    if scale == 0:
        return out
    for j, number in enumerate(v):
        r = abs(number) * s / scale
        level = math.floor(r)
        level += int(chance[j] < r - level)
        assert 0 <= level <= s
        out[j] = scale * math.copysign(level, number) / s
    return out


def orthonormal(p: Vector) -> Vector:
    """Modified Gram-Schmidt, columns in order."""
    p = p.copy()
    before = [float(np.linalg.norm(p[:, j])) for j in range(p.shape[1])]
    for j in range(p.shape[1]):
        left = float(np.linalg.norm(p[:, j]))
        p[:, j] = p[:, j] / left if left > 1e-12 * before[j] else 0.0
        for k in range(j + 1, p.shape[1]):
            p[:, k] = p[:, k] - (p[:, j] @ p[:, k]) * p[:, j]
    return p


class Sender:
    """All clients' messages of a run, with what they keep: ``error``, ``h``, ``q`` by client."""

    def __init__(self, rule: dict[str, Any], shapes: Sequence[tuple[int, ...]]) -> None:
        self.rule = rule
        self.shapes = list(shapes)
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        self.size = int(ends[-1])
        self.layers = [
            slice(int(e) - math.prod(s), int(e)) for e, s in zip(ends, shapes, strict=True)
        ]
        self.error: dict[int, Vector] = {}
        self.h: dict[int, Vector] = {}
        self.q: dict[int, Vector] = {}
        self.mean = np.zeros(self.size)  # EF21's H
        self.changed: list[Vector] = []  # this round's c_i

    def blocks(self) -> list[slice]:
        return self.layers if self.rule.get("per_layer", True) else [slice(0, self.size)]

    def send(self, u: Vector, t: int, i: int) -> tuple[Vector, int, int]:
        """What the server has of u_i, how many numbers are coded, and in how many bits."""
        kind = self.rule["kind"]
        if kind == "ef21":
            h = self.h.get(i, np.zeros(self.size))
            c, numbers, bits = self.mapped(self.rule["compressor"], u - h, t, i)
            self.h[i] = h + c
            self.changed.append(c)
            return (self.h[i] if self.rule["average"] == "participants" else c), numbers, bits
        if kind == "quantised" or (kind == "randk" and not self.rule["memory"]):
            return self.mapped(self.rule, u, t, i)
        v = u + self.error.get(i, np.zeros(self.size))
        sent, numbers, bits = self.mapped(self.rule, v, t, i)
        self.error[i] = v - sent
        return sent, numbers, bits

    def mapped(self, rule: dict[str, Any] | None, v: Vector, t: int, i: int) -> Any:
        kind = "all" if rule is None else rule["kind"]
        return getattr(self, kind)(rule, v, t, i)

    def all(self, rule: Any, v: Vector, t: int, i: int) -> Any:
        return v.copy(), self.size, NUMBER * self.size

    def quantised(self, rule: Any, v: Vector, t: int, i: int) -> Any:
        s = rule["levels"]
        chance = drawn("quantise", t, i).random(self.size)
        parts = [quantised(v[b], s, rule["norm"], chance[b]) for b in self.blocks()]
        bits = SCALE * len(parts) + self.size * math.ceil(math.log2(2 * s + 1))
        return np.concatenate(parts), self.size, bits

    def sign(self, rule: Any, v: Vector, t: int, i: int) -> Any:
        out = np.empty(self.size)
        blocks = self.blocks()
        for b in blocks:
            scale = float(np.float32(np.sum(np.abs(v[b])) / len(v[b])))
            out[b] = np.where(v[b] >= 0, scale, -scale)
        return out, self.size, SCALE * len(blocks) + self.size

    def randk(self, rule: Any, v: Vector, t: int, i: int) -> Any:
        k = math.ceil(Fraction(str(rule["fraction"])) * self.size)
        kept = drawn("randk", t, i).choice(self.size, k, replace=False, shuffle=False)
        out = np.zeros(self.size)
        out[kept] = v[kept] * (1 if rule["memory"] else self.size / k)
        return out, k, NUMBER * k

    def topk(self, rule: Any, v: Vector, t: int, i: int) -> Any:
        k = math.ceil(Fraction(str(rule["fraction"])) * self.size)
        kept = np.argsort(-np.abs(v), kind="stable")[:k]
        out = np.zeros(self.size)
        out[kept] = v[kept]
        return out, k, (NUMBER + 32) * k

    def powersgd(self, rule: Any, v: Vector, t: int, i: int) -> Any:
        matrices = []
        for layer, shape in zip(self.layers, self.shapes, strict=True):
            a, b = shape[0], math.prod(shape[1:])
            r = min(rule["rank"], a, b)
            if len(shape) > 1 and r * (a + b) < a * b:
                matrices.append((layer, a, b, r))
        numbers = self.size
        length = sum(b * r for _, _, b, r in matrices)
        q = self.q.get(i)
        if q is None:
            q = drawn("powersgd", i).standard_normal(length)
        out = v.copy()
        ends = []
        begin = 0
        for layer, a, b, r in matrices:
            m = v[layer].reshape(a, b)
            p = orthonormal(m @ q[begin : begin + b * r].reshape(b, r))
            begin += b * r
            ends.append(m.T @ p)
            out[layer] = (p @ ends[-1].T).ravel()
            numbers += r * (a + b) - a * b
        self.q[i] = np.concatenate([np.zeros(0), *(end.ravel() for end in ends)])
        return out, numbers, NUMBER * numbers

    def end_round(self, m: int) -> Vector | None:
        """EF21's d over all m clients; None: the p_i-weighted mean of what was sent."""
        if self.rule["kind"] != "ef21" or self.rule["average"] != "all":
            return None
        self.mean = self.mean + sum(self.changed, np.zeros(self.size)) / m
        self.changed = []
        return self.mean


def broadcast(
    w: Vector, w0: Vector, s: int, shapes: Sequence[tuple[int, ...]], t: int
) -> tuple[Vector, int]:
    """What clients are given in place of w, and its bits: one draw for all of them."""
    layers = Sender({}, shapes).layers
    v = w - w0
    chance = drawn("broadcast", t).random(len(w))
    q = np.concatenate([quantised(v[b], s, "l2", chance[b]) for b in layers])
    return w + q - (w - w0), SCALE * len(layers) + len(w) * math.ceil(math.log2(2 * s + 1))
