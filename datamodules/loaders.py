"""The loaders that Lightning sees: a round's token, and ready batches for evaluation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from traceback import extract_stack
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fl_lightning.datamodules.batches.samples import (
    CPU,
    EVALUATION_BATCH,
    Batch,
    DatasetSamples,
    Samples,
    TensorSamples,
    batch_to_device,
    makes_batches,
)
from fl_lightning.datamodules.partitions.partition import Indices
from fl_lightning.errors import UserError
from fl_lightning.machine.lightning import pl, rank_zero_warn
from fl_lightning.sampling import generator

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
# clients train on threads and share the attributes that hooks set on the data module
ONE_AT_A_TIME = threading.Lock()


def overridden(owner: Any, method: str) -> bool:
    """Return whether a data module, of either Lightning or of neither, overrides a method."""
    base = next(
        (c for c in reversed(type(owner).__mro__) if c.__name__ == "LightningDataModule"), None
    )
    own = getattr(owner, method, None)
    return own is not None and getattr(own, "__func__", own) is not getattr(base, method, None)


class Transfer:
    """The transfer hooks that ``owner`` overrides, for batches of the clients of ``data``.

    The hooks become attributes of ``data``, so Lightning calls them in evaluation. In training
    Lightning's batch is only the round's token, and the hooks return it unchanged. There
    :meth:`batches` applies the hooks to each local batch.
    """

    def __init__(self, data: Any, owner: Any) -> None:
        self.hooks: dict[str, Callable[..., Batch]] = {
            h: getattr(owner, h) for h in HOOKS if overridden(owner, h)
        }
        # a `partial` can be copied and pickled, and Lightning finds the hook in it
        for name, hook in self.hooks.items():
            setattr(data, name, partial(outside_training, data, hook))

    def source(self, device: torch.device) -> torch.device:
        """Return the device where batches are made, if hooks move them to ``device``."""
        moves = any(name in self.hooks for name in HOOKS[:2])
        return torch.device("cpu") if moves else device

    def batches(self, batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
        """Yield each batch after the hooks, on ``device``."""
        for batch in batches:
            if self.hooks:
                with ONE_AT_A_TIME:
                    batch = self._through(batch, device)
            yield batch

    def _through(self, batch: Batch, device: torch.device) -> Batch:
        before, move, after = (self.hooks.get(name) for name in HOOKS)
        if before is not None:
            batch = before(batch, 0)
        batch = batch_to_device(batch, device) if move is None else move(batch, device, 0)
        return batch if after is None else after(batch, 0)


def outside_training(data: Any, hook: Callable[..., Batch], batch: Batch, *rest: Any) -> Batch:
    """Call ``hook``, except in training, because the batch is then the round's token."""
    if data.trainer is not None and data.trainer.training:
        return batch
    return hook(batch, *rest)


KEPT_BYTES = 256 * 2**20  # evaluation batches up to this total size are made once and kept


class Batches:
    """A loader for Lightning, which would take a list for several loaders: ``make`` makes the
    batches, which are kept after the first pass if ``keep``.
    """

    def __init__(self, make: Callable[[], Iterator[Batch]], count: int, keep: bool) -> None:
        self._make = make
        self._count = count
        self._keep = keep
        self._kept: list[tuple[Tensor, ...]] | None = None
        self._versions: list[int] = []

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        if not self._keep:
            return self._make()
        # A learner may change its batch in place; then the batch is made again. In inference mode
        # tensors have no version counter.
        if self._kept is None or self._versions != _versions(self._kept):
            with torch.inference_mode(False):
                self._kept = list(self._make())
            self._versions = _versions(self._kept)
        return iter(self._kept)


def _versions(batches: list[tuple[Tensor, ...]]) -> list[int]:
    """Return the version counter of each tensor, which counts in-place changes."""
    return [tensor._version for tensor in chain.from_iterable(batches)]


