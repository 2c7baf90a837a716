"""The loaders that Lightning sees: a round's token, and ready batches for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from fl_lightning.datamodules.partitions import Indices
from fl_lightning.datamodules.samples import CPU, Batch, Samples, TensorSamples

EVALUATION_BATCH = 1000
KEPT_BYTES = 256 * 2**20  # evaluation batches are made once and kept up to this size


class Batches:
    """A loader for Lightning: batches made by ``make``, kept after the first pass where ``keep``.

    A class of its own, since Lightning takes a list for several loaders.
    """

    def __init__(self, make: Callable[[], Iterator[Batch]], count: int, keep: bool) -> None:
        self._make, self._count, self._keep = make, count, keep
        self._kept: list[Batch] | None = None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        if not self._keep:
            return self._make()
        if self._kept is None:
            self._kept = list(self._make())
        return iter(self._kept)


class RoundToken:
    """The training loader as Lightning sees it: one batch an epoch, since one epoch is one round."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(1)


def evaluation_loader(trainer: pl.Trainer | None, data: Samples | None, index: Indices | None = None) -> Any:
    """Large ready batches; each process gets its share of them when there are enough."""
    if data is None:
        return []
    index = np.arange(len(data)) if index is None else index
    size = EVALUATION_BATCH
    starts = range(0, len(index), size)
    device, rank, world = CPU, 0, 1
    if trainer is not None:
        device = trainer.strategy.root_device
        rank, world = trainer.global_rank, trainer.world_size
    if len(starts) >= world > 1:
        starts = starts[rank::world]

    def make() -> Iterator[Batch]:
        for start in starts:
            yield from data.batches(index[start : start + size], size, device)

    in_memory = isinstance(data, TensorSamples) and 4 * data.x[0].numel() * len(index) <= KEPT_BYTES
    return Batches(make, len(starts), keep=in_memory)
