"""What all federated data modules share: the split, batches by client, evaluation on the global sets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.datamodules.augment import CropFlip
from fl_lightning.datamodules.biases import Bias
from fl_lightning.datamodules.loaders import RoundToken, evaluation_loader
from fl_lightning.datamodules.partitions import IID, ByGroup, Indices, Partition, check_client
from fl_lightning.datamodules.samples import CPU, Batch, Change, Samples, TensorSamples
from fl_lightning.datamodules.views import partition_figure, partition_hash, partition_table, save_partition
from fl_lightning.errors import UserError
from fl_lightning.sampling import generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FederatedDataModule(pl.LightningDataModule):
    """Training samples split over clients; validation and test sets stay whole.

    Subclasses override ``load``, which sets ``train_set`` and, where such data exist, ``val_set`` and ``test_set``
    (``TensorSamples`` or ``DatasetSamples``), and perhaps ``groups`` ``(N,)`` for ``ByGroup``. Where a subclass has the
    attributes ``sample_shape`` (of x) and ``num_classes``, the command line builds networks to fit.

    Args:
        num_clients: None: as many as the partition or the data set has.
        partition: None: ``IID()``, or the data set's own clients where it has them.
        biases: of the clients' training images.
        batch_size: None: the whole client in one batch. The last, shorter batch of an epoch is kept.
        val_fraction: this share of the training data is held out for validation before it is split.
        clients: the clients' index arrays themselves, in place of a partition.
        seed: of the split, the order of samples and the augmentation; None: the run's.
    """

    default_clients: int | None = None
    default_partition: Partition = IID()
    name: str | None = None
    sample_shape: tuple[int, ...] | None = None

    def __init__(
        self,
        *,
        num_clients: int | None = None,
        partition: Partition | None = None,
        biases: Sequence[Bias] = (),
        batch_size: int | None = 50,
        val_fraction: float = 0.0,
        clients: Sequence[Any] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if batch_size is not None and batch_size < 1:
            raise UserError(f"batch_size is {batch_size}: give at least 1, or null for the whole client in one batch.")
        if num_clients is not None and num_clients < 1:
            raise UserError(f"num_clients is {num_clients}: give at least 1.")
        if not 0 <= val_fraction < 1:
            raise UserError(
                f"val_fraction is {val_fraction}: give a share of the training data from 0 (validate on "
                "the test set) to below 1."
            )
        if clients is not None and (partition is not None or num_clients not in (None, len(clients))):
            raise UserError(
                f"clients gives {len(clients)} clients' samples, and num_clients is {num_clients}, partition "
                f"{partition!r}: give either clients alone, or num_clients and partition."
            )
        self.batch_size, self.biases = batch_size, tuple(biases)
        self.val_fraction, self.seed = val_fraction, seed
        self.partition = self.default_partition if partition is None else partition
        self.augmentation: CropFlip | None = None
        self.train_set: Samples | None = None
        self.val_set: Samples | None = None
        self.test_set: Samples | None = None
        self.groups: NDArray[Any] | None = None
        self._wanted_clients = num_clients
        self._given = clients
        self._clients: Sequence[Indices] = ()
        self._sizes: tuple[Sequence[Indices], NDArray[np.int64]] | None = None
        self._held_out: Indices | None = None
        self._split_seed: int | None = None
        self._hash: str | None = None

    # ---- loading and splitting

    def load(self) -> None:
        """Set ``train_set``, ``val_set``, ``test_set`` and ``groups``; called once."""
        raise NotImplementedError

    @property
    def run_seed(self) -> int:
        """``seed``, else that of the run this module is attached to, else Lightning's global one, else 0."""
        if self.seed is not None:
            return self.seed
        module = None if self.trainer is None else getattr(self.trainer, "lightning_module", None)
        of_run = getattr(module, "run_seed", None)
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if of_run is None else int(of_run)

    def setup(self, stage: str | None = None) -> None:
        """Load once, and split once per seed."""
        if self.train_set is None:
            self.load()
            self._check_biases()
        if self._split_seed != self.run_seed:
            self._split(self.run_seed)

    def _ready(self) -> None:
        """Prepare and set up, where no Trainer has done so."""
        if self._split_seed is None:
            self.prepare_data()
            self.setup()

    @property
    def _train(self) -> Samples:
        self._ready()
        assert self.train_set is not None
        return self.train_set

    def _check_biases(self) -> None:
        if not self.biases:
            return
        data = self.train_set
        if not (isinstance(data, TensorSamples) and data.in_pixel_range and data.labels is not None):
            raise UserError(
                f"biases is {list(self.biases)}, but they are for labelled images in memory, as uint8 or "
                "floats in [0, 1], with channels first: give biases=[] for these data."
            )

    def _split(self, seed: int) -> None:
        assert self.train_set is not None
        total = len(self.train_set)
        self._hash = None
        self._held_out = None
        kept: Indices | None = None
        partition = self.partition
        if isinstance(partition, ByGroup) and partition.groups is None and self.groups is not None:
            partition = ByGroup(self.groups.tolist())
        if self.val_fraction > 0:
            held = round(self.val_fraction * total)
            if not 0 < held < total:
                raise UserError(
                    f"val_fraction is {self.val_fraction}: of {total} training samples that leaves none to "
                    "train or to validate on. Give another share, or 0 to validate on the test set."
                )
            order = generator(seed, "val-fraction").permutation(total)
            self._held_out, kept = np.sort(order[:held]), np.sort(order[held:])
            partition = partition.restrict(kept)
        if self._given is not None:
            self._clients = self._checked(self._given, total)
        else:
            count = self._wanted_clients or partition.clients or self.default_clients
            if count is None:
                raise UserError(
                    "num_clients is not given: give the number of clients, or clients=[…] with each "
                    "client's sample indices."
                )
            if self.train_set.labels is None and partition.needs_labels:
                raise UserError(
                    f"The partition is {partition!r}, which goes by classes, but the training data have no "
                    "class labels (whole numbers from 0, one a sample): give targets, or a partition such "
                    "as IID."
                )
            labels = np.zeros(total, np.int64) if self.train_set.labels is None else self.train_set.labels
            labels = labels if kept is None else labels[kept]
            self._clients = self._checked(partition.split(labels, count, seed), len(labels))
        self._kept = kept
        self._split_seed = seed

    def _checked(self, clients: Sequence[Any], total: int) -> Sequence[Any]:
        """Lists are checked at once, lazy sequences when a client is asked for."""
        if len(clients) == 0:
            raise UserError("clients is empty: give at least one client's sample indices.")
        if isinstance(clients, list | tuple):
            for i, indices in enumerate(clients):
                check_client(i, indices, total)
        return clients

    # ---- who holds what

    @property
    def num_clients(self) -> int:
        known = self._given if self._given is not None else self._clients
        if len(known):
            return len(known)
        own_groups = isinstance(self.partition, ByGroup) and self.partition.groups is None
        count = self._wanted_clients or self.partition.clients or self.default_clients
        if count is None or own_groups:  # known once the data are
            self._ready()
            return len(self._clients)
        return count

    @classmethod
    def shape_of_samples(cls, **arguments: Any) -> tuple[int, ...] | None:
        """Shape of x for a class with these arguments, as far as it is known without the data; None: it is not."""
        return cls.sample_shape

    @property
    def num_classes(self) -> int | None:
        """The training data's largest label plus one; None without class labels. A class attribute of packaged sets."""
        labels = self._train.labels
        return None if labels is None else int(labels.max()) + 1

    def client_sizes(self) -> NDArray[np.int64]:
        """The clients' numbers of samples ``(m,)``, read-only where they are all the same."""
        self._ready()
        if self._sizes is None or self._sizes[0] is not self._clients:
            sizes = getattr(self._clients, "sizes", None)
            if sizes is None:
                sizes = np.fromiter((len(c) for c in self._clients), np.int64, len(self._clients))
                if not sizes.all():
                    check_client(int(sizes.argmin()), [], len(self._train))
            self._sizes = self._clients, np.asarray(sizes, np.int64)  # counted once, as it goes through all m clients
        return self._sizes[1]

    def client_indices(self, client: int) -> Indices:
        """Positions of a client's samples in the training data ``(N_i,)``."""
        total = len(self._train)
        found = self._clients[client]
        indices = np.asarray(found, np.int64) if isinstance(found, np.ndarray | Tensor) else np.array(found)
        if not isinstance(self._clients, list | tuple):
            check_client(client, indices, total)
        return indices.astype(np.int64, copy=False) if self._kept is None else self._kept[indices]

    @property
    def partition_hash(self) -> str:
        """Sixteen hexadecimal digits, the same for the same split."""
        self._ready()
        if self._hash is None:
            self._hash = partition_hash(self._clients, self._kept)
        return self._hash

    def partition_table(self) -> str:
        """Samples and classes of the first clients, as text."""
        return partition_table(self)

    def plot_partition(self) -> Figure:
        """Heat map of clients and classes (the first 200 clients)."""
        return partition_figure(self)

    def save_partition(self, path: str | Path) -> None:
        """Write the split as ``.npz``, for ``partition=Saved(path)``."""
        labels = self._train.labels
        labels = np.zeros(len(self._train), np.int64) if labels is None else labels
        save_partition(Path(path), self._clients, labels if self._kept is None else labels[self._kept])

    def card(self) -> dict[str, str]:
        """Facts for a run's card."""
        sizes = self.client_sizes()
        held = 0 if self._held_out is None else len(self._held_out)
        spread = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
        facts = {
            "data": self.name or type(self).__name__,
            "training samples": f"{len(self._train) - held}",
            "clients": f"{self.num_clients} of {spread} samples",
            "partition": "given" if self._given is not None else repr(self.partition),
            "partition hash": self.partition_hash,
            "batch size": "the whole client" if self.batch_size is None else str(self.batch_size),
        }
        if held:
            facts["held out for validation"] = f"{held} training samples"
        if self.biases:
            facts["biases"] = ", ".join(map(repr, self.biases))
        return facts

    # ---- batches of a client

    def batches_per_epoch(self, client: int) -> int:
        sizes = self.client_sizes()
        return 1 if self.batch_size is None else -(-int(sizes[client]) // self.batch_size)

    def order(self, client: int, round: int, epoch: int) -> Indices:
        """Positions into ``client_indices(client)`` in the order of that epoch of that round."""
        return self._order(client, round, epoch, len(self.client_indices(client)))

    def _order(self, client: int, round: int, epoch: int, samples: int) -> Indices:
        return generator(self.run_seed, "order", round, client, epoch).permutation(samples)

    def client_batches(self, client: int, round: int, steps: int, device: torch.device = CPU) -> Iterator[Batch]:
        """Exactly ``steps`` batches of one client; every epoch is reshuffled, the first too."""
        data, indices, device = self._train, self.client_indices(client), torch.device(device)
        size = self.batch_size or len(indices)
        per_epoch = -(-len(indices) // size)
        for epoch in range(-(-steps // per_epoch)):
            now = min(per_epoch, steps - epoch * per_epoch)
            order = indices[self._order(client, round, epoch, len(indices))][: now * size]
            augment: Change | None = None
            if self.augmentation is not None:
                rng = generator(self.run_seed, "augment", round, client, epoch)
                augment = self._augment(self.augmentation, rng, len(indices))
            yield from data.batches(order, size, device, self._bias(client), augment)

    def full_batches(self, client: int, device: torch.device = CPU) -> Iterator[tuple[Batch, int]]:
        """A client's samples once, in order, without augmentation, each batch with its number of samples."""
        data, indices = self._train, self.client_indices(client)
        size = self.batch_size or len(indices)
        for i, batch in enumerate(data.batches(indices, size, torch.device(device), self._bias(client))):
            yield batch, min(size, len(indices) - i * size)

    def _bias(self, client: int) -> Change | None:
        if not self.biases:
            return None

        def apply(x: Tensor, y: Tensor, part: slice) -> Tensor:
            for bias in self.biases:
                x = bias(x, y, client, self.run_seed)
            return x

        return apply

    @staticmethod
    def _augment(augmentation: CropFlip, rng: np.random.Generator, samples: int) -> Change:
        draws = augmentation.draw(rng, samples)  # for the whole epoch, so that chunks do not matter
        return lambda x, y, part: augmentation.apply(x, draws[part])

    # ---- loaders for Lightning

    def train_dataloader(self) -> RoundToken:
        return RoundToken()

    def val_dataloader(self) -> Any:
        data = self._train
        if self._held_out is not None:
            return evaluation_loader(self.trainer, data, self._held_out)
        return evaluation_loader(self.trainer, self.val_set or self.test_set)

    def test_dataloader(self) -> Any:
        self._ready()
        return evaluation_loader(self.trainer, self.test_set)

    def predict_dataloader(self) -> Any:
        self._ready()
        return evaluation_loader(self.trainer, self.test_set)
