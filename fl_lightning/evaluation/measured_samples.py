"""The samples that are measured, and their batches: client after client; small clients share a
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fl_lightning.sampling import generator

Samples = Mapping[int, NDArray[np.int64]]  # client → positions in the training data
Counted = tuple[Any, int]  # a batch and its number of samples


def samples_of(data: Any) -> Samples:
    """Return all clients' training samples."""
    return {i: data.client_indices(i) for i in range(int(data.num_clients))}


def drawn(data: Any, number: int | None, seed: int, purpose: str) -> Samples:
    """Draw ``number`` of all clients' samples, without replacement.

    If ``number`` is None, or there are no more samples, all are returned.
    A sample that several clients hold can occur several times. The draw is a function of (seed,
    purpose).
    """
    sizes = data.client_sizes()
    total = int(sizes.sum())
    if number is None or number >= total:
        return samples_of(data)
    chosen = np.sort(generator(seed, purpose).choice(total, number, replace=False, shuffle=False))
    ends = np.cumsum(sizes)
    clients = np.searchsorted(ends, chosen, side="right")
    samples: dict[int, NDArray[np.int64]] = {}
    for i in np.unique(clients).tolist():
        first = ends[i] - sizes[i]
        samples[i] = data.client_indices(i)[chosen[clients == i] - first]
    return samples


def pieces(samples: Samples, size: int) -> list[list[tuple[int, NDArray[np.int64]]]]:
    """Yield batches of exactly ``size`` samples, except the last, as parts (client, its
    samples).
    """
    batches: list[list[tuple[int, NDArray[np.int64]]]] = []
    room = 0
    for client, indices in samples.items():
        start = 0
        while start < len(indices):
            if room == 0:
                batches.append([])
                room = size
            piece = indices[start : start + room]
            batches[-1].append((client, piece))
            start = start + len(piece)
            room = room - len(piece)
    return batches


def together(read: list[Counted]) -> list[Counted]:
    """Join batches to one if all their leaves are tensors with one row per sample; else leave
    them as they are.
    """
    flat = [tree_flatten(batch) for batch, _ in read]
    first, spec = flat[0]
    if len(read) == 1 or not first:
        return read
    for (leaves, own_spec), (_, number) in zip(flat, read, strict=True):
        if own_spec != spec:
            return read
        for leaf, of_first in zip(leaves, first, strict=True):
            if not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != number:
                return read
            if leaf.shape[1:] != of_first.shape[1:] or leaf.dtype != of_first.dtype:
                return read
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    whole = [torch.cat(column) for column in columns]
    return [(tree_unflatten(whole, spec), sum(number for _, number in read))]


def copies(batches: list[Counted]) -> list[Counted]:
    """Copy the batches to their own memory, because a learner may change its batch in place."""
    return [(tree_map(_copied, batch), number) for batch, number in batches]


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
