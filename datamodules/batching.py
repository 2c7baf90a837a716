"""How many samples a batch has: of a client in training, and in evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_lightning.errors import UserError


def check_batch_sizes(batch_size: Any, eval_batch_size: Any, drop_last: Any) -> None:
    """Refuse sizes that are neither whole numbers above 0 nor None."""
    for name, size, null in (
        ("batch_size", batch_size, "the whole client in one batch"),
        ("eval_batch_size", eval_batch_size, "as many samples as fit"),
    ):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1):
            raise UserError(f"{name} is {size}: give at least 1, or null for {null}.")
    if not isinstance(drop_last, bool):
        raise UserError(f"drop_last is {drop_last!r}: give true or false.")


def epoch_batches(samples: int, size: int | None, drop_last: bool) -> int:
    """How many batches an epoch of this many samples has, at least one."""
    if size is None:
        return 1
    return max(1, samples // size) if drop_last else -(-samples // size)


def slices(samples: int, size: int | None, drop_last: bool) -> Iterator[slice]:
    """Every sample once, ``size`` at a time. ``drop_last``: no smaller batch, what is left over joins the last one."""
    size = size or samples
    count = epoch_batches(samples, size, drop_last)
    for i in range(count):
        yield slice(i * size, samples if i == count - 1 else (i + 1) * size)


def smallest_batch(
    sizes: NDArray[np.int64], size: int | None, drop_last: bool, steps: ArrayLike | None
) -> tuple[int, int]:
    """The smallest batch that a client of ``sizes`` ``(m,)`` trains on in ``steps`` steps, and the first such client.

    >>> sizes = np.array([8, 9, 12])
    >>> smallest_batch(sizes, 4, False, None), smallest_batch(sizes, 4, True, None), smallest_batch(sizes, 4, False, 2)
    ((1, 1), (4, 0), (4, 0))
    """
    met = sizes
    if size is not None:
        rest = sizes % size
        left_over = (rest > 0) & (sizes > size) & (not drop_last)
        if steps is not None:
            left_over &= np.asarray(steps) > sizes // size
        met = np.where(left_over, rest, np.minimum(sizes, size))
    client = int(met.argmin())
    return int(met[client]), client


def weighted_order(draw: np.random.Generator, weights: NDArray[np.float64], client: int) -> NDArray[np.int64]:
    """Positions of as many samples as a client has, drawn with replacement by their weights."""
    if not weights.sum() > 0:
        raise UserError(
            f"Client {client} has no sample that WeightedRandomSampler would draw (all their weights are 0): give "
            "each client one, by another partition or by other weights."
        )
    return draw.choice(len(weights), len(weights), p=weights / weights.sum())
