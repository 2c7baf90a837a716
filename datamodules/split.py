"""The training samples split over clients: made once a seed, by a partition or from index arrays that were given."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.datamodules.partitions import ByGroup, Indices, LazyClients, Partition, check_client
from fl_lightning.datamodules.samples import Samples
from fl_lightning.errors import UserError
from fl_lightning.sampling import generator

HASHED_BY_CONTENT = 10_000_000  # more indices than this are not drawn for a hash


@dataclass
class Split:
    """Who holds which of ``total`` training samples.

    ``clients``: index arrays, into ``kept`` where some samples are ``held_out`` for validation; made ``by_partition``,
    or given.
    """

    clients: Sequence[Any]
    total: int
    kept: Indices | None = None
    held_out: Indices | None = None
    by_partition: bool = True

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Numbers of samples ``(m,)``; counted once, since it takes all m clients."""
        sizes = getattr(self.clients, "sizes", None)
        if sizes is None:
            sizes = np.fromiter((len(c) for c in self.clients), np.int64, len(self.clients))
            if not sizes.all():
                check_client(int(sizes.argmin()), [], self.total)
        return np.asarray(sizes, np.int64)

    @cached_property
    def hash(self) -> str:
        return partition_hash(self.clients, self.kept)

    def indices(self, client: int) -> Indices:
        """Positions of a client's samples in the training data ``(N_i,)``."""
        found = self.clients[client]
        indices = np.asarray(found, np.int64) if isinstance(found, np.ndarray | Tensor) else np.array(found)
        if not isinstance(self.clients, list | tuple):
            check_client(client, indices, self.total)
        return indices.astype(np.int64, copy=False) if self.kept is None else self.kept[indices]


def split_samples(
    data: Samples,
    partition: Partition,
    counts: tuple[int | None, int | None],
    clients: Sequence[Any] | None,
    groups: NDArray[Any] | None,
    val_fraction: float,
    seed: int,
) -> Split:
    """Hold ``val_fraction`` of the samples out, then split the rest: as ``clients`` says, else by the partition.

    Args:
        counts: the number of clients asked for, and the one where neither that nor the partition says it.
        groups: ``(N,)``, for a ``ByGroup`` that has none of its own.

    Raises:
        UserError: too few samples, no number of clients, or classes asked for where there are none.
    """
    total = len(data)
    held_out: Indices | None = None
    kept: Indices | None = None
    if isinstance(partition, ByGroup) and partition.groups is None and groups is not None:
        partition = ByGroup(groups.tolist())
    if val_fraction > 0:
        held = round(val_fraction * total)
        if not 0 < held < total:
            raise UserError(
                f"val_fraction is {val_fraction}: of {total} training samples that leaves none to "
                "train or to validate on. Give another share, or 0 to validate on the test set."
            )
        order = generator(seed, "val-fraction").permutation(total)
        held_out, kept = np.sort(order[:held]), np.sort(order[held:])
        partition = partition.restrict(kept)
    if clients is not None:
        return Split(_checked(clients, total), total, kept, held_out, by_partition=False)
    wanted, default = counts
    num_clients = wanted or partition.clients or default
    if num_clients is None:
        raise UserError(
            "num_clients is not given: give the number of clients, or clients=[…] with each client's sample indices."
        )
    if data.labels is None and partition.needs_labels:
        raise UserError(
            f"The partition is {partition!r}, which goes by classes, but the training data have no "
            "class labels (whole numbers from 0, one a sample): give targets, or a partition such "
            "as IID."
        )
    labels = np.zeros(total, np.int64) if data.labels is None else data.labels
    labels = labels if kept is None else labels[kept]
    return Split(_checked(partition.split(labels, num_clients, seed), len(labels)), total, kept, held_out)


def _checked(clients: Sequence[Any], total: int) -> Sequence[Any]:
    """Lists are checked at once, lazy sequences when a client is asked for."""
    if len(clients) == 0:
        raise UserError("clients is empty: give at least one client's sample indices.")
    if isinstance(clients, list | tuple):
        for i, indices in enumerate(clients):
            check_client(i, indices, total)
    return clients


def partition_hash(clients: Sequence[Indices], kept: Indices | None) -> str:
    """A hash of all indices, or of the recipe where there are very many lazy ones."""
    state = hashlib.sha256(b"" if kept is None else kept.tobytes())
    if isinstance(clients, LazyClients) and int(clients.sizes.sum()) > HASHED_BY_CONTENT:
        state.update(clients.recipe.encode())
    else:
        for indices in clients:
            array = np.asarray(indices, np.int64)
            state.update(len(array).to_bytes(8, "little"))
            state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()[:16]
