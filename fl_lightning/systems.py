"""Simulated systems: slow devices, clients that are away or drop out, a clock, asynchrony.

The simulation costs no time: time is virtual, and the order of events is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from torch import Tensor

from fl_lightning.aggregation import traffic
from fl_lightning.callback import Above, AtLeast, AtMost, BelowOne, FederatedCallback, PositiveFloat
from fl_lightning.callback_list import CallbackList
from fl_lightning.errors import UserError
from fl_lightning.round.cohort import Cohort
from fl_lightning.round.settings import Settings
from fl_lightning.virtual.buffered import Buffered, Hinge, Polynomial
from fl_lightning.virtual.conditions import Deadline, Heterogeneity
from fl_lightning.virtual.devices import (
    TICKS,
    Constant,
    Devices,
    Durations,
    HalfNormal,
    LogNormal,
    LogNormalJitter,
    Tiers,
    Trace,
)
from fl_lightning.virtual.planned_round import Asynchronous, Plan, ScheduledJob, Synchronous

Share = Annotated[float, Above(0), AtMost(1)]

__all__ = [
    "Buffered",
    "Constant",
    "Devices",
    "HalfNormal",
    "Hinge",
    "LogNormal",
    "LogNormalJitter",
    "Polynomial",
    "ScheduledJob",
    "SystemHeterogeneity",
    "Tiers",
    "Trace",
    "VirtualClock",
    "schedule",
]


class SystemHeterogeneity(FederatedCallback):
    """Clients that are away, drop out, or do a part of their work.

    All draws depend only on the run's seed, so they are the same in every engine and after a
    resume. Logs ``system/dropped``.
    Sent: the model to a client that drops out, which sends nothing back. Kept: nothing; its rows
    do not change.

    Args:
        dropout: the probability that a participant drops out of a round.
        min_work: u₀: K is ⌈u K_i⌉ with u uniform from u₀ to 1, at least 1; with 1 clients take all
            steps.
        availability: the probability that a client is present in a round, one for all or one each
            ``(m,)``; participants are drawn from the present clients. None: all are.

    Raises:
        UserError: a value is not a probability, or there are more or fewer probabilities than
            clients.

    Example:
        If half of the participants drop out, fewer updates arrive.

        >>> from fl_lightning.systems import SystemHeterogeneity
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(SystemHeterogeneity(dropout=0.5))
        >>> float(run.trainer.callback_metrics["system/dropped"]) >= 0
        True
    """

    neutral: ClassVar[dict[str, Any]] = {"dropout": 0.0, "min_work": 1.0}
    # It decides who takes part and how much work is done. No method's state depends on that.
    role = "system"
    tolerates_staleness = True

    def __init__(
        self,
        dropout: BelowOne = 0.0,
        min_work: Share = 1.0,
        availability: Share | Sequence[Share] | None = None,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.min_work = min_work
        self.availability = availability

    def conditions(self, seed: int, m: int) -> Heterogeneity:
        """Return these settings for m clients.

        Raises:
            UserError: there are more or fewer probabilities than clients.
        """
        given = self.availability
        if given is None:
            return Heterogeneity(seed, m, self.dropout, self.min_work)
        each = np.asarray(given, dtype=float)
        if each.ndim == 0:
            return Heterogeneity(seed, m, self.dropout, self.min_work, float(each))
        if each.shape != (m,):
            raise UserError(
                f"SystemHeterogeneity: availability has {each.size} probabilities, and the data "
                f"{m} clients. Give one for each, or one for all."
            )
        return Heterogeneity(seed, m, self.dropout, self.min_work, each)


class VirtualClock(FederatedCallback):
    """A clock for synchronous rounds on simulated devices, and a deadline.

    ⌈o n⌉ clients are drawn, and the first n that deliver in time are accepted. A round lasts until
    the n-th of these clients delivers. If fewer deliver, it lasts until the deadline, and without a
    deadline until the last one. The other participants are late: they were sent the model, and
    their updates do not count. Logs ``time/virtual`` (seconds since the run's beginning),
    ``system/late``, ``system/dropped`` and ``system/seconds_per_step`` (the mean of the accepted
    clients' c_i, which falls if fast clients are preferred). Clients send and are sent full vectors
    for the clock, whatever a method compresses or leaves out.

    Args:
        devices: durations of clients' work.
        deadline: seconds after which a round ends; None: there is none.
        over_selection: o, at least 1; read as an exact decimal.

    Raises:
        UserError: an argument is not accepted, or sampling is not uniform.
    """

    role = "system"
    cannot_run_with = {"select": "the clock has to know beforehand who is drawn"}

    def __init__(
        self,
        devices: Devices,
        deadline: PositiveFloat | None = None,
        over_selection: Annotated[float, AtLeast(1)] = 1.0,
    ) -> None:
        super().__init__()
        self.devices = devices
        self.deadline = deadline
        self.over_selection = over_selection

    def rule(self) -> Deadline:
        """Return when a round ends, in ticks."""
        ticks = None if self.deadline is None else max(1, round(TICKS * self.deadline))
        return Deadline(ticks, self.over_selection)


def set_conditions(
    cohort: Cohort, asynchronous: Buffered | None, callbacks: Sequence[FederatedCallback]
) -> None:
    """Set a cohort's available clients, and how many are drawn and train at a time."""
    for callback in callbacks:
        if isinstance(callback, SystemHeterogeneity):
            cohort.heterogeneity = callback.conditions(cohort.seed, cohort.m)
        if isinstance(callback, VirtualClock):
            cohort.over_selection = callback.rule()
    if asynchronous is not None:
        most = min(asynchronous.concurrency, cohort.m)
        cohort.running = f"{most} of {cohort.m} clients at a time, {asynchronous.buffer} a step"


def plan(cohort: Cohort, settings: Settings, methods: CallbackList, w: Tensor) -> Plan | None:
    """Return who delivers when; None if all clients take part at once.

    Raises:
        UserError: a method, or a setting, cannot run with this system.
    """
    clock = next((c for c in methods.callbacks if isinstance(c, VirtualClock)), None)
    asynchronous = settings.asynchronous
    if asynchronous is not None:
        _check_asynchronous(asynchronous, cohort, methods)
    if clock is not None and settings.sampling != "uniform":
        raise UserError(
            f"VirtualClock: sampling={settings.sampling!r} draws another number of clients in each "
            "round, and the clock accepts the first n. Use sampling='uniform'."
        )
    # A trial run with one client does not wait for others.
    if cohort.quick or (asynchronous is None and clock is None and cohort.heterogeneity is None):
        return None
    heterogeneity = cohort.heterogeneity or Heterogeneity(cohort.seed, cohort.m)
    down, up = traffic.whole(methods, w)
    if asynchronous is not None:
        durations = Durations(asynchronous.devices, cohort.seed, cohort.m, down, up)
        return Asynchronous(asynchronous, heterogeneity, cohort.steps_in, durations)
    if clock is None:
        return Synchronous(heterogeneity, cohort.participants, None, cohort.steps_in)
    durations = Durations(clock.devices, cohort.seed, cohort.m, down, up)
    drawn = cohort.participants
    return Synchronous(heterogeneity, drawn, cohort.n, cohort.steps_in, durations, clock.rule())


def _check_asynchronous(asynchronous: Buffered, cohort: Cohort, methods: CallbackList) -> None:
    """Refuse methods and settings that cannot work with updates of earlier models."""
    if asynchronous.buffer > cohort.m:
        raise UserError(
            f"asynchronous: size={asynchronous.buffer} is more than the {cohort.m} clients. Each "
            "client waits for the step that uses its update, so this number never arrives. Give a "
            "smaller size."
        )
    for callback in methods.callbacks:
        name = type(callback).__name__
        if isinstance(callback, VirtualClock):
            raise UserError(
                "VirtualClock beside asynchronous: an asynchronous run has its own clock, from its "
                "devices. Leave VirtualClock out."
            )
        sends = any(key.startswith(f"{name}.") for key in methods.sent_to_clients())
        if sends or not (callback.role == "measurement" or callback.tolerates_staleness):
            raise UserError(
                f"method: {name} does not say that it tolerates staleness, and in an asynchronous "
                "run clients train from earlier models, but with present server states. Leave one "
                "of the two out. Or set tolerates_staleness = True in the class, if its clients "
                "read no sent ServerState and its server does not read the number of participants."
            )


def schedule(
    module: Any, data: Any, rounds: int, callbacks: Sequence[Any] = ()
) -> list[ScheduledJob]:
    """Return the jobs of a run, in the order of starting, before it trains.

    Args:
        module: a ``FederatedModule``, asynchronous or not.
        data: its data module.
        rounds: number of rounds of the run.
        callbacks: its methods; without ``asynchronous`` one of them is a :class:`VirtualClock`.

    Raises:
        UserError: there is neither a clock nor ``asynchronous``, or the run would be refused.
    """
    data.prepare_data()
    data.setup("fit")
    jobs: list[ScheduledJob] = module.run.scheduled(data, rounds, callbacks)
    return jobs
