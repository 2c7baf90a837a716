"""A run's optimizers, given to it or configured by the learner, with their first rates."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler

from fl_lightning.checks.optimizers import check_held, check_optimizer
from fl_lightning.client.client_optimizer import is_plain_sgd, of_server, rates
from fl_lightning.client.optimizer_copy import Shown, check_alone, shallow
from fl_lightning.errors import UserError
from fl_lightning.introspection.attribute_view import View
from fl_lightning.introspection.init_args import Difference, differences
from fl_lightning.learner.layout import trainable
from fl_lightning.learner.modules import lightning_modules, overrides
from fl_lightning.machine.lightning import MisconfigurationException, _configure_optimizers
from fl_lightning.round.client_schedule import ClientSchedule
from fl_lightning.round.context import ClientRates
from fl_lightning.round.settings import OptimizerFactory, Settings
from fl_lightning.schedules import Schedule, decay_text

# A scheduler writes its own values under these names into a parameter group.
OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")


@dataclass(frozen=True)
class RunOptimizers:
    """The optimizers of a fit.

    Args:
        clients: optimizer over the learner's parameters.
        schedule: the learner's lr scheduler, if it is stepped.
        server: over w.
        server_rates: the server's rates, before any decay.
        accounts: classes and settings as text, which have to be the same in a resumed run.
    """

    clients: Optimizer
    schedule: ClientSchedule | None
    server: Optimizer
    server_rates: list[float]
    accounts: dict[str, str]

    def client_rates(self, device: torch.device, kept: bool) -> ClientRates:
        """Return the clients' rates before any decay; ``kept``: their optimizer state is kept."""
        return rates(self.clients, self.schedule, device, kept)

    def server_facts(self, decay: float | Schedule) -> tuple[str, float | None]:
        """Return the server optimizer's class if it is not plain SGD, else empty; and its one rate.

        The rate is None if it changes.
        """
        (group, *_) = self.server.param_groups
        plain = is_plain_sgd(self.server) and not group["weight_decay"]
        shown = "" if plain else type(self.server).__name__
        if shown == "SGD":
            shown = "SGD with momentum or weight decay"
        return shown, None if decay != 1.0 else self.server_rates[0]

    def describe(self, settings: Settings) -> str:
        """Return both in one line: ``SGD 0.1 × 0.998^t · server SGD 1``."""
        rate = f"{self.clients.param_groups[0]['lr']:g}{decay_text(settings.lr_decay)}"
        line = f"{type(self.clients).__name__} {rate}"
        if self.schedule is not None:
            line += f", {self.schedule.name} by {self.schedule.unit.replace('_', ' ')}"
        return f"{line} · server {type(self.server).__name__} {self.server_rates[0]:g}"


def of_run(
    settings: Settings,
    learner: Any,
    w: Tensor,
    rounds: int,
    note: Callable[[str], None],
    most_steps: Callable[[], int],
) -> RunOptimizers:
    """Return the optimizers that a run's settings ask for.

    Args:
        rounds: number of rounds; -1: no end.
        most_steps: function that returns the most local steps of a client in round 0.

    Raises:
        UserError: an optimizer cannot work, or a scheduler ends before the last round.
    """
    server = of_server(settings.server_optimizer, w)
    check_optimizer("server_optimizer", server)
    check_held("server_optimizer", server, [w])
    unit = settings.client_scheduler
    clients, schedule = of_clients(settings.client_optimizer, learner, unit, note, most_steps)
    check_optimizer("client_optimizer", clients)
    check_held("client_optimizer", clients, [p for _, p in trainable(learner)])
    check_alone(clients)
    accounts = {"client_optimizer": account(clients), "server_optimizer": account(server)}
    if schedule is not None:
        accounts["client_scheduler"] = schedule.account
        # Refuse a scheduler that ends before the last round now, and not in that round.
        if unit == "rounds" and rounds > 0:
            schedule.reach(min(rounds, 10_000))
        elif unit == "local_steps":
            schedule.reach_each([most_steps()])
    server_rates = [float(group["lr"]) for group in server.param_groups]
    return RunOptimizers(clients, schedule, server, server_rates, accounts)


def account(optimizer: Optimizer) -> str:
    """Return an optimizer's class and settings as text."""
    groups = []
    for group in optimizer.param_groups:
        # "initial_lr" is in a group only after a scheduler was built.
        groups.append({k: v for k, v in group.items() if k not in ("params", "initial_lr")})
    return f"{type(optimizer).__name__} {groups}"


