"""The content of a checkpoint, declared once: this declaration writes it, checks it and reads it.

A *kind* takes a value of the file and its place there, such as ``"federated.seed"``, and returns
the value in the form that the program uses. If no run writes such a value, it raises a
:class:`UserError` that names the place: the file may be damaged, or made by another program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from fl_lightning.errors import UserError

Kind = Callable[[Any, str], Any]
Record = TypeVar("Record")


def damaged(place: str) -> UserError:
    """Return the error for a value that no run writes at this place."""
    return UserError(
        f"ckpt_path: the checkpoint is damaged: {place} in it is not a value that a run writes. "
        "Take "
        "another checkpoint (such as checkpoints/best.ckpt of the same run), or start anew."
    )


def entry(
    kind: Kind, default: Any = MISSING, write: Callable[[Any], Any] | None = None, name: str = ""
) -> Any:
    """Return a field of a dataclass that a checkpoint holds.

    Args:
        default: value of an entry that the file may lack.
        write: function from the field's value to the file's; None: unchanged.
        name: name in the file; empty: the field's name.
    """
    told = {"kind": kind, "write": write, "name": name}
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=told)
    return field(default=default, metadata=told)


def written(record: Any) -> dict[str, Any]:
    """Return the entries of a dataclass in the form of the file."""
    held = {}
    for each in fields(record):
        value = getattr(record, each.name)
        write = each.metadata.get("write")
        held[each.metadata.get("name") or each.name] = value if write is None else write(value)
    return held


def values(kind: type, held: Any, place: str, names: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass that a file holds, by name.

    Args:
        names: the fields to read; empty: all.

    Raises:
        UserError: one is missing, or no run writes such a value.
    """
    if not isinstance(held, Mapping):
        raise damaged(place)
    found = {}
    for each in fields(kind):
        if "kind" not in each.metadata or (names and each.name not in names):
            continue
        name = each.metadata["name"] or each.name
        there = f"{place}.{name}" if place else name
        if name in held:
            found[each.name] = each.metadata["kind"](held[name], there)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise damaged(there)
    return found


def record(kind: type[Record]) -> Callable[[Any, str], Record]:
    """Return the kind of a mapping that holds a dataclass."""
    return lambda held, place: kind(**values(kind, held, place))


def that(test: Callable[[Any], bool]) -> Kind:
    """Return the kind of values that pass a test."""

    def checked(value: Any, place: str) -> Any:
        if not test(value):
            raise damaged(place)
        return value

    return checked


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


ANYTHING: Kind = that(lambda value: True)
COUNT: Kind = that(lambda value: type(value) is int and 0 <= value < 2**63)
NUMBER: Kind = that(is_number)
TEXT: Kind = that(lambda value: isinstance(value, str))
LIST: Kind = that(lambda value: isinstance(value, list))
TENSOR: Kind = that(lambda value: isinstance(value, Tensor))
IDS: Kind = that(
    lambda value: (
        isinstance(value, Tensor)
        and value.dtype == torch.int64
        and value.ndim == 1
        and bool((value >= 0).all())
    )
)


def maybe(kind: Kind) -> Kind:
    """Return the kind of values that may be None."""
    return lambda value, place: None if value is None else kind(value, place)


def texts(value: Any, place: str) -> list[str]:
    """Return the kind of a list of texts."""
    if not isinstance(value, (list, tuple)):
        raise damaged(place)
    return [TEXT(text, place) for text in value]


def each(kind: Kind, key: Kind = TEXT) -> Kind:
    """Return the kind of mappings whose values all have one kind."""

    def checked(held: Any, place: str) -> dict[Any, Any]:
        if not isinstance(held, Mapping):
            raise damaged(place)
        return {key(name, place): kind(value, f"{place}.{name}") for name, value in held.items()}

    return checked


def number_type(tensor: Tensor) -> tuple[bool, bool, bool]:
    """Return whether a tensor's numbers are real, complex or bool; integers are none of these."""
    return tensor.is_floating_point(), tensor.is_complex(), tensor.dtype == torch.bool


def check_alike(held: Mapping[str, Tensor], own: Mapping[str, Tensor], place: str) -> None:
    """Refuse tensors whose shapes or types differ from the run's tensors of these names."""
    for name, value in held.items():
        if name not in own:
            continue
        if value.shape != own[name].shape or number_type(value) != number_type(own[name]):
            raise damaged(f"{place}.{name}")


def check_like(held: Any, own: Any, place: str, fits: Callable[[Any, Any], bool]) -> None:
    """Refuse a value that could not replace ``own``, a nested value of the program.

    Args:
        fits: ``(value of the file, own number or text)`` → whether the first may replace the
            second.
    """
    if isinstance(own, Mapping):
        if not isinstance(held, Mapping):
            raise damaged(place)
        for name, part in own.items():
            if name not in held:
                raise damaged(f"{place}.{name}")
            check_like(held[name], part, f"{place}.{name}", fits)
    elif isinstance(own, (list, tuple)):
        if not isinstance(held, (list, tuple)) or len(held) != len(own):
            raise damaged(place)
        for number, part in enumerate(own):
            check_like(held[number], part, f"{place}[{number}]", fits)
    elif type(own) in (bool, str, int, float) and not fits(held, own):
        raise damaged(place)
