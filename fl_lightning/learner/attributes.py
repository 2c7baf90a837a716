"""A learner's attributes besides parameters and buffers, compared to find changes.

An attribute is written as pickle would save it, including all objects that it refers to. So its
content counts and not its identity, and a learner's copy can be compared with another.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
import warnings
from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from types import CellType, FunctionType, ModuleType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.learner.modules import REPLACED_IN_STEPS
from fl_lightning.machine.lightning import pl

PLAIN = (type(None), bool, int, float, complex, str, bytes)
SKIPPED = ("_parameters", "_buffers", "_trainer", "_fabric", "training", *REPLACED_IN_STEPS)
# Objects of these packages belong to the run: do not look inside them.
OF_THE_RUN = {"fl_lightning", "lightning", "lightning_fabric", "pytorch_lightning"}
# Classes and functions of these packages hold nothing that belongs to a learner.
LIBRARIES = {*OF_THE_RUN, *sys.stdlib_module_names, "numpy", "torch", "torchmetrics", "torchvision"}

OF_MODULES = frozenset({*vars(pl.LightningModule()), *vars(nn.Module())})

Facts = tuple[int, int, Any]  # of an attribute: its id, its version or length, its content


class Contents:
    """Writes values of a learner's attributes, so that equal bytes mean equal content.

    ``kept`` keeps the objects alive that are compared by identity, so that no other object gets the
    same id. ``versions``: a change of a tensor in place counts as another identity. ``most``: a
    value of more bytes is compared by its identity.
    """

    def __init__(self, learner: nn.Module, versions: bool = False, most: float = math.inf) -> None:
        self.versions = versions
        self.most = most
        self.kept: list[Any] = []
        modules = dict(learner.named_modules())
        self.places = {id(module): name or "learner" for name, module in modules.items()}
        tensors = [*learner.parameters(), *learner.buffers()]
        self.storages = {t.untyped_storage().data_ptr() for t in tensors if is_strided(t)}

    def written(self, value: Any, values: bool = False) -> Any:
        """Return the content; ``values``: see :class:`Attributes`."""
        # Most attributes of a module are plain or empty, and need no pickle.
        if isinstance(value, PLAIN):
            return value, type(value)
        if isinstance(value, dict | list | tuple | set) and not value:
            return type(value)
        written = _Written(self.most)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                Writer(written, self, values).dump(value)
        except Exception:  # for example a lock, an open file, or more than `most` bytes
            self.kept.append(value)
            return id(value)
        return written.getvalue()


class _Written(io.BytesIO):
    """A buffer for a pickle, which raises ``OverflowError`` beyond ``most`` bytes."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.most = most

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > self.most:
            raise OverflowError
        return super().write(data)


class Attributes(Contents):
    """The present attributes of a learner's modules and of their classes.

    Args:
        metrics: whether the attributes of torchmetrics count, too.
        values: a tensor is compared by its values, and classes and functions by their content.
            If False, tensors, classes and functions are compared by identity. A recorded step sees
            them in this way, because it repeats in-place changes of a tensor. Then only the states
            of metrics are compared by value, because each client begins with a reset, which makes
            new tensors of them.
    """

    def __init__(self, learner: nn.Module, metrics: bool = False, values: bool = True) -> None:
        super().__init__(learner)
        self.found: dict[str, Any] = {}
        kinds: dict[type, None] = {}
        for place, module in learner.named_modules():
            if metrics or not isinstance(module, Metric | MetricCollection):
                self._note_module(place, module, values)
            kinds.update(dict.fromkeys(type(module).__mro__))
        for kind in kinds if values else ():
            self._note_class(kind)

    def changed(self, later: Attributes) -> list[str]:
        """Names of the attributes that differ in ``later``, or that only one of the two has."""
        names = dict.fromkeys([*self.found, *later.found])
        return [name for name in names if self.found.get(name) != later.found.get(name)]

    def changed_by_learner(self, learner: nn.Module) -> list[str]:
        modules = dict(learner.named_modules())
        found = []
        for full in self.changed(Attributes(learner)):
            part, _, name = full.rpartition(".")
            if part in modules and not of_framework(modules[part], name):
                found.append(full)
        return found

    def _note_module(self, place: str, module: nn.Module, values: bool) -> None:
        states = module._defaults if isinstance(module, Metric) else ()
        for name, value in vars(module).items():
            if name not in SKIPPED:
                full = f"{place}.{name}" if place else name
                self.found[full] = self.written(value, values or name in states)

    def _note_class(self, kind: type) -> None:
        if not of_library(kind):
            for name, value in vars(kind).items():
                if not name.startswith("__") or isinstance(value, FunctionType):
                    self.found[f"{kind.__name__}.{name}"] = self.written(value, True)


