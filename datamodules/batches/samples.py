"""Samples, from which batches are made: tensors in memory, or any map-style dataset."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, Subset, default_collate

from fl_lightning.datamodules.batches.own_generators import ONE_READER, generators_of, seed_all
from fl_lightning.datamodules.batches.read_ahead import AheadReader, Reading, Workers
from fl_lightning.datamodules.batches.sample_labels import (
    classes_in,
    find_targets,
    label_that_differs,
    some_of,
    why_no_classes,
)
from fl_lightning.errors import UserError
from fl_lightning.machine.device_memory import to_device
from fl_lightning.machine.random_state import random_state_kept

Batch = Any
CPU = torch.device("cpu")
CHUNK_BYTES = 64 * 2**20  # this part of an epoch is gathered at once
# Default limits of an evaluation batch.
EVALUATION_BATCH = 1000
EVALUATION_BYTES = 64 * 2**20
# (pixels, labels, the slice of the epoch's samples) -> pixels
Change = Callable[[Tensor, Tensor, slice], Tensor]


class TensorSamples:
    """Samples x ``(N, …)`` and y ``(N, …)`` in memory; batches are slices of one gathered tensor.

    uint8 images are stored as they are, and become float32 ``(x / scale - mean) / std`` when
    gathered (one mean and std per channel); every other dtype does not change. Finally,
    ``transform`` is called on each batch's x.
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        scale: float = 255.0,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.x = as_tensor(x, "x")
        self.y = as_tensor(y, "y")
        if len(self.x) != len(self.y):
            raise UserError(
                f"The data have {len(self.x)} inputs x but {len(self.y)} labels y: give one a "
                "sample."
            )
        if len(self.x) == 0:
            raise UserError("The data have no samples: give at least one.")
        if not self.y.is_floating_point():
            y = self.y.long()
            # Labels (N, 1), as MedMNIST has them, are labels (N,).
            self.y = y[:, 0] if y.shape[1:] == (1,) else y
        self.labels = classes_in(self.y.numpy())
        self.why_no_classes = why_no_classes(self.y.numpy()) if self.labels is None else ""
        self.transform = transform
        self.image = self.x.dtype == torch.uint8
        shape = (-1, *[1] * (self.x.ndim - 2))
        spread = torch.tensor(std or [1.0])
        self._factor = (1 / (scale * spread)).view(shape)
        self._shift = (-torch.tensor(mean or [0.0]) / spread).view(shape)
        self._scale = scale
        self._normalised = bool(mean)
        self._there: dict[torch.device, tuple[Tensor, ...]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.x)

    @property
    def in_pixel_range(self) -> bool:
        """Return whether x are pixels: with channels, and uint8 or floats in [0, 1]."""
        x = self.x
        unit = x.is_floating_point() and float(x.min()) >= 0 and float(x.max()) <= 1
        return x.ndim >= 3 and (self.image or unit)

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return x, y, factor and shift on ``device``."""
        with self._lock:
            if device not in self._there:
                # x and y stay on the CPU if they would fill more than half of the free GPU memory.
                nbytes = self.x.nbytes + self.y.nbytes
                fits = device.type != "cuda" or 2 * nbytes < torch.cuda.mem_get_info(device)[0]
                where = device if fits else CPU
                data = (
                    self.x.to(where),
                    self.y.to(where),
                    self._factor.to(device),
                    self._shift.to(device),
                )
                self._there[device] = data
            return self._there[device]

    def _gather(
        self,
        index: NDArray[np.int64],
        part: slice,
        device: torch.device,
        biases: Change | None,
        augment: Change | None,
    ) -> tuple[Tensor, Tensor]:
        all_x, all_y, factor, shift = self._on(device)
        chosen = to_device(index[part], all_x.device)
        x, y = (to_device(whole.index_select(0, chosen), device) for whole in (all_x, all_y))
        # Biases are defined for pixels in [0, 1].
        if biases is not None:
            x = biases(x / self._scale if self.image else x, y, part)
        if augment is not None:
            x = augment(x, y, part)
        if x.dtype == torch.uint8:
            x = torch.mul(x, factor)
            if self._normalised:
                x.add_(shift)
        elif self.image:
            # This may work in place, because biases have made a new tensor.
            x = x.mul_(factor * self._scale).add_(shift)
        return x, y

    def with_samples(self, x: Tensor, y: Tensor) -> TensorSamples:
        """Return other samples, scaled and transformed in the same way."""
        other = copy(self)
        other.x = x
        other.y = y
        other.labels = None if self.labels is None else classes_in(y.numpy())
        other._there = {}
        other._lock = threading.Lock()
        return other

    def batches(
        self,
        index: NDArray[np.int64],
        size: int,
        device: torch.device = CPU,
        biases: Change | None = None,
        augment: Change | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the samples ``index`` in this order, ``size`` at a time; the last has the rest."""
        bytes_each = max(1, self.x[0].numel() * (4 if self.image else self.x.element_size()))
        chunk = max(1, CHUNK_BYTES // (bytes_each * size)) * size
        for start in range(0, len(index), chunk):
            x, y = self._gather(
                index, slice(start, min(start + chunk, len(index))), device, biases, augment
            )
            for a in range(0, len(x), size):
                batch = x[a : a + size]
                yield (batch if self.transform is None else self.transform(batch)), y[a : a + size]


def as_tensor(values: Any, what: str) -> Tensor:
    """Return tensors, arrays or frames as a tensor; fractions of a frame become float32.

    Raises:
        UserError: a value is not a number; ``what`` is the name in the error.
    """
    framed = hasattr(values, "to_numpy")
    # Copied, because a frame may return read-only memory.
    array = np.array(values.to_numpy()) if framed else values
    try:
        if framed and array.dtype.kind not in "biuf":
            # Objects may be whole numbers, of which float32 would lose digits.
            whole = np.asarray(array.tolist())
            array = whole if whole.dtype.kind in "biu" else array.astype(np.float32)
        tensor = torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{what} is a {type(values).__name__} that does not become a tensor "
            f"({str(error)[:160]}): give numbers, and y as whole numbers from 0 if they are "
            "classes, or the whole frame to FromTable(df, target=…), which numbers a target's "
            "classes."
        ) from None
    if not framed:
        return tensor.cpu()  # the run puts the data on a GPU itself
    if tensor.isnan().any():
        raise UserError(
            f"{what} is a {type(values).__name__} without a value in row "
            f"{int(tensor.isnan().nonzero()[0, 0])}: fill it in, or leave such rows out. Arrays "
            "and tensors may hold NaN."
        )
    # A frame's numbers are float64 by default, and a network's are float32.
    return tensor.float() if tensor.dtype == torch.float64 else tensor


