"""Whether anything that Python keeps on a learner's modules, or can reach from them, has changed."""

from __future__ import annotations

import marshal
from collections import OrderedDict
from hashlib import blake2b
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.engines.replay.reachable import (
    CONTAINERS,
    LIBRARIES,
    MOST,
    PLAIN,
    children,
    class_data,
    state_of_generator,
)
from fl_lightning.learner import IN_STEPS

EMPTY = (OrderedDict, dict, list, tuple, set)


class TooMuch(Exception):
    """More objects than can be looked through."""


class Attributes:
    """What a learner's modules and their classes hold besides parameters and buffers.

    Metrics are looked at only with ``metrics``. Without ``in_place`` a tensor whose values changed
    is still what it was, and classes are left out. Of a metric's states the values count all the
    same: each client begins with a reset, which makes new tensors of them.
    """

    SKIPPED = ("_parameters", "_buffers", "_trainer", "_fabric", "training", *IN_STEPS)

    def __init__(self, learner: nn.Module, metrics: bool = False, in_place: bool = True) -> None:
        self.learner, self.metrics, self.in_place = learner, metrics, in_place
        self._kept: list[Any] = []  # so that no other object gets the id of one of them
        self.before = self._now()

    def changed(self) -> str:
        """The name of the first attribute that is no longer what it was, or an empty string."""
        return next(iter(self.all_changed()), "")

    def all_changed(self) -> list[str]:
        """The names of all attributes that are no longer what they were."""
        now = self._now()
        if now is None or self.before is None:
            return ["one of more objects than can be looked through"]
        names = [*self.before, *(name for name in now if name not in self.before)]
        return [name for name in names if self.before.get(name) != now.get(name)]

    def _now(self) -> dict[str, bytes] | None:
        self._seen: dict[int, bytes] = {}  # objects, and where each was met first
        modules = dict(self.learner.named_modules())
        self._own = {id(module) for module in modules.values()}
        tensors = [*self.learner.parameters(), *self.learner.buffers()]
        self._storages = {
            tensor.untyped_storage().data_ptr()
            for tensor in tensors
            if tensor.layout is torch.strided
        }
        found = {}
        self._values_count = self.in_place
        try:
            for prefix, module in modules.items():
                if not self.metrics and isinstance(module, (Metric, MetricCollection)):
                    continue
                for name, value in vars(module).items():
                    full = f"{prefix}.{name}" if prefix else name
                    is_state = isinstance(module, Metric) and name in module._defaults
                    self._values_count = self.in_place or is_state
                    if name not in self.SKIPPED:
                        found[full] = self._digest(full, value)
            kinds: dict[type, None] = {}
            for module in modules.values():
                kinds.update(dict.fromkeys(type(module).__mro__))
            for kind in kinds if self.in_place else ():
                if kind.__module__.split(".")[0] not in LIBRARIES:
                    for name, value in class_data(kind).items():
                        found[f"{kind.__name__}.{name}"] = self._digest(
                            f"{kind.__name__}.{name}", value
                        )
        except TooMuch:
            return None
        return found

    def _digest(self, name: str, value: Any) -> bytes:
        digest, waiting = blake2b(digest_size=16), [value]
        self._present, self._before = name, len(self._seen)
        while waiting:
            value = waiting.pop()
            told, inside = self._look(value)
            digest.update(told)
            waiting += reversed(inside)
        return digest.digest()

    def _look(self, value: Any) -> tuple[bytes, list[Any]]:
        """An object as bytes, and what it holds that these bytes do not tell."""
        if type(value) in EMPTY and not value:  # most of what a module holds
            return type(value).__qualname__.encode(), []
        if isinstance(value, PLAIN) or (
            isinstance(value, (list, tuple, dict)) and not self._mixed(value)
        ):
            try:
                return marshal.dumps(value, 2), []  # version 2: by value alone
            except ValueError:  # something else inside
                pass
        if id(value) in self._seen:
            return b"again " + self._seen[id(value)], []
        if len(self._seen) >= MOST:
            raise TooMuch
        # counted within its attribute, so that one that is new moves no other
        self._seen[id(value)] = f"{self._present} {len(self._seen) - self._before}".encode()
        self._kept.append(value)
        kind = type(value).__qualname__.encode()
        if isinstance(value, Tensor):
            return kind + self._of_tensor(value), []
        if isinstance(value, np.ndarray):
            return (
                (kind, value.ravel().tolist())
                if value.dtype == object
                else (kind + value.tobytes(), [])
            )
        if id(value) in self._own or isinstance(value, ModuleType):
            return b"%d" % id(value), []
        if (state := state_of_generator(value)) is not None:
            return kind, [state]
        inside = (
            children(value) if self.in_place or not isinstance(value, (FunctionType, type)) else []
        )
        fixed = inside or isinstance(value, CONTAINERS)
        return (kind + b"%d" % len(inside) if fixed else b"%d" % id(value)), inside

    @staticmethod
    def _mixed(value: Any) -> bool:
        first = next(iter(value.values() if isinstance(value, dict) else value), None)
        return not isinstance(first, (*PLAIN, list, tuple, dict))

    def _of_tensor(self, tensor: Tensor) -> bytes:
        if tensor.layout is not torch.strided or tensor.is_meta:
            return b"%d" % id(tensor)
        if not self._values_count or tensor.untyped_storage().data_ptr() in self._storages:
            return b"%d" % id(tensor)
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return str((tensor.shape, tensor.dtype)).encode() + blake2b(values, digest_size=16).digest()