def differing(key: str, then: str, now: str) -> list[Difference]:
    """Return the difference between two accounts of an optimizer, such as ``("key.lr", 0.1, 0.2)``.

    0 equals 0.0, and an option that is off may be absent, because another version of torch has
    other options.
    """
    of_class_then, of_class_now = class_of(then), class_of(now)
    if of_class_then != of_class_now:
        return [(key, of_class_then, of_class_now)]
    groups = _options_that_differ(then, now)
    if groups is None:
        return [] if then == now else [(key, then, now)]
    found: list[Difference] = []
    for place, options in enumerate(groups):
        where = key if len(groups) == 1 else f"{key}, parameter group {place}"
        found += [(f"{where}.{name}", a, b) for name, (a, b) in options.items()]
    return found


def class_of(account: str) -> str:
    """Return the name of the class in an account of an optimizer."""
    return account.partition(" ")[0]


def state_fits(then: str, now: str) -> bool:
    """Return whether an optimizer can go on with the state of one with another account."""
    groups = _options_that_differ(then, now)
    if class_of(then) != class_of(now) or groups is None:
        return then == now
    # A step with an option that was off before may read a state that does not exist.
    for options in groups:
        for name, (a, b) in options.items():
            if name not in ("lr", "weight_decay") and bool(a) != bool(b):
                return False
    return True


def _options_that_differ(then: str, now: str) -> list[dict[str, tuple[Any, Any]]] | None:
    """Return name → (then, now) by parameter group; None if the accounts cannot be compared."""
    try:
        groups_then = ast.literal_eval(then.partition(" ")[2])
        groups_now = ast.literal_eval(now.partition(" ")[2])
        found = []
        for before, after in zip(groups_then, groups_now, strict=True):
            found.append({name: (a, b) for name, a, b in differences(before, after) if a or b})
        return found
    except (ValueError, TypeError, AttributeError, SyntaxError, MemoryError, RecursionError):
        # A tensor cannot be shown as a literal, and a checkpoint may hold any object.
        return None


def of_clients(
    factory: OptimizerFactory | None,
    learner: Any,
    unit: str,
    note: Callable[[str], None],
    most_steps: Callable[[], int],
) -> tuple[Optimizer, ClientSchedule | None]:
    """Return the optimizer of the local steps over the learner's parameters, and its scheduler's
    table.

    Args:
        unit: ``client_scheduler``.
        most_steps: function that returns the most local steps of a client in round 0.

    Raises:
        UserError: the learner gives none, or several, or no scheduler.
    """
    schedulers: list[tuple[Any, int]] = []
    given: list[dict[str, Any]] = []
    another = None
    if factory is not None:
        optimizer = factory([p for _, p in trainable(learner)])
    elif unit == "local_steps":
        with steps_shown(learner, most_steps) as asked:
            optimizer, schedulers, given = from_learner(learner)
        # If the scheduler depends on the length of a client's round, build one for each length.
        if asked:
            another = partial(schedule_of, learner)
    else:
        optimizer, schedulers, given = from_learner(learner)
    if unit != "ignore":
        check_scheduler(learner, factory, schedulers, unit)
        return optimizer, ClientSchedule(optimizer, schedulers, unit, given, another)
    if schedulers:
        check_ignored(schedulers)
        optimizer.param_groups = given
        note(
            "the learner's lr scheduler is ignored: clients use the rates that the learner gave "
            "its optimizer, times the round's lr_decay. To step the scheduler, set "
            "client_scheduler='rounds' or 'local_steps'"
        )
    return optimizer, None


def schedule_of(learner: Any, steps: int) -> ClientSchedule:
    """Return the schedule that the learner configures for a client with so many local steps."""
    with steps_shown(learner, lambda: steps):
        optimizer, schedulers, given = from_learner(learner)
    return ClientSchedule(optimizer, schedulers, "local_steps", given)


@contextmanager
def steps_shown(learner: Any, steps: Callable[[], int]) -> Iterator[list[int]]:
    """Within this context the learner finds a client's local steps as
    ``estimated_stepping_batches``.

    The learner's Trainer returns them; the list has them once they were read.
    """
    asked: list[int] = []

    def estimated() -> int:
        asked.append(steps())
        return asked[-1]

    parts = [(part, part._trainer) for part in lightning_modules(learner)]
    for part, trainer in parts:
        if trainer is not None:
            part._trainer = View(trainer, estimated_stepping_batches=estimated)
    try:
        yield asked
    finally:
        for part, trainer in parts:
            part._trainer = trainer