class Writer(pickle.Pickler):
    """Pickles a value only to compare it; the pickle is never read."""

    def __init__(self, file: io.BytesIO, attributes: Contents, values: bool) -> None:
        super().__init__(file, protocol=4)
        self.attributes = attributes
        self.values = values

    def persistent_id(self, value: Any) -> str | None:
        """Return the identity of an object, if its content does not count."""
        if isinstance(value, PLAIN):
            return None
        if id(value) in self.attributes.places:
            return self.attributes.places[id(value)]
        if isinstance(value, type):
            return value.__qualname__
        by_value = self.values or not isinstance(value, Tensor | FunctionType)
        top = type(value).__module__.split(".")[0]
        of_run = top in OF_THE_RUN and not isinstance(value, nn.Module)
        if by_value and not of_run and not isinstance(value, ModuleType | ReferenceType):
            return None
        self.attributes.kept.append(value)
        if self.attributes.versions and isinstance(value, Tensor):
            return f"{id(value)} {value._version}"
        return str(id(value))

    def reducer_override(self, value: Any) -> Any:
        """Reduce tensors, generators, functions and cells to a form that shows their content."""
        if isinstance(value, Tensor):
            return str, (self._of_tensor(value),)
        if isinstance(value, np.ndarray) and value.nbytes > self.attributes.most:
            raise OverflowError  # its pickle would begin with a copy of it
        # get_state returns a new tensor each time, so compare its values.
        if isinstance(value, torch.Generator):
            return str, (value.get_state().numpy().tobytes(),)
        if isinstance(value, CellType):
            return str, ("cell",), read(value)
        if isinstance(value, property | staticmethod | classmethod):
            return str, (type(value).__name__,), inside(value)
        if isinstance(value, FunctionType):
            own = (value.__qualname__,)
            return (str, own) if of_library(value) else (str, own, of_function(value))
        return NotImplemented

    def _of_tensor(self, tensor: Tensor) -> str:
        told = f"{tensor.shape} {tensor.dtype}"
        if not is_strided(tensor) or tensor.is_meta:
            return f"{told} {id(tensor)}"
        if tensor.untyped_storage().data_ptr() in self.attributes.storages:
            return f"{told} of a parameter or buffer"
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        return f"{told} {blake2b(data, digest_size=16).hexdigest()}"


def of_framework(module: nn.Module, name: str) -> bool:
    return name in OF_MODULES or (name.startswith("_") and of_library(type(module)))


def is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def of_library(kind: Any) -> bool:
    return str(kind.__module__).split(".")[0] in LIBRARIES


def read(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def inside(value: Any) -> Any:
    return (value.fget, value.fset) if isinstance(value, property) else value.__func__


def of_function(function: FunctionType) -> Any:
    """Return a function's closure, defaults and attributes, and the globals that its code names."""
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    named = [function.__globals__[name] for name in names]
    return function.__closure__, function.__defaults__, vars(function), named


def own_attributes(each: object) -> dict[str, Any]:
    """Return an object's attributes by name, those in slots of its class, too."""
    found: dict[str, Any] = {}
    for kind in type(each).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if hasattr(each, name):
                found[name] = getattr(each, name)
    return {**found, **vars(each)}


def facts_of(
    objects: Iterable[object], contents: Contents, before: dict[str, Facts]
) -> dict[str, Facts]:
    """Facts that differ from ``before`` if an attribute was replaced, grew or changed."""
    facts = {}
    for each in objects:
        for name, value in own_attributes(each).items():
            full = f"{type(each).__name__}.{name}"
            size = 0
            content: Any = None
            if isinstance(value, Tensor):
                size = value._version
            elif full in before and isinstance(before[full][2], int):
                # Its content was too large to be compared for every client.
                content = before[full][2]
            else:
                content = contents.written(value)
            if isinstance(value, (list, dict, set, deque)):
                size = len(value)
            facts[full] = (id(value), size, content)
    return facts