class DatasetSamples:
    """Samples of a map-style Dataset, read and collated one by one: any kind of batch, but slower.

    Args:
        targets: labels ``(N,)``; None: the dataset's own, if they are found without reading
            samples.
        collate: makes a batch of a list of samples; None: torch's ``default_collate``.
        workers: number of processes that read ahead, and their settings.
        fetch: as in ``Reading``.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        targets: Any = None,
        collate: Callable[[Any], Batch] | None = None,
        workers: Workers = Workers(),  # noqa: B008  # frozen
        fetch: Literal["sample", "list", "batch"] = "sample",
    ) -> None:
        self.workers = workers
        self.read = Reading(dataset, collate or default_collate, fetch)
        self._ahead = AheadReader(self.read, workers) if workers.number else None
        self._evaluation_size: int | None = None
        # Generators of the dataset and of its collate function, after they were searched for.
        self._generators: list[tuple[str, Any]] = []
        self._looked = False
        labels = find_targets(dataset) if targets is None else targets
        self.labels: NDArray[np.int64] | None = None
        if labels is not None:
            labels = np.asarray(labels)
            labels = labels.ravel() if labels.shape[1:] == (1,) else labels
            if labels.shape != (len(self),):
                raise UserError(
                    f"targets have the shape {labels.shape}: give one label for each of the "
                    f"{len(self)} samples."
                )
            self.labels = classes_in(labels)
        self._given = targets is not None
        self.why_no_classes = why_no_classes(labels) if self.labels is None else ""

    def __len__(self) -> int:
        return len(self.read.dataset)

    def compare_labels(self) -> str:
        """Return how the labels differ from those in a few samples, for a note; empty if they do
        not. If the data set's own labels differ, they count as unknown.
        """
        if self.labels is None or self._given or self.read.fetch == "batch":
            return ""
        some = some_of(len(self))
        try:
            with drawing_apart():
                for (place,), batch in zip(some, self.each(some, lambda k: k, CPU), strict=True):
                    label = int(self.labels[place])
                    other = label_that_differs(batch, label)
                    if other is not None:
                        self.labels = None
                        self.why_no_classes = f"sample {place} is read with the label {other:g}"
                        return (
                            f"sample {place} of the training data has the label {other:g} when it "
                            f"is read, but its data set says {label}; the labels count as unknown: "
                            "give targets=[…], one per sample"
                        )
        except Exception:  # reading is the data set's own code, whose errors the run reports
            return ""
        finally:
            self.close()
        return ""

    @property
    def reads_ahead(self) -> bool:
        """Return whether its own processes read batches ahead."""
        return self._ahead is not None

    def each(
        self, cut: Iterable[NDArray[np.int64]], seed: Callable[[int], int], device: torch.device
    ) -> Iterator[Batch]:
        """Yield a batch for each of these index arrays.

        ``seed(k)``: seed of the k-th batch, for draws of processes that read and of the dataset's
        own generators.
        """
        read: Iterator[Batch]
        if self._ahead is None:
            read = (self._seeded(index, partial(seed, k)) for k, index in enumerate(cut))
        else:
            read = self._ahead.batches((seed(k), index) for k, index in enumerate(cut))
        return (batch_to_device(batch, device) for batch in read)

    def _seeded(self, index: NDArray[np.int64], seed: Callable[[], int]) -> Batch:
        """Return a batch, for which the dataset's own generators follow the seed."""
        # Until the search is done, only one reader reads at a time: a second one would draw from a
        # generator that the first has just created.
        with nullcontext() if self._looked else ONE_READER:
            if not self._looked:
                # A dataset may create its generators when it is first read, so search after that.
                # If the search raises, it is not marked as done.
                batch = self.read(index)
                self._generators = generators_of(self.read.dataset, self.read.collate)
                self._looked = True
                if not self._generators:
                    return batch
        if not self._generators:
            return self.read(index)
        # All readers share the generators, so only one reads at a time.
        with ONE_READER:
            seed_all(self._generators, seed())
            return self.read(index)

    def evaluation_size(self) -> int:
        """Return evaluation's batch size: as many first samples as ``EVALUATION_BYTES`` hold."""
        if self._evaluation_size is None:
            with drawing_apart():
                each = _nbytes(self.read(np.zeros(1, np.int64)))
            self._evaluation_size = max(1, min(EVALUATION_BATCH, EVALUATION_BYTES // max(1, each)))
        return self._evaluation_size

    def close(self, wait: bool = True) -> None:
        """End the processes that read ahead, until they are needed again."""
        if self._ahead is not None:
            self._ahead.close(wait)


Samples = TensorSamples | DatasetSamples


def one_by_one(samples: Samples, index: NDArray[np.int64], biases: Change | None) -> Dataset[Any]:
    """Return the samples ``index`` as a dataset."""
    if isinstance(samples, DatasetSamples):
        return Subset(samples.read.dataset, index.tolist())
    return _Singles(samples, index, biases)


class _Singles(Dataset[Any]):
    """Samples of tensors, each made on request."""

    def __init__(
        self, samples: TensorSamples, index: NDArray[np.int64], biases: Change | None
    ) -> None:
        self.samples = samples
        self.index = index
        self.biases = biases

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        ((x, y),) = self.samples.batches(self.index[[i]], 1, biases=self.biases)
        return x[0], y[0]


def makes_batches(samples: Samples) -> bool:
    """Return whether the dataset returns a complete batch for each position."""
    return isinstance(samples, DatasetSamples) and samples.read.fetch == "batch"


@contextmanager
def drawing_apart() -> Iterator[None]:
    """Within this context the process's generators begin at 0; their states come back."""
    with random_state_kept():
        torch.default_generator.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        yield


def _nbytes(batch: Batch) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor | np.ndarray))


@runtime_checkable
class Movable(Protocol):
    """A tensor, or an object with a ``to`` method like a tensor's."""

    def to(self, device: torch.device) -> Any: ...


def batch_to_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch with all its tensors on the device."""
    if device.type == "cpu":
        return batch
    return apply_to_collection(
        batch,
        Movable,
        lambda one: to_device(one, device) if isinstance(one, Tensor) else one.to(device),
    )
