"""Which optimizers and learning rates a run accepts, from the command line and from Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch.optim import Optimizer

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import check
from fl_lightning.schedules import LARGEST, Rate, Schedule


def rates_over(name: str, decay: float | Schedule, rounds: int) -> None:
    """Refuse a decay that becomes negative, or too large for single precision, within a run.

    Args:
        rounds: number of rounds; -1: no end.

    Raises:
        UserError: it names the first such round.
    """
    # Check a schedule at its first rounds and its last one now, and at other rounds when they
    # begin.
    many = 10_000
    asked = list(range(many if rounds < 0 else min(rounds, many)))
    if rounds > many:
        asked.append(rounds - 1)
    if isinstance(decay, Schedule):
        for t in asked:
            check(f"{name}={decay!r}: the learning rate's factor in round {t}", decay(t), Rate)
    elif decay > 1 and (rounds < 0 or (rounds - 1) * math.log(decay) > math.log(LARGEST)):
        run = f"{rounds} rounds"
        if rounds < 0:
            run = "a run without an end (trainer.max_epochs=-1)"
        raise UserError(
            f"{name}={decay!r} multiplies the learning rate in every round: over {run} it becomes "
            "larger than any floating-point number. Give a number up to 1, such as 0.998, or a "
            "schedule that stays finite."
        )


def check_optimizer(name: str, optimizer: Any) -> None:
    """Refuse an object that is not an optimizer, or an optimizer with a step that a run cannot
    take.

    Args:
        name: the option that gave it, ``"client_optimizer"`` or ``"server_optimizer"``.

    Raises:
        UserError: also for learning rates that are negative or not finite, some of which torch's
            optimizers accept.
    """
    if not isinstance(optimizer, Optimizer):
        result = "nothing" if optimizer is None else f"a {type(optimizer).__name__}"
        raise UserError(
            f"{name}: it gives {result}, but has to be a function params -> torch.optim.Optimizer."
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserError(
            f"{name}: {kind} evaluates the loss several times a step, which cannot work here. Use "
            "an optimizer that takes one gradient per step, such as torch.optim.SGD or "
            "torch.optim.Adam."
        )
    if any(group.get("maximize") for group in optimizer.param_groups):
        raise UserError(
            f"{name}: {kind} has maximize=True and would step up the gradient, but methods and the "
            "server need optimizers that step down. Leave it out; to maximize, return the "
            "negated loss."
        )
    for group in optimizer.param_groups:
        if not isinstance(group.get("lr"), Real | torch.Tensor):
            raise UserError(
                f"{name}: {kind} has lr={group.get('lr')!r}, and a run sets the learning rate in "
                "each round, so it needs a number. Give a number; transformers' Adafactor takes it "
                "as Adafactor(params, lr=1e-3, relative_step=False, scale_parameter=False)."
            )
        check(f"{name}: {kind}: lr", float(group["lr"]), Rate)


def check_held(name: str, optimizer: Optimizer, parameters: Sequence[Any]) -> None:
    """Refuse an optimizer that holds none of these parameters."""
    held: set[int] = set()
    for group in optimizer.param_groups:
        held.update(map(id, group["params"]))
    if parameters and held.isdisjoint(map(id, parameters)):
        raise UserError(
            f"{name}: {type(optimizer).__name__} holds none of the parameters of this run, so it "
            "would train nothing. Give it those that the function gets, lambda params: "
            "torch.optim.SGD(params, lr=0.1); in configure_optimizers, self.parameters()."
        )
