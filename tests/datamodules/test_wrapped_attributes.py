"""What a learner reads of a wrapped data module is what it reads without a federation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedModule, UserError
from fl_lightning.datamodules import Dirichlet, FromDataModule

QUIET: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "accelerator": "cpu",
}
X = torch.linspace(-1, 1, 80).reshape(40, 2)
NAMES = [
    "num_classes",
    "class_names",
    "mean",
    "std",
    "seed",
    "batch_size",
    "drop_last",
    "train_set",
    "val_set",
    "test_set",
]


class Mine(pl.LightningDataModule):
    """Has attributes of the names that this package's data modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.num_classes = 5
        self.class_names = list("abcde")
        self.mean = (0.5,)
        self.std = (0.2,)
        self.batch_size = 16
        self.drop_last = True
        self.seed = 7
        self.val_fraction = 0.5

    def setup(self, stage: str) -> None:
        self.train_set = self.val_set = TensorDataset(X, torch.arange(40) % 2)
        self.test_set = None

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_set, batch_size=10)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_set, batch_size=20)


class Reads(pl.LightningModule):
    """Builds its network from the data module, as many projects do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            self.seen |= {name: getattr(data, name, "nothing") for name in NAMES}
            self.net = torch.nn.Linear(2, data.num_classes)

    def training_step(self, batch: Any, i: int) -> Any:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, i: int) -> None:
        self.log("val/loss", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_learner_reads_the_attributes_of_the_wrapped_data_module() -> None:
    plain, federated, mine = Reads(), Reads(), Mine()
    pl.Trainer(**QUIET).fit(plain, mine)
    module = FederatedModule(federated, seed=0, participation="all", local_epochs=1)
    pl.Trainer(**QUIET).fit(module, FromDataModule(mine, num_clients=2))
    for name in set(NAMES) - {"train_set", "val_set"}:
        assert federated.seen[name] == plain.seen[name], name
    assert federated.seen["train_set"] is mine.train_set
    assert federated.seen["val_set"] is mine.val_set
    (told,) = (note for note in module.notes if "self.trainer.datamodule gets" in note)
    assert "num_classes 5 (clients: 2)" in told and "batch_size 16 (clients: 10)" in told
    (hidden,) = (note for note in module.notes if "attributes of its own" in note)
    assert "val_fraction" in hidden and "num_classes" not in hidden and "trainer;" not in hidden


def test_the_clients_follow_the_loader_and_the_arguments() -> None:
    data = FromDataModule(Mine(), num_clients=2, seed=3, partition=Dirichlet(1.0))
    data.setup()
    other = FromDataModule(Mine(), num_clients=2, seed=4, partition=Dirichlet(1.0))
    other.setup()
    assert data.run_seed == 3 and data.partition_hash != other.partition_hash
    counts = data.client_label_counts(0)
    assert counts is not None and len(counts) == 2
    (x, _) = next(data.client_batches(0, 0, 1))
    assert len(x) == min(10, data.client_sizes()[0])
    assert not data.validates_on_test and "0   1" in data.partition_table().splitlines()[0]
    for again in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert again.run_seed == 3 and again.seed == 7


@pytest.mark.filterwarnings("error")
def test_a_data_module_without_such_attributes_is_not_told_of_any() -> None:
    class Bare(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(X, torch.arange(40) % 2), batch_size=10)

    data = FromDataModule(Bare(), num_clients=2)
    data.setup()
    assert (data.num_classes, data.batch_size, data.seed) == (2, 10, None)


def test_fewer_classes_than_labels_are_the_learner_s() -> None:
    """One output for two classes."""
    mine = Mine()
    mine.num_classes = 1
    data = FromDataModule(mine, num_clients=2)
    assert data.num_classes == 1
    counts = [data.client_label_counts(i) for i in range(2)]
    assert [len(count) for count in counts if count is not None] == [2, 2]


def test_a_loader_that_is_made_anew_in_later_rounds_is_refused() -> None:
    module = FederatedModule(Reads(), seed=0, participation="all", local_epochs=1)
    trainer = pl.Trainer(**QUIET, reload_dataloaders_every_n_epochs=2)
    with pytest.raises(
        UserError, match=r"reload_dataloaders_every_n_epochs=2.* loader of Mine once"
    ):
        trainer.fit(module, FromDataModule(Mine(), num_clients=2))
