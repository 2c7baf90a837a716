"""The learner's lr scheduler as a table.

Every engine, process and resumed run reads the same rates from it, for every client.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.introspection.accepted import check
from fl_lightning.schedules import Rate

MOVED = ("lr", "momentum", "betas", "weight_decay")  # options that a scheduler may set
KINDS = (bool, int, float, str, list, tuple)  # of settings as text
CHANGING = ("last_epoch", "last_batch_iteration")
# settings that torch keeps under private names
PRIVATE = ("_milestones", "_schedule_phases", "_anneal_func_type", "_anneal_strategy")
Groups = list[dict[str, Any]]


class ClientSchedule:
    """The settings of the optimizer's parameter groups, by round or by local step.

    Args:
        optimizer: optimizer with parameter groups after the schedulers were built; it gets
            ``given`` instead.
        schedulers: each with the number of rounds or steps between its steps.
        unit: ``"rounds"``: entry t holds in round t; ``"local_steps"``: entry k in step k of each
            client's round.
        given: parameter groups from before the schedulers were built.
        another: function that returns the schedule of a client with so many local steps; None: all
            clients have this one.

    ``account``: unit, classes and arguments as text, to compare with a checkpoint's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: list[tuple[Any, int]],
        unit: str,
        given: list[dict[str, Any]],
        another: Callable[[int], ClientSchedule] | None = None,
    ) -> None:
        self.unit = unit
        self.another = another
        # schedules for other numbers of local steps per client
        self._others: dict[int, ClientSchedule] = {}
        self.schedulers = schedulers
        self._optimizer = optimizer
        self._groups = optimizer.param_groups
        steps = [(type(s).__name__, settings_of(s), every) for s, every in schedulers]
        self.account = f"{unit}: {steps}"
        self._table = [self._now()]
        # A scheduler may set more than the rate when it is built, such as a cycle's momentum. Such
        # a setting holds from the first step on; the rates come from the table.
        groups = []
        for group, set_by_scheduler in zip(given, self._table[0], strict=True):
            others = {k: v for k, v in set_by_scheduler.items() if k != "lr"}
            groups.append({**group, **others})
        optimizer.param_groups = groups

    @property
    def by_step(self) -> bool:
        return self.unit == "local_steps"

    def reach_each(self, steps: Collection[int]) -> None:
        """Fill the tables of clients with so many local steps; not in client threads.

        Raises:
            UserError: as in :meth:`reach`.
        """
        if self.another is None:
            self.reach(max(steps, default=1))
            return
        for number in sorted(set(steps)):
            if number not in self._others:
                self._others[number] = self.another(number)
            self._others[number].reach(number)

    def of_client(self, steps: int) -> ClientSchedule:
        """Schedule of a client with so many local steps, which :meth:`reach_each` has made."""
        return self if self.another is None else self._others[steps]

    def reach(self, entries: int) -> None:
        """Fill the table up to this entry; not in client threads.

        Raises:
            UserError: they give a rate that is negative or not finite.
        """
        optimizer = self._optimizer
        groups = optimizer.param_groups
        # The schedulers continue from the groups as they left them, which clients never get.
        optimizer.param_groups = self._groups
        try:
            with warnings.catch_warnings():
                # torch warns that the optimizer has not stepped: its copies do
                warnings.simplefilter("ignore")
                while len(self._table) < entries:
                    for scheduler, frequency in self.schedulers:
                        if len(self._table) % frequency == 0:
                            scheduler.step()
                    self._table.append(self._now())
        finally:
            optimizer.param_groups = groups

    def __getitem__(self, entry: int) -> Groups:
        return self._table[entry]

    def elapsed(self, steps: int) -> float:
        return math.fsum(groups[0]["lr"] for groups in self._table[:steps])

    @property
    def name(self) -> str:
        return " + ".join(type(scheduler).__name__ for scheduler, _ in self.schedulers)

    def _now(self) -> Groups:
        entry = []
        for group in self._groups:
            settings = {name: plain(group[name]) for name in MOVED if name in group}
            check(f"client_scheduler={self.unit!r}: {self.name}: lr", settings["lr"], Rate)
            entry.append(settings)
        return entry


class ShownScheduler:
    """What ``self.lr_schedulers()`` gives: the learner's own, with the client optimizer's rates."""

    def __init__(self, schedule: ClientSchedule, optimizer: Optimizer) -> None:
        self._scheduler = schedule.schedulers[0][0]
        self._shown = optimizer

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._shown.param_groups]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


def plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(float(v) for v in value)
    return float(value)


def settings_of(scheduler: Any) -> dict[str, Any]:
    """Return what steps do not change: numbers, tables such as milestones, and the schedulers that
    this one steps, with theirs.
    """
    found: dict[str, Any] = {}
    for name, value in vars(scheduler).items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        if parts and all(isinstance(part, LRScheduler) for part in parts):
            found[name] = [(type(part).__name__, settings_of(part)) for part in parts]
        elif isinstance(value, Mapping) and name[0] != "_" and plainly(list(value.items())):
            found[name] = sorted(value.items(), key=repr)
        elif name in PRIVATE or (name[0] != "_" and name not in CHANGING and plainly(value)):
            found[name] = value
    return found


def plainly(value: Any) -> bool:
    return isinstance(value, KINDS) and (
        not isinstance(value, (list, tuple)) or all(map(plainly, value))
    )
