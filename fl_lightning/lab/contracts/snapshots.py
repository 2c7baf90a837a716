"""Copies of a callback's attributes besides its declared state, to find those that a run
changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.callback import Declaration, FederatedCallback

FRAMEWORKS = {"_declared", "_bound_transaction", "_bound_run", "log", "log_dict"}


def take(callback: FederatedCallback) -> dict[str, Any]:
    """Return ``{"self.name": value}`` and ``{"Class.name": value}``, copied as far as they are
    data.
    """
    values = {}
    for name, value in vars(callback).items():
        if name not in FRAMEWORKS:
            values[f"self.{name}"] = value
    for cls in type(callback).__mro__:
        if cls is FederatedCallback:
            break
        for name, value in vars(cls).items():
            # Declarations and methods belong to the class, and no run changes them.
            code = name.startswith("__") or callable(value)
            if not code and not isinstance(value, Declaration | property):
                values[f"{cls.__name__}.{name}"] = value
    return {name: _copied(value) for name, value in values.items()}


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names whose value is new, gone or different."""
    names = []
    for name in before.keys() | after.keys():
        if name not in before or name not in after or not _equal(before[name], after[name]):
            names.append(name)
    return sorted(names)


def _copied(value: Any, depth: int = 0) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    # Deeper levels hold objects of the framework, and not the data of the method.
    if depth > 5:
        return value
    if isinstance(value, dict):
        return {k: _copied(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return (type(value).__name__, [_copied(v, depth + 1) for v in value])
    # Copy an object of the method's own as its attributes.
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, type):
        return (type(value).__name__, _copied(vars(value), depth + 1))
    return value


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    # Objects that define no equality are equal only if they are identical.
    return a is b or (type(a) is type(b) and bool(a == b))
