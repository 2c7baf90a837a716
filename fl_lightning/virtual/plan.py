"""What a round of a run on simulated devices is: who delivers, from which version, after how long.

It is known before training: any process computes it, after a resume from the beginning again.
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
    """What is known of a round beforehand.

    Args:
        ids: whose updates it aggregates, ascending.
        versions: client → v_s: the server's steps before its job began.
        discounts: client → σ(τ), by which its update counts less; empty: 1.
        downloads: how many clients are sent the model in this round.
        uploads: how many updates arrive in it.
        metrics: what is logged of it.
        needed: versions that are still trained from after it.
        normalised: discounted weights are divided by their sum.
        mixed: updates are measured from the present model, not from what clients were given.
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


@dataclass(frozen=True)
class ScheduledJob:
    """A client's work on one version of the model.

    Args:
        client: who.
        version: the server's steps before it began.
        start, end: in ticks of a microsecond.
        delivered: its upload arrived in time to be counted.
        update: the round that it entered; None: none.
    """

    client: int
    version: int
    start: int
    end: int
    delivered: bool
    update: int | None


class Synchronous:
    """Rounds in which the server waits: for all, or on a virtual clock for the first.

    Args:
        heterogeneity: who drops out.
        drawn: who takes part in a round.
        wanted: so many are accepted at most; None: all.
        steps: K of the participants, as it will be done.
        durations: on a virtual clock; None without a virtual clock.
        deadline: of the clock.
    """

    def __init__(
        self,
        heterogeneity: Heterogeneity,
        drawn: Drawn,
        wanted: int | None,
        steps: StepsOf,
        durations: Durations | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        self.heterogeneity = heterogeneity
        self.drawn = drawn
        self.wanted = wanted
        self.steps = steps
        self.durations = durations
        self.deadline = deadline
        self._begins = [0]

    def planned(self, t: int, ids: Sequence[int] | None = None) -> Planned:
        """Round t; ``ids``: who takes part, where a method has chosen."""
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
        return Planned(found.accepted, versions, {}, len(found.ends), len(found.arrived), metrics)

    def _untimed(self, t: int, ids: Sequence[int]) -> Planned:
        left = tuple(i for i in ids if not self.heterogeneity.drops(t, i))
        metrics = {}
        if self.heterogeneity.dropout:
            metrics["system/dropped"] = float(len(ids) - len(left))
        return Planned(left, dict.fromkeys(left, t), {}, len(ids), len(left), metrics)

    def outcome(self, t: int) -> Outcome:
        """What becomes of round t on the clock."""
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
        """T_t in ticks: when round t begins."""
        while len(self._begins) <= t:
            past = len(self._begins) - 1
            self._begins.append(self._begins[past] + self.outcome(past).length)
        return self._begins[t]

    def jobs(self, rounds: int) -> Iterator[ScheduledJob]:
        """The jobs of so many rounds, in the order of starting."""
        for t in range(rounds):
            begin = self.begin(t)
            found = self.outcome(t)
            for client, ticks in found.ends.items():
                arrived = client in found.arrived
                update = t if client in found.accepted else None
                yield ScheduledJob(client, t, begin, begin + ticks, arrived, update)


class Asynchronous:
    """Rounds that end when enough clients have delivered.

    Args:
        settings: of the buffer.
        heterogeneity: who is there, who drops out.
        steps: K of clients at a version, as it will be done.
        durations: of jobs.
    """

    def __init__(
        self,
        settings: Buffered,
        heterogeneity: Heterogeneity,
        steps: StepsOf,
        durations: Durations,
    ) -> None:
        self.settings = settings
        self.heterogeneity = heterogeneity
        self.steps = steps
        self.durations = durations
        self._events = self._anew()
        self._latest: Update | None = None

    def _anew(self) -> Events:
        def ticks(version: int, client: int) -> int:
            steps = self.steps(version, [client])[client]
            return self.durations.of_job(version, client, steps)

        return Events(self.settings, self.heterogeneity, ticks)

    def update(self, t: int) -> Update:
        """What leads to the server's step of round t."""
        if self._latest is not None and self._latest.t > t:
            self._events = self._anew()
            self._latest = None
        while self._latest is None or self._latest.t < t:
            self._latest = self._events.next()
        return self._latest

    def planned(self, t: int, ids: Sequence[int] | None = None) -> Planned:
        """Round t, in which no callback chooses the participants."""
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
        """The jobs that begin before the last of so many rounds ends, in the order of starting."""
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
