"""A learner's parameters as objects in memory.

This file refuses parameters that cannot lie in one flat vector, or that would leave it in a step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.errors import UserError
from fl_lightning.learner.layout import trainable
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO

Slots = list[tuple[str, nn.Module, dict[str, nn.Parameter | None], dict[str, nn.Module | None]]]


def check_learner_parameters(learner: nn.Module) -> None:
    """Refuse parameters that cannot be part of one flat vector.

    Raises:
        UserError: there are complex parameters, several dtypes, less than float32, nothing
            to train, or two parameters in the same memory.
    """
    check_precision(learner)
    dtypes = {p.dtype for _, p in trainable(learner)}
    if len(dtypes) > 1:
        named = ", ".join(sorted(str(d) for d in dtypes))
        raise UserError(
            f"learner {type(learner).__name__} has trainable parameters of several dtypes "
            f"({named}); a federated run needs one. Convert it (learner.float()) or freeze the "
            "others (requires_grad_(False))."
        )
    if not dtypes:
        raise UserError(
            f"learner {type(learner).__name__} has no trainable parameters: nothing to average. "
            "Leave requires_grad on for at least one, and create them in __init__, setup or "
            "configure_model."
        )
    for one, other in sharing(learner):
        raise UserError(
            f"learner {type(learner).__name__}: {one} and {other} are two tensors over the same "
            "memory. A federated run would silently separate them, because each parameter gets its "
            "own place in one vector. Make them one Parameter (b.weight = a.weight, not a new "
            "nn.Parameter over its data), or give each its own (clone())."
        )


def check_precision(learner: nn.Module) -> None:
    """Refuse trainable parameters of less than float32, which lose small steps, and complex ones.

    Frozen parameters may have any dtype.

    Raises:
        UserError: it names the first of them.
    """
    for name, parameter in trainable(learner):
        wide = torch.promote_types(parameter.dtype, torch.float32) == parameter.dtype
        if parameter.is_complex() or not wide:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UserError(
                f"learner {type(learner).__name__}: the trainable parameter {name} is {kind}, and "
                "the server's model, sums and states would be too, which loses small steps. Make "
                "it float32 (learner.float(), or parameter.data = parameter.data.float(); a "
                "complex one torch.view_as_real(value), with view_as_complex in forward); for a "
                "forward pass in bfloat16 use Trainer(precision='bf16-mixed'). Frozen parameters "
                "may have any dtype."
            )


def sharing(learner: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of two tensors that begin at one place, one of them a trainable parameter."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in [*learner.named_parameters(), *learner.named_buffers()]:
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            other, beside = first.setdefault(tensor.data_ptr(), (name, tensor))
            if other != name and (tensor.requires_grad or beside.requires_grad):
                yield other, name


def slots_of_parameters(parts: Iterable[tuple[str, nn.Module]]) -> Slots:
    """``parts``: a learner's ``named_modules()``."""
    return [(path, part, dict(part._parameters), dict(part._modules)) for path, part in parts]


def check_same_parameters(learner: nn.Module, slots: Slots) -> None:
    """Refuse a learner with other Parameters than at the run's start, or with new ones.

    Raises:
        UserError: it gives the parameter's name.
    """
    # This runs for every client, and a walk over all modules is slow. So unchanged parameters are
    # recognised by identity, and names are looked up only for an error.
    same_modules = True
    for path, part, at_first, modules in slots:
        now = part._parameters
        same_modules = same_modules and part._modules == modules
        if len(now) == len(at_first) and all(map(operator.is_, now.values(), at_first.values())):
            continue
        for leaf in {**at_first, **now}:
            if now.get(leaf) is not at_first.get(leaf):
                raise replaced(learner, f"{path}.{leaf}" if path else leaf)
    if same_modules:
        return
    known: set[int] = set()
    for _, _, at_first, _ in slots:
        known.update(map(id, at_first.values()))
    for name, parameter in trainable(learner):
        if id(parameter) not in known:
            raise replaced(learner, name)


def replaced(learner: nn.Module, name: str) -> UserError:
    return UserError(
        f"learner {type(learner).__name__}: a new Parameter was assigned to {name} in a step or "
        "hook. Such a parameter would not be part of the model that clients train and the server "
        "averages. Change it in place (….data.copy_(…)), or make it in __init__, setup or "
        "configure_model."
    )


def load_state(learner: Any, weights: Any, strict: bool, given: str) -> Any:
    """Load weights into the learner.

    Args:
        given: the option that names their file, for the message.

    Raises:
        UserError: they are those of another model; torch's message says in what they differ.
    """
    try:
        return learner.load_state_dict(weights, strict=strict)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"{given}: the checkpoint is of another model than {type(learner).__name__}: "
            f"{' '.join(str(error).split())[:400]}. Use the learner (class and sizes) that the "
            "run was started with; its config.yaml has it."
        ) from error


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the learner's weights by name from a checkpoint or an exported file.

    Raises:
        UserError: the file is missing, damaged, or has no weights.
    """
    try:
        weights: dict[str, Tensor] = AtomicCheckpointIO().load_checkpoint(path)["state_dict"]
    except UserError as error:
        raise UserError(f"init_from={str(path)!r}: {error}") from error
    return weights