class SamplesOfAll(Dataset[Any]):
    """The training samples of all clients, one client after the other, without augmentation."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return int(self._data.client_sizes().sum())

    def __getitem__(self, position: int) -> Any:
        ends = np.cumsum(self._data.client_sizes())
        place = range(len(self))[position]
        client = int(np.searchsorted(ends, place, side="right"))
        before = int(ends[client - 1]) if client else 0
        return self._data.client_dataset(client)[place - before]


class RoundToken:
    """The training loader as Lightning sees it: one batch per epoch, because an epoch is a round.

    A learner that reads the loader outside of a client's step, as in ``on_fit_start``, finds the
    samples of all clients in ``dataset``, and the size of the clients' batches in ``batch_size``.
    """

    def __init__(self, data: Any) -> None:
        self.dataset = SamplesOfAll(data)
        self.batch_size: int | None = data._mine.batch_size
        self.drop_last: bool = data._mine.drop_last

    @classmethod
    def of(cls, data: Any) -> RoundToken:
        """Return the loader of a federated fit on ``data``.

        Raises:
            UserError: a learner is fitted without FederatedModule.
        """
        fitted = getattr(data.trainer, "lightning_module", None)
        if fitted is not None and not hasattr(fitted, "global_model"):
            name = type(fitted).__name__
            raise UserError(
                f"data: {type(data).__name__} is for federated runs, but the Trainer got {name} "
                f"without a FederatedModule. Wrap it: trainer.fit(FederatedModule({name}(…)), "
                f"data); to train {name} as it is, give it a DataLoader, or federate with one "
                "client that has all samples."
            )
        return cls(data)

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[RoundBatch]:
        yield RoundBatch(torch.zeros(1))


@dataclass
class RoundBatch:
    """The one batch of a round as Lightning's loop and callbacks see it: no client's samples.

    Lightning moves it to the device, and takes its number of samples, which is one, for the weight
    of a log. So it is a dataclass with one tensor; whoever reads it as a batch gets an error.
    """

    round: Tensor

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        # copy and Lightning look for such names on any object.
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self) -> NoReturn:
        (reader, *_) = extract_stack(limit=3)
        raise UserError(
            f"{reader.name} ({Path(reader.filename).name}, line {reader.lineno}) reads the batch "
            "of a hook that a federated run calls once per round, such as a callback's "
            "on_train_batch_end. There is no client's batch in it. Read the batch in a callback's "
            "on_train_batch_start, which gets each client's batches, in the learner's own "
            "on_train_batch_end, or in local_batch(client, batch) of a FederatedCallback."
        )


def say(trainer: Any, text: str) -> None:
    """Report this as a note of the run, which its card repeats; without a run as a warning."""
    getattr(getattr(trainer, "lightning_module", None), "note", rank_zero_warn)(text)


def evaluation_loader(
    trainer: pl.Trainer | None,
    data: Samples | None,
    index: Indices | None,
    size: int | None,
    source: Callable[[torch.device], torch.device],
    seed: int,
) -> Any:
    """Return a loader of large ready batches for evaluation.

    All processes get equally many batches, whose sizes differ by at most one sample.

    Args:
        index: positions of the samples; None: all.
        size: batch size; None: ``EVALUATION_BATCH``, and with a Dataset as many samples as take
            ``EVALUATION_BYTES``.
        source: function that returns the device on which batches for a device are made.
        seed: for random draws of processes that read ahead.
    """
    if data is None:
        return []
    index = np.arange(len(data)) if index is None else index
    if makes_batches(data):
        size = 1
    elif size is None:
        size = EVALUATION_BATCH
        if isinstance(data, DatasetSamples):
            size = data.evaluation_size()
    pieces = [index[start : start + size] for start in range(0, len(index), size)]
    device = CPU
    if trainer is not None:
        device = source(trainer.strategy.root_device)
        world = trainer.world_size
        if len(index) >= world > 1:
            # A multiple of the number of processes, so that no process waits in the last collective
            # call.
            number = -(-len(index) // (size * world)) * world
            pieces = np.array_split(index, number)[trainer.global_rank :: world]

    def make() -> Iterator[Batch]:
        if isinstance(data, DatasetSamples):
            draw = generator(seed, "evaluation").integers(2**63, size=len(pieces))
            yield from data.each(pieces, lambda k: int(draw[k]), device)
        else:
            for piece in pieces:
                yield from data.batches(piece, len(piece), device)

    in_memory = isinstance(data, TensorSamples) and 4 * data.x[0].numel() * len(index) <= KEPT_BYTES
    return Batches(make, len(pieces), keep=in_memory)
