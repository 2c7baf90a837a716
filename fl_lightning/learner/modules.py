"""The modules of a learner, and the hooks of Lightning that it overrides."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from numbers import Number
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from fl_lightning.errors import UserError
from fl_lightning.learner.layout import trainable
from fl_lightning.metrics import Logged

# A run replaces these methods on the learner, and on LightningModules inside it.
SHIMS = ("log", "log_dict", "optimizers", "lr_schedulers")
# These are replaced in a client's local steps.
REPLACED_IN_STEPS = (*SHIMS, "train_dataloader")
# A learner transfers its batches with these hooks, called in this order.
TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def gradient_hook(learner: nn.Module) -> str:
    """Return the first trainable parameter with a hook on its gradient; empty if there is none."""
    for name, parameter in trainable(learner):
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return name
    return ""


def check_gradient_hooks(learner: nn.Module) -> None:
    """Refuse hooks on gradients if copies of the learner train, because copies do not have them.

    Raises:
        UserError: it names the parameter.
    """
    name = gradient_hook(learner)
    if name:
        raise UserError(
            f"learner {type(learner).__name__}: since the run began, {name} has a hook on its "
            "gradient (register_hook, register_post_accumulate_grad_hook), and the copies of the "
            "learner that train clients in parallel do not have that hook. Register it in "
            "__init__, "
            "setup or on_fit_start, or use engine='sequential'."
        )


def keeps_frozen(learner: nn.Module) -> bool:
    """Return whether a learner's steps write no frozen parameter: ``frozen_stay = True``.

    If it does, no copy of the learner needs its own frozen parameters.
    """
    return getattr(learner, "frozen_stay", False) is True


def modes(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    return [(part, part.training) for part in module.modules()]


def lightning_modules(learner: nn.Module) -> list[Any]:
    """Return the learner and the LightningModules inside it, of either namespace."""
    return [part for part in learner.modules() if lightning_base(part) is not None]


def lent_logs(learner: nn.Module) -> dict[int, Any]:
    """Return the ``log`` and ``log_dict`` that Lightning lends to callbacks in the learner, by id.

    Both are methods of the run's module, which no copy of the learner should copy.
    """
    lent: dict[int, Any] = {}
    for part in learner.modules():
        for name in ("log", "log_dict"):
            log = vars(part).get(name)
            if isinstance(log, MethodType):
                lent[id(log)] = log
    return lent


def lightning_base(learner: object) -> Any:
    """``LightningModule`` of the learner's namespace; None if the learner is another module."""
    for kind in reversed(type(learner).__mro__):
        if kind.__name__ == "LightningModule":
            return kind
    return None


def overrides(learner: object, hook: str) -> bool:
    of_base = getattr(lightning_base(learner), hook, None)
    return hook in vars(learner) or getattr(type(learner), hook, None) is not of_base


def deep_copied(learner: nn.Module, memo: dict[int, Any]) -> Any:
    copied = copy.deepcopy(learner, {**without_graphs(learner), **recorders(learner), **memo})
    drop_recorders(copied)
    # Tensors of a copied scripted module are computed from the original's, or require no gradient
    # if the copy was made under no_grad.
    for own, theirs in zip(copied.parameters(), learner.parameters(), strict=True):
        if not own.is_leaf:
            own.detach_()
        own.requires_grad_(theirs.requires_grad)
    return copied


def recorders(learner: nn.Module) -> dict[int, Any]:
    """Return by id the objects with which ``Trainer(profiler="pytorch")`` times modules.

    As a memo for ``copy.deepcopy`` this keeps them from being copied, because they hold the whole
    run.
    """
    found: dict[int, Any] = {}
    for part in learner.modules():
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            recorder = recorder_of(hook)
            if recorder is not None:
                found[id(recorder)] = recorder
    return found


def drop_recorders(copied: nn.Module) -> None:
    """Remove them from a copy, because they time one call at a time, and copies run in parallel."""
    for part in copied.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if recorder_of(hook) is not None]:
                del hooks[key]


def recorder_of(hook: Any) -> Any:
    """Return the profiler's object behind a forward hook; None if the hook is another one."""
    owner = getattr(getattr(hook, "func", None), "__self__", None)
    return owner if type(owner).__name__ == "RegisterRecordFunction" else None


def called_with(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """As many arguments as a step or hook takes; one more that it requires is its loader: 0."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return arguments
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in parameters if p.kind in kinds]
    required = sum(p.default is inspect.Parameter.empty for p in positional)
    return (*arguments, 0)[: max(required, min(len(positional), len(arguments)))]


def check_loggable(learner: str, name: str, value: Any) -> None:
    """Refuse values that ``self.log`` cannot log.

    Raises:
        UserError: ``value`` is not a number, a tensor of one, or a metric of torchmetrics.
    """
    if isinstance(value, Metric | Number) or (isinstance(value, Tensor) and value.numel() == 1):
        return
    given = type(value).__name__
    if isinstance(value, Tensor):
        given = f"tensor of shape {tuple(value.shape)}"
    raise UserError(
        f"learner {learner}: self.log({name!r}, …) got a {given}, and it logs one number: a "
        "number, a tensor with one element or a metric of torchmetrics. Log its mean, or each one."
    )


def logged_of(learner: Any) -> Logged:
    """Return the notes on metrics of the learner's run; new ones if it has no run."""
    module = getattr(getattr(learner, "_trainer", None), "lightning_module", None)
    return getattr(module, "logged", None) or Logged()


def without_graphs(learner: nn.Module) -> dict[int, Any]:
    """Return a memo for ``copy.deepcopy`` with copies of tensors that have a graph, by id.

    ``deepcopy`` refuses such tensors. The hooks of ``torch.nn.utils.spectral_norm`` and
    ``weight_norm`` leave such a weight on their layer.
    """
    memo: dict[int, Any] = {}
    waiting: list[Any] = []
    for module in learner.modules():
        waiting += vars(module).values()
    seen = set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if not value.is_leaf or value.is_inference():
                memo[id(value)] = value.detach().clone()
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set)):
            waiting += value
    return memo
