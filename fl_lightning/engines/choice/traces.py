"""Putting back what a rehearsal changed outside the copies that it ran in: closures, classes, data, generators."""

from __future__ import annotations

import copy
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.engines.replay.reachable import (
    MOST,
    PLAIN,
    children,
    class_data,
    closed,
    named_globals,
    of_class,
    of_function,
    slots_of,
)
from fl_lightning.learner import IN_STEPS

SKIPPED = ("_parameters", "_buffers", "_trainer", *IN_STEPS)  # of a module, which leads elsewhere
SMALL = 2**20  # elements of a tensor that is kept to be put back
LONG = 1000  # items; of longer containers, arrays are not kept: a partition's
ARRAYS = (*PLAIN, Tensor, np.ndarray)


@contextmanager
def traces_undone(roots: Iterable[Any]) -> Iterator[None]:
    """Afterwards what can be reached from these holds what it held: contents, attributes, closures, generators.

    Tensors too, of up to ``SMALL`` elements, but for parameters and buffers of modules; and iterators of Python's own.
    """
    undo, seen, waiting = list[Callable[[], object]](), dict[int, Any](), list(roots)
    while waiting and len(seen) < MOST:
        value = waiting.pop()
        if isinstance(value, PLAIN) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            waiting += [v for name, v in vars(value).items() if name not in SKIPPED]
            undo.append(partial(put_back_items, vars(value), held_items(vars(value))))
            waiting.append(type(value))
        elif not isinstance(value, (ModuleType, BuiltinFunctionType)):
            undo += [step for step in (undoing(value),) if step is not None]
            inside = [] if isinstance(value, (Tensor, np.ndarray)) else children(value)
            waiting += (
                inside if len(inside) < LONG else [v for v in inside if not isinstance(v, ARRAYS)]
            )
    try:
        yield
    finally:
        for step in undo:
            step()


def undoing(value: Any) -> Callable[[], object] | None:
    """What puts an object's own contents back; None where it has none that change."""
    if isinstance(value, Tensor):
        small = value.layout is torch.strided and value.numel() <= SMALL and not value.requires_grad
        return partial(put_back_tensor, value, value.clone()) if small else None
    if isinstance(value, np.ndarray):
        return (
            partial(np.copyto, value, value.copy())
            if value.size <= SMALL and value.flags.writeable
            else None
        )
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, dict):
        return partial(put_back_items, value, held_items(value))
    if isinstance(value, (list, deque)):
        return partial(put_back_list, value, [held(v) for v in value])
    if isinstance(value, set):
        return partial(put_back_set, value, set(value))
    if isinstance(value, CellType):
        contents = children(value)
        return partial(setattr, value, "cell_contents", held(contents[0])) if contents else None
    if isinstance(value, FunctionType):
        names = named_globals(value) if of_function(value) else []
        return partial(
            value.__globals__.update, {name: held(value.__globals__[name]) for name in names}
        )
    if isinstance(value, type):
        if not of_class(value):  # a library's
            return None
        return partial(
            put_back_class,
            value,
            {n: held(v) for n, v in class_data(value).items() if not callable(v)},
        )
    slots = {
        name: held(getattr(value, name)) for name in ([] if closed(value) else slots_of(value))
    }
    return partial(put_back_slots, value, slots) if slots else None


def held(value: Any) -> Any:
    """An iterator of Python's own as it is now; anything else itself."""
    if not hasattr(type(value), "__next__") or type(value).__module__ not in (
        "builtins",
        "itertools",
    ):
        return value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return copy.copy(value)
    except Exception:  # a generator
        return value


def held_items(items: dict[Any, Any]) -> dict[Any, Any]:
    return {key: held(value) for key, value in items.items()}


def put_back_items(items: dict[Any, Any], before: dict[Any, Any]) -> None:
    if items.keys() != before.keys() or any(
        items[key] is not value for key, value in before.items()
    ):
        items.clear()
        items.update(before)


def put_back_list(items: list[Any] | deque[Any], before: list[Any]) -> None:
    if len(items) != len(before) or any(a is not b for a, b in zip(items, before, strict=True)):
        items.clear()
        items.extend(before)


def put_back_set(items: set[Any], before: set[Any]) -> None:
    items.clear()
    items.update(before)


def put_back_class(kind: type, before: dict[str, Any]) -> None:
    for name in [n for n in class_data(kind) if n not in before and not callable(vars(kind)[n])]:
        delattr(kind, name)
    for name, value in before.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


def put_back_slots(value: Any, before: dict[str, Any]) -> None:
    for name, content in before.items():
        if getattr(value, name, None) is not content:
            object.__setattr__(value, name, content)


def put_back_tensor(tensor: Tensor, before: Tensor) -> None:
    with torch.no_grad():
        if tensor.shape == before.shape and not torch.equal(tensor, before):
            tensor.copy_(before)
