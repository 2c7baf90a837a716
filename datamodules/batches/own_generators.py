"""Random generators of a dataset, its transforms or its collate function: found and seeded."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from fl_lightning.sampling import generator

KINDS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)
OF_THE_PROCESS = (np.random.mtrand._rand, random._inst, torch.default_generator)
PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.Tensor,
    np.ndarray,
    ModuleType,
    BuiltinFunctionType,
)
LOOKED_THROUGH = 1000  # number of objects that are searched for generators
ITEMS = 20  # of a container
ONE_READER = threading.RLock()  # clients train on threads and share the dataset


def generators_of(*roots: Any) -> list[tuple[str, Any]]:
    """Return the generators that these objects reach, and objects as MONAI's, each with its place.

    The roots are a dataset and its collate function. The process's own generators are left out,
    because they are seeded for each client.
    """
    found: dict[int, tuple[str, Any]] = {}
    for root in roots:
        for where, one in _reached(root):
            found.setdefault(id(one), (where, one))
    return list(found.values())


def _reached(root: Any) -> list[tuple[str, Any]]:
    seen = dict[int, Any]()
    ahead = deque([(getattr(root, "__name__", type(root).__name__), root)])
    found = []
    while ahead and len(seen) < LOOKED_THROUGH:
        where, value = ahead.popleft()
        if (
            isinstance(value, PLAIN)
            or id(value) in seen
            or any(value is one for one in OF_THE_PROCESS)
        ):
            continue
        seen[id(value)] = value
        if isinstance(value, KINDS):
            found.append((where, value))
        elif not isinstance(value, type):
            if callable(getattr(value, "set_random_state", None)):
                found.append((where, value))
            ahead.extend(_inside(where, value))
    return found


def _inside(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's items, attributes and closure, and generators of its classes."""
    if isinstance(value, list | tuple):
        yield from ((f"{where}[{i}]", v) for i, v in enumerate(value[:ITEMS]))
    elif isinstance(value, dict):
        yield from ((f"{where}[{k!r}]", v) for k, v in list(value.items())[:ITEMS])
    elif isinstance(value, MethodType):
        yield from ((where, part) for part in (value.__self__, value.__func__))
    elif isinstance(value, partial):
        yield from ((where, part) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield f"{where}.{name}", cell.cell_contents
            except ValueError:  # empty
                continue
        for name in value.__code__.co_names:
            if isinstance(of_module := value.__globals__.get(name), KINDS):
                yield f"{where}.{name}", of_module
    else:
        yield from ((f"{where}.{name}", v) for name, v in getattr(value, "__dict__", {}).items())
        for kind in type(value).__mro__:
            yield from (
                (f"{kind.__name__}.{n}", v) for n, v in vars(kind).items() if isinstance(v, KINDS)
            )
        if isinstance(call := getattr(type(value), "__getitem__", None), FunctionType):
            yield f"{where}.__getitem__", call


def seed_all(found: list[tuple[str, Any]], seed: int) -> None:
    """Make later draws of these generators a function of the seed."""
    draws = generator(seed, "own generators").integers(2**63, size=len(found))
    for (_, one), draw in zip(found, draws.tolist(), strict=True):
        if isinstance(one, np.random.Generator):
            one.bit_generator.state = type(one.bit_generator)(draw).state
        elif isinstance(one, torch.Generator):
            one.manual_seed(draw)
        elif isinstance(one, np.random.RandomState | random.Random):
            one.seed(draw % 2**32)
        else:
            one.set_random_state(seed=draw % 2**32)
