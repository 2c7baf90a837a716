"""A learner's parameters as objects in memory.

This file refuses parameters that cannot lie in one flat vector, or that would leave it in a step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fl_lightning.errors import UserError
from fl_lightning.learner.layout import trainable

Slots = list[tuple[str, nn.Module, dict[str, nn.Parameter | None], dict[str, nn.Module | None]]]


def check_learner_parameters(learner: nn.Module) -> None:
    """Refuse parameters that cannot be part of one flat vector.

    Raises:
        UserError: there are lazy or complex parameters, several dtypes, less than float32, nothing
            to train, or two parameters in the same memory.
    """
    for name, parameter in learner.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UserError(
                f"learner {type(learner).__name__} has lazy parameters ({name}, …), whose shape "
                "is not known yet. Run one batch through it first, or build it with the sizes "
                "written out (Linear, not LazyLinear)."
            )
    for name, parameter in trainable(learner):
        if parameter.is_complex():
            raise UserError(
                f"learner {type(learner).__name__}: the trainable parameter {name} is "
                f"{str(parameter.dtype).removeprefix('torch.')}, and a federated run needs real "
                "numbers. Keep its real and imaginary parts as one real Parameter, "
                "nn.Parameter(torch.view_as_real(value)), and use torch.view_as_complex(parameter) "
                "in forward."
            )
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
    check_precision(learner)
    for one, other in sharing(learner):
        raise UserError(
            f"learner {type(learner).__name__}: {one} and {other} are two tensors over the same "
            "memory. A federated run would silently separate them, because each parameter gets its "
            "own place in one vector. Make them one Parameter (b.weight = a.weight, not a new "
            "nn.Parameter over its data), or give each its own (clone())."
        )


def check_precision(learner: nn.Module) -> None:
    """Refuse trainable parameters of less than float32, because their sums would lose small steps.

    Frozen parameters may have any dtype.

    Raises:
        UserError: it names the first of them.
    """
    for name, parameter in trainable(learner):
        if torch.promote_types(parameter.dtype, torch.float32) != parameter.dtype:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UserError(
                f"learner {type(learner).__name__}: the trainable parameter {name} is {kind}, and "
                "the server's model, sums and states would be too, which loses small steps. Make "
                "it float32 (learner.float(), or parameter.data = parameter.data.float() for the "
                "trainable ones); for a forward pass in bfloat16 use Trainer(precision="
                "'bf16-mixed'). Frozen parameters may have any dtype."
            )


def sharing(learner: nn.Module) -> Iterator[tuple[str, str]]:
    """Return the names of two tensors in the same memory, of which one is a trainable parameter."""
    spans = []
    for name, tensor in [*learner.named_parameters(), *learner.named_buffers()]:
        if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
            start = tensor.data_ptr()
            spans.append((start, start + extent(tensor) * tensor.element_size(), name, tensor))
    # Sorted by first byte: a tensor can overlap only with those that begin before it ends.
    spans.sort(key=lambda span: span[:3])
    for j, (_, end, name, tensor) in enumerate(spans):
        for start, _, other, beside in spans[j + 1 :]:
            if start >= end:
                break
            if (tensor.requires_grad or beside.requires_grad) and overlap(tensor, beside):
                yield name, other


def extent(tensor: Tensor) -> int:
    """Return the number of elements of memory from a tensor's first to its last."""
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in dimensions)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors whose extents meet have an element in common."""
    same_storage = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    if not same_storage or one.dtype != other.dtype:
        return True
    # Two columns of a matrix have overlapping byte ranges but share no element. So mark one
    # tensor's elements, and look for the marks in the other.
    first = min(one.storage_offset(), other.storage_offset())
    last = max(t.storage_offset() + extent(t) for t in (one, other))
    marks = torch.zeros(last - first, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset() - first).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - first).any())


def slots_of_parameters(learner: nn.Module) -> Slots:
    """Return the Parameters and modules that each module has, by name."""
    return [
        (path, part, dict(part._parameters), dict(part._modules))
        for path, part in learner.named_modules()
    ]


def check_same_parameters(learner: nn.Module, slots: Slots) -> None:
    """Refuse a learner whose Parameters differ from those at the run's start, or with a new module
    of them.

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
