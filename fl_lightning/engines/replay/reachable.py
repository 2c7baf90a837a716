"""What an object of Python holds, one level down: what can be looked at, and what is left alone."""

from __future__ import annotations

import random
import sys
import warnings
from collections import deque
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

PLAIN = (type(None), bool, int, float, complex, str, bytes)
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
# of PyTorch's objects these are looked into
OPEN = ("torch.utils.data", "torch.distributions", "torch.optim")
CLOSED = {"torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric"}
CLOSED |= set(sys.stdlib_module_names) - {
    "types",
    "argparse",
    "collections",
    "random",
    "itertools",
    "builtins",
}
LIBRARIES = CLOSED | set(sys.stdlib_module_names) | {"numpy", "torchvision", "fl_lightning"}
MOST = 500_000  # objects; beyond, nothing is known


def children(value: Any) -> list[Any]:
    """What an object holds, one level down: contents, attributes, slots, state, closure, data of its class."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        return of_function(value)
    if isinstance(value, type):
        return of_class(value)
    if isinstance(value, CellType):
        try:
            return [value.cell_contents]
        except ValueError:  # empty
            return []
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    inside: list[Any] = []
    if isinstance(value, dict):
        inside += [*value.keys(), *value.values()]
    elif isinstance(value, (set, frozenset)):
        inside += sorted(map(hash, value))
    elif isinstance(value, CONTAINERS):
        inside += value
    elif closed(value):
        return []
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        inside.append(attributes)
    slots = slots_of(value)
    inside += [getattr(value, name, None) for name in slots]
    if attributes is None and not slots and not isinstance(value, CONTAINERS):
        inside.append(reduced(value))
    if type(value).__module__.split(".")[0] not in LIBRARIES:
        inside.append(type(value))
    return inside


def closed(value: Any) -> bool:
    """Whether an object is a library's, whose inside is its own affair."""
    if isinstance(value, (nn.Module, CellType)):
        return False
    where = type(value).__module__
    return where.split(".")[0] in CLOSED and not where.startswith(OPEN)


def of_function(function: Any) -> list[Any]:
    """A function's closure, defaults and attributes, and what its code names among its module's globals."""
    if str(function.__module__).split(".")[0] in LIBRARIES:
        return []
    inside = [
        *(function.__closure__ or ()),
        function.__defaults__,
        function.__kwdefaults__,
        vars(function),
    ]
    return inside + [function.__globals__[name] for name in named_globals(function)]


def named_globals(function: Any) -> list[str]:
    """Names of globals that a function's code uses: data, and functions of its own module."""
    codes, names = [function.__code__], []
    while codes:
        code = codes.pop()
        names += code.co_names
        codes += [constant for constant in code.co_consts if isinstance(constant, type(code))]

    def counts(value: Any) -> bool:
        if isinstance(value, (ModuleType, type, BuiltinFunctionType)):
            return False
        return not isinstance(value, FunctionType) or value.__module__ == function.__module__

    held = function.__globals__
    return [name for name in dict.fromkeys(names) if name in held and counts(held[name])]


def of_class(kind: type) -> list[Any]:
    """Data, functions and bases of a class that is no library's."""
    if kind.__module__.split(".")[0] in LIBRARIES:
        return []
    return [*kind.__bases__, *class_data(kind).values()]


def class_data(kind: type) -> dict[str, Any]:
    return {n: v for n, v in vars(kind).items() if n[:2] != "__" or isinstance(v, FunctionType)}


def slots_of(value: Any) -> list[str]:
    names: list[str] = []
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return [
        name for name in names if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    ]


def reduced(value: Any) -> Any:
    """The state of an object of C, such as an iterator, as pickle would have it; None where it has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return value.__reduce_ex__(4)
    except Exception:
        return None


def state_of_generator(value: Any) -> Any:
    """The state of a generator of random numbers; None: it is none."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    return value.getstate() if isinstance(value, random.Random) else None
