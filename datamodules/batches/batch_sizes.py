"""Sizes of batches, in a client's training and in evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_lightning.errors import UserError


def epoch_batches(samples: int, size: int | None, drop_last: bool) -> int:
    """Return the number of batches in an epoch of so many samples, at least one."""
    if size is None:
        return 1
    return max(1, samples // size) if drop_last else -(-samples // size)


def slices(samples: int, size: int | None, drop_last: bool) -> Iterator[slice]:
    """Return slices that have every sample once, ``size`` at a time.

    With ``drop_last`` there is no smaller batch, and left-over samples join the last one.
    """
    size = size or samples
    count = epoch_batches(samples, size, drop_last)
    for i in range(count):
        yield slice(i * size, samples if i == count - 1 else (i + 1) * size)


def smallest_batch(
    sizes: NDArray[np.int64],
    size: int | None,
    drop_last: bool,
    steps: ArrayLike | None,
    clients: Sequence[int] | None = None,
) -> tuple[int, int]:
    """Return the smallest batch of the clients of ``sizes`` ``(m,)``, and the first such client.

    >>> sizes = np.array([8, 9, 12])
    >>> smallest_batch(sizes, 4, False, None), smallest_batch(sizes, 4, True, None)
    ((1, 1), (4, 0))
    >>> smallest_batch(sizes, 4, False, steps=2)
    (4, 0)
    >>> smallest_batch(sizes, 5, False, None), smallest_batch(sizes, 5, False, None, [0, 1])
    ((2, 2), (3, 0))
    """
    taken = None if steps is None else np.asarray(steps)
    if clients is not None:
        sizes = sizes[np.asarray(clients)]
        taken = taken[np.asarray(clients)] if taken is not None and taken.ndim else taken
    met = sizes
    if size is not None:
        rest = sizes % size
        left_over = (rest > 0) & (sizes > size) & (not drop_last)
        if taken is not None:
            left_over &= taken > sizes // size
        met = np.where(left_over, rest, np.minimum(sizes, size))
    found = int(met.argmin())
    return int(met[found]), found if clients is None else int(clients[found])


def drawn_by_weight(
    weights: NDArray[np.float64], draw: np.random.Generator, client: int
) -> NDArray[np.int64]:
    """Draw as many positions as ``weights`` ``(N_i,)`` has, as WeightedRandomSampler does."""
    if not weights.sum() > 0:
        raise UserError(
            f"Client {client} has no sample that WeightedRandomSampler would draw (the weights of "
            "its samples are all 0): give each client such a sample, by another partition or by "
            "other weights."
        )
    return draw.choice(len(weights), len(weights), p=weights / weights.sum())
