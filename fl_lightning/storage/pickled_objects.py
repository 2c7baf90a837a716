"""Objects that ``weights_only=True`` cannot read are stored in a checkpoint as bytes.

The bytes become an object only on request.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import safe_globals
from torch.storage import _load_from_bytes

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Tensor,
    nn.Parameter,
    torch.Size,
    torch.dtype,
)
_CANNOT_PICKLE = (
    pickle.PicklingError,
    AttributeError,
    TypeError,
    NotImplementedError,
    RecursionError,
)


class PickledObject:
    """One object as the bytes of ``torch.save``.

    In a checkpoint it is a call of torch's own reader of bytes. So
    ``torch.load(weights_only=False)``, and Lightning's
    ``load_from_checkpoint(weights_only=False)``, return the object itself, and :func:`read_plain`
    returns these bytes.
    """

    def __init__(self, saved: bytes) -> None:
        self.saved = saved

    @classmethod
    def of(cls, value: Any) -> PickledObject:
        """Return the bytes of an object; if it cannot be pickled, raise the error of pickle."""
        saved = _saved(value)
        # Move its tensors to the CPU, so that a machine without a GPU can read them.
        if torch.cuda.is_available() and b"cuda" in saved:
            saved = _saved(torch.load(io.BytesIO(saved), map_location="cpu", weights_only=False))
        return cls(saved)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes]]:
        return _load_from_bytes, (self.saved,)


def read_plain(path: Any, **options: Any) -> Any:
    """Do ``torch.load(weights_only=True)``, in which objects stored as bytes stay bytes."""
    # Torch's own reader would run code from these bytes. The file finds `PickledObject` under that
    # name instead.
    with safe_globals([(PickledObject, "torch.storage._load_from_bytes")]):
        return torch.load(path, weights_only=True, **options)


class CannotPickle(Exception):
    """Names the object, and the reason."""


def pickle_objects(value: Any, where: str, moved: list[str]) -> Any:
    """Return ``value``, with :class:`PickledObject` instead of all objects that
    ``weights_only=True`` refuses.

    The result is ``value`` itself if it has no such object.

    Args:
        where: the object's place in the checkpoint, as text.
        moved: list to which place and class of each converted object are added.

    Raises:
        CannotPickle: an object cannot be written in any way.
    """
    kind = type(value)
    if kind in _PLAIN or kind is PickledObject:
        return value
    if kind in (dict, OrderedDict) and all(type(key) in _PLAIN for key in value):
        new = {k: pickle_objects(v, f"{where}[{k!r}]", moved) for k, v in value.items()}
        return value if all(new[k] is value[k] for k in value) else kind(new)
    if kind in (list, tuple):
        items = [pickle_objects(v, f"{where}[{i}]", moved) for i, v in enumerate(value)]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return kind(items)
    if _readable(value):
        return value
    try:
        apart = PickledObject.of(value)
    except _CANNOT_PICKLE as error:
        why = " ".join(str(error).split())[:100]
        raise CannotPickle(
            f"{where} is a {kind.__name__}, which cannot be pickled ({why})"
        ) from error
    moved.append(f"{where} is a {kind.__name__}")
    return apart


def is_plain(value: object) -> bool:
    """Return whether a hyper-parameter consists of numbers, text, lists and dicts."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    return value is None or type(value) in (bool, int, float, str)


def places(value: Any, where: str = "") -> Iterator[str]:
    """Return the places of objects stored as bytes in a checkpoint from :func:`read_plain`."""
    if isinstance(value, PickledObject):
        yield where
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from places(item, f"{where}[{i}]")


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _readable(value: Any) -> bool:
    # Torch itself decides what it refuses, so try it.
    try:
        torch.load(io.BytesIO(_saved(value)), weights_only=True)
    except (pickle.UnpicklingError, *_CANNOT_PICKLE):
        return False
    return True
