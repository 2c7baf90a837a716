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
    """A loader for Lightning: batches made by ``make``, kept after the first pass if ``keep``.

    It is a class, since Lightning would take a list for several loaders.
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
    """Large ready batches; each process gets the same number, of sizes that differ by at most one sample."""
    if data is None:
        return []
    index = np.arange(len(data)) if index is None else index
    pieces = [index[start : start + EVALUATION_BATCH] for start in range(0, len(index), EVALUATION_BATCH)]
    device = CPU
    if trainer is not None:
        device, world = trainer.strategy.root_device, trainer.world_size
        if len(index) >= world > 1:
            pieces = np.array_split(index, -(-len(index) // (EVALUATION_BATCH * world)) * world)[
                trainer.global_rank :: world
            ]

    def make() -> Iterator[Batch]:
        for piece in pieces:
            yield from data.batches(piece, len(piece), device)

    in_memory = isinstance(data, TensorSamples) and 4 * data.x[0].numel() * len(index) <= KEPT_BYTES
    return Batches(make, len(pieces), keep=in_memory)
