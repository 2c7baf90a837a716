"""A round on simulated devices: who delivers, from which version, after how long.

The plan of a round is known before training. Any process computes it, after a resume from the
beginning again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fl_lightning.virtual.buffered import Buffered, Events, Job, Update
from fl_lightning.virtual.conditions import Deadline, Heterogeneity, Outcome, outcome
from fl_lightning.virtual.devices import TICKS, Durations

StepsOf = Callable[[int, Sequence[int]], dict[int, int]]  # (version, clients) → K_i
Drawn = Callable[[int], Sequence[int]]  # round → clients


@dataclass(frozen=True)
class Planned:
    """Facts of a round that are known beforehand.

    Args:
        ids: clients whose updates it aggregates, ascending.
        versions: client → v_s: the server's steps before its job began.
        discounts: client → σ(τ), the factor of the client's update; empty: 1.
        downloads: how many clients are sent the model in this round.
        uploads: how many updates arrive in the round.
        metrics: metrics that are logged for the round.
        needed: versions from which clients still train after it.
        normalised: whether discounted weights are divided by their sum.
        others: clients that are sent the model in this round although no round uses their update,
            ascending; not known of asynchronous rounds.
        mixed: whether updates are measured from the present model, instead of the model that each
            client was given.
    """

    ids: tuple[int, ...]
    versions: dict[int, int]
    discounts: dict[int, float]
    downloads: int
    uploads: int
    metrics: dict[str, float]
    needed: frozenset[int] = frozenset()
    normalised: bool = False
    mixed: bool = False
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class ScheduledJob:
    """A client's work on one version of the model.

    Args:
        client: who.
        version: the server's steps before it began.
        start, end: in ticks of a microsecond.
        delivered: whether its upload arrived in time to be counted.
        update: the round that used it; None: no round did.
    """

    client: int
    version: int
    start: int
    end: int
    delivered: bool
    update: int | None


@dataclass(eq=False)
class Synchronous:
    """Rounds in which the server waits: for all clients, or on a virtual clock for the first ones.

    Args:
        heterogeneity: which clients drop out.
        drawn: function that returns who takes part in a round.
        wanted: the largest number of accepted clients; None: all.
        steps: K that the participants will take.
        durations: durations on a virtual clock; None without a virtual clock.
        deadline: deadline of the clock.
    """

    heterogeneity: Heterogeneity
    drawn: Drawn
    wanted: int | None
    steps: StepsOf
    durations: Durations | None = None
    deadline: Deadline | None = None

    def __post_init__(self) -> None:
        self._begins = [0]

    def planned(self, t: int, ids: Sequence[int] | None = None) -> Planned:
        """Return round t; ``ids``: the participants, if a method has chosen them."""
        if self.durations is None:
            return self._untimed(t, self.drawn(t) if ids is None else ids)
        begin = self.begin(t)
        found = self.outcome(t)
        seconds = self.durations.seconds
        metrics = {
            "time/virtual": (begin + found.length) / TICKS,
            "system/late": float(len(found.late)),
            "system/dropped": float(len(found.dropped)),
        }
        if found.accepted:
            mean = seconds[list(found.accepted)].mean()
            metrics["system/seconds_per_step"] = float(mean)
        versions = dict.fromkeys(found.accepted, t)
        return Planned(
            found.accepted,
            versions,
            {},
            len(found.ends),
            len(found.arrived),
            metrics,
            others=tuple(sorted(found.ends.keys() - set(found.accepted))),
        )

    def _untimed(self, t: int, ids: Sequence[int]) -> Planned:
        left = tuple(i for i in ids if not self.heterogeneity.drops(t, i))
        metrics = {}
        if self.heterogeneity.dropout:
            metrics["system/dropped"] = float(len(ids) - len(left))
        others = tuple(sorted({*ids} - {*left}))
        versions = dict.fromkeys(left, t)
        return Planned(left, versions, {}, len(ids), len(left), metrics, others=others)

    def outcome(self, t: int) -> Outcome:
        """Return the outcome of round t on the clock."""
        durations = self.durations
        assert durations is not None and self.wanted is not None
        ids = self.drawn(t)
        steps = self.steps(t, ids)
        return outcome(
            ids,
            self.wanted,
            lambda client: self.heterogeneity.drops(t, client),
            lambda client: durations.of_job(t, client, steps[client]),
            None if self.deadline is None else self.deadline.ticks,
        )

    def begin(self, t: int) -> int:
        """Return T_t in ticks: when round t begins."""
        while len(self._begins) <= t:
            past = len(self._begins) - 1
            self._begins.append(self._begins[past] + self.outcome(past).length)
        return self._begins[t]

    def jobs(self, rounds: int) -> Iterator[ScheduledJob]:
        """Return the jobs of so many rounds, in the order of starting."""
        for t in range(rounds):
            begin = self.begin(t)
            found = self.outcome(t)
            for client, ticks in found.ends.items():
                arrived = client in found.arrived
                update = t if client in found.accepted else None
                yield ScheduledJob(client, t, begin, begin + ticks, arrived, update)


@dataclass(eq=False)
class Asynchronous:
    """Rounds that end when enough clients have delivered.

    Args:
        settings: settings of the buffer.
        heterogeneity: which clients are present, and which drop out.
        steps: K that clients will take at a version.
        durations: of jobs.
    """

    settings: Buffered
    heterogeneity: Heterogeneity
    steps: StepsOf
    durations: Durations

    def __post_init__(self) -> None:
        self._events = self._anew()
        self._latest: Update | None = None

    def _anew(self) -> Events:
        def ticks(version: int, client: int) -> int:
            steps = self.steps(version, [client])[client]
            return self.durations.of_job(version, client, steps)

        return Events(self.settings, self.heterogeneity, ticks)

    def update(self, t: int) -> Update:
        """Return the update that leads to the server's step of round t."""
        if self._latest is not None and self._latest.t > t:
            self._events = self._anew()
            self._latest = None
        while self._latest is None or self._latest.t < t:
            self._latest = self._events.next()
        return self._latest

    def planned(self, t: int, ids: Sequence[int] | None = None) -> Planned:
        """Return round t, in which no callback chooses the participants."""
        found = self.update(t)
        stale = {job.client: t - job.version for job in found.jobs}
        metrics = {
            "time/virtual": found.time / TICKS,
            "system/late": float(len(found.discarded)),
            "system/dropped": float(len(found.dropped)),
            "system/running": float(found.running),
        }
        if stale:
            metrics["staleness/mean"] = sum(stale.values()) / len(stale)
            metrics["staleness/max"] = float(max(stale.values()))
            mean = self.durations.seconds[list(stale)].mean()
            metrics["system/seconds_per_step"] = float(mean)
        return Planned(
            tuple(stale),
            {job.client: job.version for job in found.jobs},
            {client: self.settings.weight(tau) for client, tau in stale.items()},
            len(found.started),
            len(found.jobs) + len(found.discarded),
            metrics,
            self._events.versions_in_use(),
            self.settings.normalise,
            self.settings.mixing is not None,
        )

    def jobs(self, rounds: int) -> Iterator[ScheduledJob]:
        """Return the jobs that begin before the last of so many rounds ends, as they start."""
        events = self._anew()
        started: dict[int, Job] = {}
        entered: dict[int, int | None] = {}
        for t in range(rounds):
            found = events.next()
            started |= {job.number: job for job in found.started}
            entered |= {job.number: t for job in found.jobs}
            entered |= {job.number: None for job in found.discarded}
        for number, job in sorted(started.items()):
            delivered = number in entered
            yield ScheduledJob(
                job.client, job.version, job.start, job.end, delivered, entered.get(number)
            )


Plan = Synchronous | Asynchronous
