"""Asynchronous rounds: the server steps when a given number of clients have delivered (FedBuff).

J. Nguyen et al.: Federated Learning with Buffered Asynchronous Aggregation (AISTATS 2022), and
C. Xie et al.: Asynchronous Federated Optimization (2019), which is a buffer of size one.

The order of all events follows from seeds, steps and bytes, so it is known before training.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

import numpy as np

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import (
    Above,
    AtMost,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    checked,
)
from fl_lightning.introspection.papers import Paper
from fl_lightning.sampling import generator
from fl_lightning.virtual.conditions import Heterogeneity
from fl_lightning.virtual.devices import Devices


class Staleness(Protocol):
    """σ(τ): the factor of an update that was computed τ server steps ago."""

    def weight(self, staleness: int) -> float: ...


@checked
@dataclass(frozen=True)
class Polynomial:
    """σ(τ) = (1 + τ)^-a."""

    a: NonNegativeFloat

    def weight(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.a)


@checked
@dataclass(frozen=True)
class Hinge:
    """σ(τ) = 1 up to τ = b, then 1 / (a (τ - b) + 1)."""

    a: NonNegativeFloat
    b: NonNegativeFloat

    def weight(self, staleness: int) -> float:
        return 1.0 if staleness <= self.b else 1 / (self.a * (staleness - self.b) + 1)


WORDS: dict[str, Staleness] = {"inverse_sqrt": Polynomial(0.5), "constant": Polynomial(0.0)}


@checked
@dataclass(frozen=True)
class Buffered:
    """Clients train all the time, and the server steps when ``size`` of them have delivered.

    An epoch is one step of the server. With ``mixing`` α it is FedAsync: each delivery is one step,
    by α σ(τ) (x_s - w^t).

    Args:
        devices: durations of clients' work.
        size: B, deliveries per step; None: 10, and with ``mixing`` 1.
        concurrency: C, number of clients that train at a time.
        staleness: σ, the factor of an update by its age: ``"inverse_sqrt"`` (1 + τ)^-½,
            ``"constant"`` 1, ``Polynomial(a)``, ``Hinge(a, b)``.
        mixing: α of FedAsync; None: FedBuff.
        normalise: divide by Σ p σ(τ), so that old updates do not shrink the step.
        max_staleness: older updates are dropped when they arrive; None: none are.

    Raises:
        UserError: for each argument that cannot work.
    """

    paper = Paper(
        by=lambda given: ["nguyen2022fedbuff" if given.get("mixing") is None else "xie2019fedasync"]
    )

    devices: Devices
    size: PositiveInt | None = None
    concurrency: PositiveInt = 100
    staleness: Literal["inverse_sqrt", "constant"] | Polynomial | Hinge = "inverse_sqrt"
    mixing: Annotated[float, Above(0), AtMost(1)] | None = None
    normalise: bool = False
    max_staleness: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        if self.size is None:
            object.__setattr__(self, "size", 10 if self.mixing is None else 1)
        if self.mixing is not None and (self.size != 1 or self.normalise):
            raise UserError(
                f"asynchronous=Buffered: mixing={self.mixing:g} is FedAsync, whose server steps at "
                "each delivery: leave size and normalise out."
            )

    @property
    def buffer(self) -> int:
        """B."""
        assert self.size is not None
        return self.size

    def weight(self, staleness: int) -> float:
        """Return σ(τ), times α if that is given."""
        rule = WORDS[self.staleness] if isinstance(self.staleness, str) else self.staleness
        weight = rule.weight(staleness)
        return weight if self.mixing is None else self.mixing * weight


@dataclass(frozen=True, order=True)
class Job:
    """A client's work on one version of the model; jobs are ordered by end, then by start.

    Args:
        end: end of the job, in ticks.
        number: s, in the order of starting.
        client, version, start: i_s, v_s, a_s.
        dropped: whether the job ends without a delivery.
    """

    end: int
    number: int
    client: int = field(compare=False)
    version: int = field(compare=False)
    start: int = field(compare=False)
    dropped: bool = field(compare=False)


@dataclass(frozen=True)
class Update:
    """The events that led to a step of the server.

    Args:
        t: the round, which is the version before the step.
        time: in ticks.
        jobs: the jobs delivered into it, ascending by client.
        running: jobs that continue.
        started: jobs since the last step.
        dropped, discarded: jobs since then that ended without a delivery, or too late to be used.
    """

    t: int
    time: int
    jobs: tuple[Job, ...]
    running: int
    started: tuple[Job, ...]
    dropped: tuple[Job, ...]
    discarded: tuple[Job, ...]


class Events:
    """The events of an asynchronous run, one after the other, from its beginning.

    Args:
        settings: size, concurrency, largest staleness.
        heterogeneity: which clients are present, and which drop out.
        ticks: (version, client) → δ.
    """

    def __init__(
        self,
        settings: Buffered,
        heterogeneity: Heterogeneity,
        ticks: Callable[[int, int], int],
    ) -> None:
        self.settings = settings
        self.heterogeneity = heterogeneity
        self.ticks = ticks
        self.time = 0
        self.version = 0
        self._number = 0
        self._draws = 0  # number of draws of starting clients at this version
        self._running: list[Job] = []  # a heap
        self._due: list[Job] = []  # jobs that end at this time, in reverse order
        self._buffer: list[Job] = []
        # Clients that may start: not running, not in the buffer, and not started at this version.
        self._free = np.ones(heterogeneity.m, dtype=bool)
        self._there = heterogeneity.there(0)
        self._started_now: list[int] = []
        self._to_start = True
        self._started: list[Job] = []
        self._dropped: list[Job] = []
        self._discarded: list[Job] = []

    def next(self) -> Update:
        """Advance to the server's next step."""
        while True:
            if self._due:
                full = self._ends(self._due.pop())
                # If jobs end and start at the same instant, the ends come first.
                self._to_start = True
                if full:
                    return self._update()
            elif self._to_start:
                self._start()
                self._to_start = False
            elif self._running:
                self.time = self._running[0].end
                while self._running and self._running[0].end == self.time:
                    self._due.append(heapq.heappop(self._running))
                self._due.reverse()
            else:
                # No client is running: the server steps with the updates that it has.
                self._to_start = True
                return self._update()

    def versions_in_use(self) -> frozenset[int]:
        """Return the versions of running jobs that will deliver."""
        waiting = (*self._running, *self._due)
        return frozenset(job.version for job in waiting if not job.dropped)

    def _start(self) -> None:
        places = self.settings.concurrency - len(self._running)
        eligible = np.flatnonzero(self._free)
        if self._there is not None:
            eligible = self._there[self._free[self._there]]
        q = min(places, len(eligible))
        if q <= 0:
            return
        chosen = eligible
        if q < len(eligible):
            draw = generator(self.heterogeneity.seed, "participants", self.version, self._draws)
            chosen = eligible[np.sort(draw.choice(len(eligible), q, replace=False, shuffle=False))]
        self._draws += 1
        for client in chosen.tolist():
            dropped = self.heterogeneity.drops(self.version, client)
            end = self.time + self.ticks(self.version, client)
            job = Job(end, self._number, client, self.version, self.time, dropped)
            self._number += 1
            self._free[client] = False
            self._started_now.append(client)
            self._started.append(job)
            heapq.heappush(self._running, job)

    def _ends(self, job: Job) -> bool:
        """Take a job that ended; return whether the buffer is full."""
        limit = self.settings.max_staleness
        if job.dropped or (limit is not None and self.version - job.version > limit):
            (self._dropped if job.dropped else self._discarded).append(job)
            # A client does not start again at the version that it has just trained.
            self._free[job.client] = job.version != self.version
            return False
        self._buffer.append(job)
        return len(self._buffer) == self.settings.buffer

    def _update(self) -> Update:
        jobs = tuple(sorted(self._buffer, key=lambda job: job.client))
        update = Update(
            self.version,
            self.time,
            jobs,
            len(self._running) + len(self._due),
            tuple(self._started),
            tuple(self._dropped),
            tuple(self._discarded),
        )
        self.version += 1
        self._draws = 0
        self._free[self._started_now] = True
        self._free[[job.client for job in jobs]] = True
        self._free[[job.client for job in (*self._running, *self._due)]] = False
        self._there = self.heterogeneity.there(self.version)
        for done in (self._buffer, self._started_now, self._started, self._dropped):
            done.clear()
        self._discarded.clear()
        return update
