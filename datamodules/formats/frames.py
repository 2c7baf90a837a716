"""Frames of pandas and polars, recognised by their attributes: neither library is imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import UserError


def is_frame(value: Any) -> bool:
    """Return whether an object has named columns with lists of values."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def located(option: str, given: Any) -> Path | Any:
    """Return a table's path, or the frame that was given in its place.

    Raises:
        UserError: it is neither of the two.
    """
    if not isinstance(given, str | Path) and not is_frame(given):
        raise UserError(
            f"data.{option} is of type {type(given).__name__}: give the path of a CSV or Parquet "
            "file, or a frame of pandas or polars. Arrays go to InMemoryDataModule((x, y), …)."
        )
    return given if is_frame(given) else Path(given).expanduser()


def as_tensor(values: Any, what: str) -> Tensor:
    """Return tensors, arrays or frames as a tensor; fractions of a frame become float32.

    Raises:
        UserError: a frame has a value that is not a number; ``what`` is the frame's name in the
            error.
    """
    if not hasattr(values, "to_numpy"):
        try:
            tensor = torch.as_tensor(values).cpu()  # the run puts the data on a GPU itself
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(
                f"{what} is a {type(values).__name__} that does not become a tensor "
                f"({str(error)[:160]}): give numbers, and y as whole numbers from 0 if they are "
                "classes."
            ) from None
        if not tensor.ndim:
            raise UserError(f"{what} is the single number {tensor.item()}: give one per sample.")
        return tensor
    array = values.to_numpy()
    if array.dtype.kind not in "biuf":
        try:
            # Objects may be whole numbers, of which float32 would lose digits.
            whole = np.asarray(array.tolist())
            array = whole if whole.dtype.kind in "biu" else array.astype(np.float32)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{what} is a {type(values).__name__} with values that are not numbers "
                f"({str(error)[:200]}): convert them to numbers, leave the column out, or give the "
                "whole frame to FromTable(df, target=…), which numbers a target's classes."
            ) from None
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise UserError(
            f"{what} is a {type(values).__name__} without a value in row "
            f"{np.argwhere(np.isnan(array))[0, 0]} ({np.isnan(array).sum()} in all): fill them in, "
            "or leave these rows out. Arrays and tensors may hold NaN."
        )
    # A frame's numbers are float64 by default, and a network's are float32. Copy them, because a
    # frame may return read-only memory.
    return torch.tensor(array, dtype=torch.float32 if array.dtype == np.float64 else None)
