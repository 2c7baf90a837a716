"""Copies of a user's optimizer, with everything that it stores besides its parameters' state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.errors import UserError
from fl_lightning.learner.layout import same_bits
from fl_lightning.round.client_schedule import MOVED

# Attributes that torch gives every optimizer.
OF_TORCH = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.0)))


class Shown(dict[str, Any]):
    """A parameter group of an optimizer that a learner's hooks may only read.

    The run itself sets values by ``update``.
    """

    def __setitem__(self, name: str, value: Any) -> None:
        if name in MOVED and name in self and value != self[name]:
            raise UserError(
                f"self.optimizers() shows the clients' optimizer only to read: {name}={value!r} "
                "would have no effect, since the run sets it for each client. A schedule is an lr "
                "scheduler of configure_optimizers with client_scheduler='local_steps' or "
                "'rounds', or lr_decay."
            )
        super().__setitem__(name, value)


def shallow(optimizer: Optimizer) -> Optimizer:
    """Return a copy with the same attributes and parameter groups.

    ``copy.copy`` would lose the attributes that a subclass sets, because ``Optimizer.__getstate__``
    returns only state, groups and defaults.
    """
    copied: Optimizer = object.__new__(type(optimizer))
    vars(copied).update(vars(optimizer))
    # A scheduler replaces `step` by a function that steps the original.
    if hasattr(vars(copied).get("step"), "_wrapped_by_lr_sched"):
        del copied.step
    return copied


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes besides those that torch gives every optimizer."""
    return {name: v for name, v in vars(optimizer).items() if name not in OF_TORCH | {"step"}}


def copied_values(values: Mapping[str, Any], replaced: Mapping[int, Any]) -> dict[str, Any]:
    """Return deep copies of values by name; ``replaced``: what takes an object's place, by id."""
    copies = {}
    for name, value in values.items():
        try:
            copies[name] = copy.deepcopy(value, dict(replaced))
        except Exception:  # an object that cannot be copied is shared
            copies[name] = value
    return copies


def check_alone(optimizer: Optimizer) -> None:
    """Refuse a client optimizer of which a client could not have its own copy.

    Raises:
        UserError: it holds another optimizer, or hooks of its steps, which act on parameters that
            are not the client's.
    """
    kind = type(optimizer).__name__
    for name in ("step_pre_hook", "step_post_hook"):
        if getattr(optimizer, f"_optimizer_{name}s", None):
            raise UserError(
                f"client_optimizer: {kind} has hooks of its steps (register_{name}). Each client "
                "steps with a copy of the optimizer, and the copy does not call these hooks. "
                "Remove them. The learner's on_before_optimizer_step sees the gradients of each "
                "step, and its on_train_batch_end sees the model after it."
            )
    for name, held in own_attributes(optimizer).items():
        if isinstance(held, Optimizer):
            other = type(held).__name__
            raise UserError(
                f"client_optimizer: {kind} holds another optimizer ({name}: {other}), which steps "
                f"the learner's parameters and not a client's. Use {other} itself; what {kind} "
                "adds to it (slow weights, say) can be a FederatedCallback with on_local_step_end."
            )


def alike(one: Any, other: Any) -> bool:
    """Return whether two values of an optimizer's setting are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    try:
        return bool(one == other)
    except Exception:  # comparing arrays, for example, fails: count them as changed
        return False


def as_row(optimizer: Optimizer, key: str, value: Any) -> tuple[str, Tensor]:
    """Return a row of a client's optimizer state: the tensor, and a name for its meaning.

    Raises:
        UserError: it is neither a tensor nor a number.
    """
    if isinstance(value, Tensor):
        return key, value.detach().clone()
    for kind in (int, float):
        if isinstance(value, kind):
            return f"{key}:{kind.__name__}", torch.tensor(value, dtype=torch.float64)
    raise UserError(
        f"keep_optimizer_state=True cannot keep {type(optimizer).__name__}'s state "
        f"{key.rpartition('.')[2]!r}, a {type(value).__name__}; tensors and numbers can be kept. "
        "Set it to False, or use another optimizer."
    )
