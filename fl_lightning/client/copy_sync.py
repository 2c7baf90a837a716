"""What the learner's hooks change between rounds reaches the copies that train clients."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.learner.attributes import PLAIN, SKIPPED, Contents
from fl_lightning.learner.modules import (
    REPLACED_IN_STEPS,
    lightning_modules,
    recorders,
    without_graphs,
)

PLAIN_TYPES = (*PLAIN, torch.device, torch.dtype)
# Comparing a large object, such as a data set, in each round would take long.
LARGE_BYTES = 2**20
NOT_DATA = (*REPLACED_IN_STEPS, "_modules", "_parameters", "_buffers")
METRICS = (Metric, MetricCollection)


class Objects:
    """The objects in a learner's attributes, such as a schedule, as its copy last took them over.

    They are compared by content, and tensors in them by identity and version. An object of more
    than 1 MiB changes only if another one takes its place.
    """

    def __init__(self, learner: nn.Module) -> None:
        self._seen: dict[str, Any] = {}
        self.changed(learner)

    def changed(self, learner: nn.Module) -> list[tuple[nn.Module, str]]:
        """Return the modules and attributes whose objects changed since the last call."""
        contents = Contents(learner, versions=True, most=LARGE_BYTES)
        seen: dict[str, Any] = {}
        changed = []
        for place, module, name, value in objects_of(learner):
            key = f"{place}.{name}"
            seen[key] = contents.written(value)
            if key not in self._seen or self._seen[key] != seen[key]:
                changed.append((module, name))
        # `contents` keeps the objects that were compared by identity.
        self._seen = seen
        self._contents = contents
        return changed


def objects_of(learner: nn.Module) -> Iterator[tuple[str, nn.Module, str, Any]]:
    for place, module in learner.named_modules():
        if isinstance(module, METRICS):
            continue
        for name, value in vars(module).items():
            if name in SKIPPED or name == "_modules" or isinstance(value, Tensor):
                continue
            if not is_plain(value):
                yield place, module, name, value


def is_plain(value: object) -> bool:
    """Return whether an attribute is plain data, which a copy of the learner gets by value."""
    if isinstance(value, (list, tuple, set)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(is_plain(k) and is_plain(v) for k, v in value.items())
    return type(value) in PLAIN_TYPES or isinstance(value, np.generic)


def take_over(learner: nn.Module, copied: nn.Module, objects: Objects) -> dict[int, nn.Module]:
    """Give a copy the learner's attributes and modes, and the modules that its hooks replaced.

    Returns:
        The copy's module for each of the learner's, by id.
    """
    twins: dict[int, nn.Module] = {}
    of_run = {id(part._trainer): part._trainer for part in lightning_modules(learner)}
    replace_modules(learner, copied, twins, of_run)
    for theirs in learner.modules():
        # A metric belongs to the client: it counts the batches of this copy's steps.
        if isinstance(theirs, METRICS):
            continue
        own = twins[id(theirs)].__dict__
        for name, value in theirs.__dict__.items():
            if name == "_trainer":
                own[name] = value
            elif isinstance(value, Tensor):
                own[name] = value.detach()
            elif name not in NOT_DATA and is_plain(value):
                own[name] = copy.deepcopy(value)
    changed = objects.changed(learner)
    memo = memo_of(learner, twins, of_run) if changed else {}
    for theirs, name in changed:
        try:
            twins[id(theirs)].__dict__[name] = copy.deepcopy(vars(theirs)[name], memo)
        except Exception:  # an object that cannot be copied, such as an open file
            continue
    return twins


def replace_modules(
    theirs: nn.Module, own: nn.Module, twins: dict[int, nn.Module], memo: dict[int, Any]
) -> None:
    """Note the copy's module for each of the learner's; copy new modules, or of another class."""
    twins[id(theirs)] = own
    for name, child in theirs._modules.items():
        there = at(own._modules, name)
        if child is None or id(child) in twins:
            known = None if child is None else twins[id(child)]
            if known is not there:
                own._modules[name] = known
            continue
        if type(there) is not type(child):
            there = copy.deepcopy(child, {**memo, **twins})
            own._modules[name] = there
        replace_modules(child, there, twins, memo)
    for name in set(own._modules.keys()) - set(theirs._modules.keys()):
        del own._modules[name]


def memo_of(
    learner: nn.Module, twins: dict[int, nn.Module], of_run: dict[int, Any]
) -> dict[int, Any]:
    """Return what a copied object refers to in place of the learner's parts, for ``deepcopy``."""
    memo = {**without_graphs(learner), **recorders(learner), **of_run, **twins}
    for theirs in learner.modules():
        own = twins[id(theirs)]
        for name, parameter in theirs._parameters.items():
            if parameter is not None and name in own._parameters:
                memo[id(parameter)] = own._parameters[name]
        for name, buffer in theirs._buffers.items():
            if buffer is not None and name in own._buffers:
                memo[id(buffer)] = own._buffers[name]
    return memo


def at(tensors: Any, name: str) -> Any:
    """``tensors.get(name)``, which a scripted module's mapping does not have."""
    if name not in tensors:
        return None
    return tensors[name]
