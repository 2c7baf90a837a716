"""Datasets and data modules that know nothing about clients, federated by a partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
import pytorch_lightning as pl
from torch.utils.data import ConcatDataset, Dataset

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.partitions import Partition
from fl_lightning.datamodules.samples import DatasetSamples
from fl_lightning.errors import UserError


class FromDatasets(FederatedDataModule):
    """Federated data from map-style Datasets of any kind; samples are read and collated one by one.

    Args:
        train: the training data, to be split by ``partition`` over ``num_clients``.
        val, test: evaluated whole; without ``val`` the test set is validated on.
        targets: labels of the training data ``(N,)``, for partitions that go by classes; None: the dataset's
            attribute ``targets`` or ``labels``.
        clients: instead of ``train``: one Dataset a client, where the split exists already.
        collate: turns a list of samples into a batch; None: torch's ``default_collate``.
    """

    def __init__(
        self,
        train: Dataset[Any] | None = None,
        val: Dataset[Any] | None = None,
        test: Dataset[Any] | None = None,
        targets: Sequence[int] | None = None,
        partition: Partition | None = None,
        num_clients: int | None = None,
        clients: Sequence[Dataset[Any]] | None = None,
        batch_size: int | None = 50,
        val_fraction: float = 0.0,
        collate: Callable[[list[Any]], Any] | None = None,
        seed: int | None = None,
    ) -> None:
        if (train is None) == (clients is None):
            raise UserError(
                "FromDatasets needs train, or clients (a list of one Dataset a client): give one of the two."
            )
        indices = None
        if clients is not None:
            if val_fraction:
                raise UserError(f"val_fraction is {val_fraction}, but clients are given: give a val Dataset instead.")
            ends = np.cumsum([len(cast(Any, one)) for one in clients])
            indices = np.split(np.arange(ends[-1] if len(ends) else 0), ends[:-1])
            train = ConcatDataset(clients) if len(ends) and ends[-1] else train
        super().__init__(
            num_clients=num_clients,
            partition=partition,
            batch_size=batch_size,
            val_fraction=val_fraction,
            clients=indices,
            seed=seed,
        )
        for name, dataset in (("train", train), ("val", val), ("test", test)):
            if dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
                raise UserError(
                    f"FromDatasets' {name} is a {type(dataset).__name__}, which cannot be split: give a "
                    "map-style Dataset (with __len__ and __getitem__)."
                )
        self._datasets, self._targets, self._collate = (train, val, test), targets, collate

    def load(self) -> None:
        train, val, test = self._datasets
        if train is None or len(cast(Any, train)) == 0:
            raise UserError("FromDatasets' training data have no samples: give at least one.")
        self.train_set = DatasetSamples(train, self._targets, self._collate)
        self.val_set = None if val is None else DatasetSamples(val, collate=self._collate)
        self.test_set = None if test is None else DatasetSamples(test, collate=self._collate)


class FromDataModule(FederatedDataModule):
    """Any LightningDataModule: the dataset behind its training loader is split, its other loaders stay as they are.

    ``batch_size="loader"``: that of its training loader. The loader's collate function is used, its order and
    ``drop_last`` are not. The other arguments are those of ``FromDatasets``.
    """

    def __init__(
        self,
        datamodule: pl.LightningDataModule | Any,
        targets: Sequence[int] | None = None,
        partition: Partition | None = None,
        num_clients: int | None = None,
        batch_size: int | Literal["loader"] | None = "loader",
        val_fraction: float = 0.0,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            num_clients=num_clients,
            partition=partition,
            batch_size=None if batch_size == "loader" else batch_size,
            val_fraction=val_fraction,
            seed=seed,
        )
        self.datamodule, self._targets, self._loader_size = datamodule, targets, batch_size == "loader"

    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        self.datamodule.trainer = self.trainer
        if stage not in (None, "fit"):
            self.datamodule.setup(stage)
        super().setup(stage)

    def load(self) -> None:
        self.datamodule.setup("fit")
        loader = self.datamodule.train_dataloader()
        dataset: Any = getattr(loader, "dataset", None)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UserError(
                f"The training loader of {type(self.datamodule).__name__} is a {type(loader).__name__} "
                "without a map-style dataset, which cannot be split: give a data module whose "
                "train_dataloader is one DataLoader, or the clients' Datasets to FromDatasets(clients=[…])."
            )
        self.train_set = DatasetSamples(dataset, self._targets, loader.collate_fn)
        if self._loader_size:
            if loader.batch_size is None:
                raise UserError(
                    "batch_size is 'loader', but the training loader has none of its own: give a number, "
                    "or null for the whole client in one batch."
                )
            self.batch_size = loader.batch_size

    def val_dataloader(self) -> Any:
        self._ready()
        if self._held_out is not None:
            return super().val_dataloader()
        return self.datamodule.val_dataloader()

    def test_dataloader(self) -> Any:
        return self.datamodule.test_dataloader()

    def predict_dataloader(self) -> Any:
        return self.datamodule.predict_dataloader()
