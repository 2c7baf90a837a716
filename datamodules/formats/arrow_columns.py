"""Columns of numbers in Arrow's memory, checked for gaps, lengths and what is not finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fl_lightning.errors import UserError

LARGEST = np.finfo(np.float32).max


def is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def leaf_of(kind: Any) -> Any:
    """Return the type of a column's values, within lists and extension types."""
    while True:
        if is_list(kind):
            kind = kind.value_type
        elif hasattr(kind, "storage_type"):
            kind = kind.storage_type
        else:
            return kind


def is_numbers(kind: Any) -> bool:
    """Return whether a type is a number or a truth value."""
    import pyarrow.types as types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def is_text(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def is_other(kind: Any, plain: bool) -> bool:
    """Return whether a type is known to be neither numbers nor texts nor pictures.

    Args:
        plain: whether the values are numbers or texts. Pictures are bytes in a struct.
    """
    import pyarrow.types as types

    if plain and (types.is_struct(kind) or types.is_binary(kind) or types.is_large_binary(kind)):
        return True
    return bool(types.is_decimal(kind) or types.is_temporal(kind) or types.is_null(kind))


def check_numbers(
    pieces: Iterable[tuple[int, Any]],
    column: str,
    name: str,
    like: list[tuple[int, str]],
) -> None:
    """Refuse a column whose rows are not all finite numbers in lists of the same lengths.

    Args:
        pieces: arrays of the column, each with the number of its first row.
        name: the rows' name in an error.
        like: for each depth of lists their length in the first row, and this row's name; empty
            before the first rows.

    Raises:
        UserError: with the row.
    """
    for first, piece in pieces:
        values = piece
        # Number of values in a row.
        each = 1
        depth = 0
        while True:
            values = getattr(values, "storage", values)
            _refuse_missing(values, first, each, column, name)
            if not is_list(values.type):
                break
            values, each = _opened(values, first, each, depth, like, column, name)
            depth += 1
        if str(values.type) == "uint64":
            _refuse_beyond(values, first, each, column, name)
        if values.type in _fractions():
            numbers = np.asarray(values.to_numpy(zero_copy_only=False), np.float64)
            wrong = np.flatnonzero(~(np.abs(numbers) <= LARGEST))
            if len(wrong):
                raise UserError(
                    f"Row {first + int(wrong[0]) // each} of {name} has {numbers[wrong[0]]} in the "
                    f"column {column!r}, which is not a finite number in single precision: mend "
                    "the row, or leave it out."
                )


def _refuse_beyond(values: Any, first: int, each: int, column: str, name: str) -> None:
    """Refuse whole numbers that int64 does not hold."""
    wrong = np.flatnonzero(values.to_numpy(zero_copy_only=False) > np.iinfo(np.int64).max)
    if len(wrong):
        raise UserError(
            f"Row {first + int(wrong[0]) // each} of {name} has {values[int(wrong[0])]} in the "
            f"column {column!r}, which is beyond 64 bits with a sign: cast the column to fractions."
        )


def _fractions() -> tuple[Any, ...]:
    import pyarrow

    return pyarrow.float16(), pyarrow.float32(), pyarrow.float64()


def _refuse_missing(values: Any, first: int, each: int, column: str, name: str) -> None:
    if values.null_count:
        place = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise UserError(
            f"Row {first + place // each} of {name} has no value in the column {column!r}: fill "
            "it in, or leave the row out."
        )


def _opened(
    values: Any,
    first: int,
    each: int,
    depth: int,
    like: list[tuple[int, str]],
    column: str,
    name: str,
) -> tuple[Any, int]:
    """Return the values within lists, and how many of them a row has."""
    import pyarrow.compute as compute

    lengths = compute.list_value_length(values).to_numpy(zero_copy_only=False)
    if depth == len(like):
        if not len(lengths):
            return values.flatten(), each
        like.append((int(lengths[0]), f"row {first} of {name}"))
    (length, row) = like[depth]
    other = np.flatnonzero(lengths != length)
    if len(other):
        raise UserError(
            f"Row {first + int(other[0]) // each} of {name} has {lengths[other[0]]} values in the "
            f"column {column!r}, and {row} has {length}: x needs one shape. Fill the rows up, or "
            "cut them."
        )
    return values.flatten(), max(1, each * length)