def check_ignored(schedulers: list[tuple[Any, int]]) -> None:
    """Refuse to ignore a scheduler that replaces the rate and the momentum as it is built."""
    for scheduler, _ in schedulers:
        if isinstance(scheduler, lr_scheduler.OneCycleLR | lr_scheduler.CyclicLR):
            raise UserError(
                f"client_scheduler='ignore': {type(scheduler).__name__} replaces the optimizer's "
                "learning rate and momentum, so none are left without it. Set client_scheduler="
                "'local_steps' or 'rounds', or give client_optimizer."
            )


def check_scheduler(
    learner: Any, factory: object, schedulers: list[tuple[Any, int]], unit: str
) -> None:
    """Refuse a scheduler that cannot be stepped as ``client_scheduler`` asks."""
    name = type(learner).__name__
    option = f"client_scheduler={unit!r}"
    if factory is not None:
        raise UserError(
            f"{option} steps the lr scheduler of the learner's configure_optimizers, but "
            "client_optimizer replaces that optimizer. Leave out one of the two."
        )
    if not schedulers:
        raise UserError(
            f"{option}: learner {name}: configure_optimizers gives no lr scheduler. Return one "
            "beside the optimizer, or leave the option out; lr_decay decays by the round."
        )
    if any(isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) for scheduler, _ in schedulers):
        raise UserError(
            f"{option}: ReduceLROnPlateau steps by a metric, which is not known before the run. "
            "Use a scheduler that counts steps, or client_scheduler='ignore' with lr_decay."
        )
    if overrides(learner, "lr_scheduler_step"):
        raise UserError(
            f"{option}: learner {name} steps its scheduler itself (lr_scheduler_step), by values "
            "that only plain training has. Remove that hook, or use client_scheduler='ignore'."
        )


def from_learner(learner: Any) -> tuple[Optimizer, list[tuple[Any, int]], list[dict[str, Any]]]:
    """Return the one optimizer of ``configure_optimizers``, its schedulers, and its groups from
    before these.

    Each scheduler comes with the number of epochs or steps of plain training between its steps.

    Raises:
        UserError: the learner gives several optimizers or none, or a form that Lightning refuses.
    """
    configured = learner.configure_optimizers()
    optimizers: list[Any] = []
    configured_schedulers: list[Any] = []
    if configured is not None:
        try:
            optimizers, configured_schedulers, _ = _configure_optimizers(configured)
        except MisconfigurationException as error:
            text = f"learner {type(learner).__name__}: configure_optimizers: {error}"
            raise UserError(text) from error
    if len(optimizers) != 1:
        raise _not_one(learner, len(optimizers))
    schedulers = [
        stepped_every(learner, optimizers[0], scheduler)
        for scheduler in configured_schedulers
        if scheduler is not None
    ]
    groups = [without_scheduler(group) for group in optimizers[0].param_groups]
    return optimizers[0], schedulers, groups


def stepped_every(learner: object, optimizer: Optimizer, given: Any) -> tuple[Any, int]:
    """Return a configured scheduler, and the epochs or steps of plain training between its steps.

    Raises:
        UserError: it belongs to another optimizer.
    """
    scheduler = given.get("scheduler", given) if isinstance(given, dict) else given
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise UserError(
            f"learner {type(learner).__name__}: configure_optimizers gives a "
            f"{type(scheduler).__name__} that was built with another optimizer than the one that "
            "it gives, so it would not change the rate of any step. Build the scheduler with that "
            "optimizer."
        )
    return scheduler, int(given.get("frequency", 1)) if isinstance(given, dict) else 1


def without_scheduler(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group with the rate that it had before a scheduler was built."""
    settings = {name: value for name, value in group.items() if name not in OF_SCHEDULERS}
    return {**settings, "lr": group.get("initial_lr", group["lr"])}


def _not_one(learner: object, number: int) -> UserError:
    given = f"{number} optimizers" if number else "no optimizer"
    return UserError(
        f"learner {type(learner).__name__}: configure_optimizers gives {given}, and a local step "
        "has exactly one. Return one, or give the run one: "
        "client_optimizer=lambda params: torch.optim.SGD(params, lr=0.1), in a config "
        "client_optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}."
    )


def shown_at(optimizer: Optimizer, rates: ClientRates) -> Optimizer:
    """Return a copy of the clients' optimizer at a round's rates, to read."""
    shown = shallow(optimizer)
    groups = rates.groups(0) or optimizer.param_groups
    shown.param_groups = []
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        present = {**group, **settings, "params": group["params"]}
        present["lr"] = float(settings["lr"]) * rates.factor
        shown.param_groups.append(Shown(present))
    return shown
