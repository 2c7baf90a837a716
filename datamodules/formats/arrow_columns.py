"""Columns of numbers in Arrow's memory, checked for gaps, lengths and what is not finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.errors import UserError

LARGEST = np.finfo(np.float32).max


def is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def leaf_of(kind: Any) -> Any:
    """Return the type of a column's values, within lists and extension types."""
    while is_list(kind) or hasattr(kind, "storage_type"):
        kind = kind.value_type if is_list(kind) else kind.storage_type
    return kind


def is_numbers(kind: Any) -> bool:
    """Return whether a type is a number or a truth value."""
    import pyarrow.types as types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def is_text(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def check_numbers(
    pieces: Iterable[tuple[int, Any]], column: str, name: str, like: list[int]
) -> None:
    """Refuse a column whose rows are not all finite numbers in lists of the same lengths.

    Args:
        pieces: arrays of the column, each with the number of its first row.
        name: the rows' name in an error.
        like: for each depth of lists their length in the first row; empty before the first rows.

    Raises:
        UserError: with the row.
    """
    for first, piece in pieces:
        values = piece
        rows = first + np.arange(len(piece))
        depth = 0
        while True:
            values = getattr(values, "storage", values)
            gone = values.is_null().to_numpy(zero_copy_only=False)
            _refuse(gone, rows, column, name, "no value", "fill it in, or leave the row out")
            if not is_list(values.type):
                break
            values, rows = _opened(values, rows, depth, like, column, name)
            depth += 1
        _refuse_beyond(values, rows, column, name)


def _refuse_beyond(values: Any, rows: NDArray[np.int64], column: str, name: str) -> None:
    """Refuse numbers that float32 or int64 does not hold."""
    if not is_numbers(values.type):
        return
    numbers = values.to_numpy(zero_copy_only=False)
    wrong = np.zeros(len(numbers), bool)
    if numbers.dtype.kind == "f":
        wrong = ~(np.abs(numbers.astype(np.float64)) <= LARGEST)
    elif numbers.dtype == np.uint64:
        wrong = numbers > np.iinfo(np.int64).max
    has = str(numbers[wrong][:1].tolist())[1:-1]
    remedy = "x are finite numbers in single precision, or 64 bits with a sign; mend the row"
    _refuse(wrong, rows, column, name, has, remedy)


def _opened(
    values: Any, rows: NDArray[np.int64], depth: int, like: list[int], column: str, name: str
) -> tuple[Any, NDArray[np.int64]]:
    """Return the values within lists, and the row of each."""
    import pyarrow.compute as compute

    lengths = compute.list_value_length(values).to_numpy(zero_copy_only=False).astype(np.int64)
    if depth == len(like) and len(lengths):
        like.append(int(lengths[0]))
    if len(lengths):
        other = lengths != like[depth]
        has = f"{lengths[other][:1]} values".replace("[", "").replace("]", "")
        remedy = f"the first row has {like[depth]}, and x needs one shape: fill it up, or cut it"
        _refuse(other, rows, column, name, has, remedy)
    return values.flatten(), np.repeat(rows, lengths)


def _refuse(
    wrong: NDArray[np.bool_],
    rows: NDArray[np.int64],
    column: str,
    name: str,
    has: str,
    remedy: str,
) -> None:
    """Refuse the row of the first value that is wrong."""
    if wrong.any():
        row = rows[int(wrong.argmax())]
        raise UserError(f"Row {row} of {name} has {has} in the column {column!r}: {remedy}.")
