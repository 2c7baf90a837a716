"""Schedules of simulated systems by the letter of their rules, slowly: for comparison alone.
Nothing of the package is imported: random numbers, times and events are computed anew."""

from __future__ import annotations

import zlib
from decimal import Decimal
from fractions import Fraction
from math import ceil, floor
from typing import Any

import numpy as np


def draws(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    key = np.array([seed, zlib.crc32(purpose.encode())], np.uint64)
    counter = np.array([0, *counters, *[0] * (3 - len(counters))], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def speeds(kind: tuple[Any, ...], seed: int, m: int, way: str = "") -> list[float]:
    """``("constant", c)``, ``("lognormal", c, σ)``, ``("tiers", [(share, number)])``."""
    name, *rest = kind
    if name == "constant":
        return [float(rest[0])] * m
    if name == "lognormal":
        z = draws(seed, way or "speed").standard_normal(m)
        return [float(rest[0] * np.exp(rest[1] * z[i])) for i in range(m)]
    order = draws(seed, "tiers" + (f" {way}" if way else "")).permutation(m)
    numbers = [0.0] * m
    cuts = [0]
    share_so_far = Decimal(0)
    for share, _ in rest[0]:
        share_so_far += Decimal(str(share))
        cuts.append(floor(Fraction(share_so_far) * m + Fraction(1, 2)))
    cuts[-1] = m
    for tier, (_, number) in enumerate(rest[0]):
        for place in range(cuts[tier], cuts[tier + 1]):
            numbers[int(order[place])] = float(number)
    return numbers


class System:
    """All of a system's parameters, plain: see the keys that are read below."""

    def __init__(self, **given: Any) -> None:
        self.g = given
        seed, m = given["seed"], given["m"]
        self.c = speeds(given["compute"], seed, m)
        self.b_up = speeds(given["up"], seed, m, "up") if given["up"] else [float("inf")] * m
        self.b_down = (
            speeds(given["down"], seed, m, "down") if given["down"] else [float("inf")] * m
        )

    def steps(self, v: int, i: int) -> int:
        g = self.g
        k = g["steps"][i]
        if g["min_work"] < 1:
            u = draws(g["seed"], "work", v, i).random()
            k = max(1, ceil((g["min_work"] + (1 - g["min_work"]) * u) * k))
        return int(k)

    def ticks(self, v: int, i: int) -> int:
        g = self.g
        factor = 1.0
        if g["jitter"] == "half":
            factor = abs(draws(g["seed"], "job", v, i).standard_normal())
        elif g["jitter"]:
            factor = float(np.exp(g["jitter"] * draws(g["seed"], "job", v, i).standard_normal()))
        seconds = g["latency"] + self.steps(v, i) * self.c[i] * factor
        seconds = seconds + g["bytes_down"] / self.b_down[i] + g["bytes_up"] / self.b_up[i]
        return max(1, int(np.rint(1e6 * seconds)))

    def dropped(self, v: int, i: int) -> bool:
        return bool(draws(self.g["seed"], "dropout", v, i).random() < self.g["dropout"])

    def there(self, v: int) -> list[int]:
        g = self.g
        if g["availability"] is None:
            return list(range(g["m"]))
        p = np.broadcast_to(g["availability"], (g["m"],))
        u = draws(g["seed"], "availability", v).random(g["m"])
        return [i for i in range(g["m"]) if u[i] < p[i]]


def buffered(system: System, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All jobs, and what led to each update."""
    g = system.g
    now, v, k = 0, 0, 0
    running: list[dict[str, Any]] = []
    buffer: list[dict[str, Any]] = []
    jobs: list[dict[str, Any]] = []
    updates: list[dict[str, Any]] = []
    started_at: set[tuple[int, int]] = set()
    since = {"started": 0, "dropped": 0, "discarded": 0}

    def start() -> None:
        nonlocal k
        busy = {j["client"] for j in running} | {j["client"] for j in buffer}
        eligible = [i for i in system.there(v) if i not in busy and (i, v) not in started_at]
        q = min(g["concurrency"] - len(running), len(eligible))
        if q <= 0:
            return
        chosen = eligible
        if q < len(eligible):
            places = draws(g["seed"], "participants", v, k).choice(
                len(eligible), q, replace=False, shuffle=False
            )
            chosen = [eligible[place] for place in sorted(places)]
        k += 1
        for i in chosen:
            job = {
                "client": i,
                "version": v,
                "start": now,
                "end": now + system.ticks(v, i),
                "dropped": system.dropped(v, i),
                "s": len(jobs),
                "delivered": False,
                "update": None,
            }
            since["started"] += 1
            started_at.add((i, v))
            jobs.append(job)
            running.append(job)

    def update() -> None:
        nonlocal v, k, buffer
        for job in buffer:
            job["update"] = v
        taus = {job["client"]: v - job["version"] for job in buffer}
        updates.append({"time": now, "stale": taus, "running": len(running), **since})
        since.update(started=0, dropped=0, discarded=0)
        buffer = []
        v += 1
        k = 0

    start()
    while v < rounds:
        if not running:
            update()
            if v < rounds:
                start()
            continue
        now = min(job["end"] for job in running)
        for job in sorted((j for j in running if j["end"] == now), key=lambda j: j["s"]):
            running.remove(job)
            late = g["max_staleness"] is not None and v - job["version"] > g["max_staleness"]
            if job["dropped"]:
                since["dropped"] += 1
            elif late:
                since["discarded"] += 1
                job["delivered"] = True
            else:
                job["delivered"] = True
                buffer.append(job)
                if len(buffer) == g["size"]:
                    update()
                    if v == rounds:
                        return jobs, updates
        start()
    return jobs, updates


def synchronous(system: System, rounds: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All jobs, and what each round was, on a clock with a deadline."""
    g = system.g
    begin = 0
    jobs: list[dict[str, Any]] = []
    ended: list[dict[str, Any]] = []
    for t in range(rounds):
        there = system.there(t)
        wanted = ceil(Fraction(str(g["over"])) * g["n"])
        if wanted >= len(there):
            ids = there
        else:
            places = draws(g["seed"], "participants", t).choice(
                len(there), wanted, replace=False, shuffle=False
            )
            ids = [there[place] for place in sorted(places)]
        delta = {i: system.ticks(t, i) for i in ids}
        survivors = sorted(
            (i for i in ids if not system.dropped(t, i)), key=lambda i: (delta[i], i)
        )
        limit = None if g["deadline"] is None else int(np.rint(1e6 * g["deadline"]))
        accepted = [i for i in survivors if limit is None or delta[i] <= limit][: g["n"]]
        if len(accepted) == g["n"]:
            length = delta[accepted[-1]]
        elif limit is not None:
            length = limit
        else:
            length = max((delta[i] for i in survivors or ids), default=0)
        for i in ids:
            jobs.append(
                {
                    "client": i,
                    "version": t,
                    "start": begin,
                    "end": begin + delta[i],
                    "delivered": i in survivors and delta[i] <= length,
                    "update": t if i in accepted else None,
                }
            )
        begin += length
        ended.append(
            {
                "time": begin,
                "accepted": sorted(accepted),
                "late": len(survivors) - len(accepted),
                "dropped": len(ids) - len(survivors),
            }
        )
    return jobs, ended
