"""Datasets and data modules that know nothing of clients."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
)

from fl_lightning.datamodules import IID, ByGroup, Dirichlet, FromDataModule, FromDatasets
from fl_lightning.errors import UserError


class Words(Dataset):
    """Samples that are no tensors, of which a dict of a batch is made."""

    def __init__(self, n=12, first=0):
        self.n, self.first = n, first
        self.targets = [i % 3 for i in range(n)]

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"number": self.first + i, "label": self.targets[i]}


def numbers(data, client, steps=1):
    return [n for batch in data.client_batches(client, 0, steps) for n in batch["number"].tolist()]


def test_a_dataset_is_split_collated_and_evaluated():
    data = FromDatasets(
        Words(), test=Words(5, 100), partition=Dirichlet(100.0), num_clients=3, batch_size=3
    )
    everything = chain(*(numbers(data, i, 2) for i in range(3)))
    assert sorted(everything) == list(range(12)) and data.num_classes == 3
    batches = list(data.full_batches(0))
    assert [n for _, n in batches] == [3, 1]
    assert [*chain(*(b["number"].tolist() for b, _ in batches))] == data.client_indices(0).tolist()
    assert [b["number"].tolist() for b in data.val_dataloader()] == [[100, 101, 102, 103, 104]]


def test_clients_that_exist_already():
    data = FromDatasets(clients=[Words(2), Words(3, 10)], batch_size=None)
    assert data.num_clients == 2 and data.client_sizes().tolist() == [2, 3]
    assert sorted(numbers(data, 1)) == [10, 11, 12]
    assert "given" in data.card().values() and data.val_dataloader() == []


def test_labels_are_found_or_asked_for():
    class Mute(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            return torch.tensor(i), i % 2

    half = Subset(ConcatDataset([Words(3), Words(3)]), [5, 0, 1])
    data = FromDatasets(half, num_clients=1)
    data.setup()
    assert data.train_set.labels.tolist() == [2, 0, 1]
    tensors = FromDatasets(
        TensorDataset(torch.zeros(4, 1), torch.tensor([0, 1, 2, 1])), num_clients=2
    )
    assert tensors.num_classes == 3
    assert FromDatasets(Mute(), num_clients=2).num_classes is None
    with pytest.raises(UserError, match=r"Dirichlet.*give targets"):
        FromDatasets(Mute(), num_clients=2, partition=Dirichlet(1.0)).setup()
    assert (
        FromDatasets(
            Mute(), num_clients=2, partition=Dirichlet(1.0), targets=[0, 1] * 3
        ).num_classes
        == 2
    )
    groups = FromDatasets(Mute(), partition=ByGroup([1, 1, 2, 2, 2, 3]))
    assert groups.num_clients == 3 and "all samples" in groups.plot_partition().axes[0].get_xlabel()


class Plain(pl.LightningDataModule):
    def __init__(self, loader):
        super().__init__()
        self.loader, self.ready = loader, []

    def prepare_data(self):
        self.ready.append("prepare")

    def setup(self, stage):
        self.ready.append(stage)

    def train_dataloader(self):
        return self.loader

    def val_dataloader(self):
        return "its own validation"


def test_a_data_module_is_federated():
    def doubled(samples):
        return {"number": torch.tensor([2 * s["number"] for s in samples])}

    inner = Plain(
        DataLoader(Words(), batch_size=5, shuffle=True, drop_last=True, collate_fn=doubled)
    )
    data = FromDataModule(inner, partition=IID(), num_clients=2, drop_last=False)
    assert sorted(numbers(data, 0, 2) + numbers(data, 1, 2)) == list(range(0, 24, 2))
    assert data.batch_size == 5 and inner.ready == ["prepare", "fit"]
    assert data.val_dataloader() == "its own validation"
    held = FromDataModule(inner, num_clients=2, val_fraction=0.5, batch_size=None)
    assert len(numbers(held, 0)) == 3 and sum(len(b["number"]) for b in held.val_dataloader()) == 6


def test_refusals():
    for make, word in (
        (lambda: FromDatasets(), "one of the two"),
        (lambda: FromDatasets(Words(), clients=[Words()]), "one of the two"),
        (
            lambda: FromDatasets(Words(), targets=[0, 1], num_clients=2).setup(),
            r"\(2,\).*12 samples",
        ),
        (lambda: FromDatasets(clients=[Words(2), Words(0)]).setup(), "Client 1"),
        (lambda: FromDatasets(clients=[]).setup(), "no samples|clients is empty"),
        (lambda: FromDatasets(Words(), num_clients=13).setup(), "num_clients is 13"),
        (lambda: FromDataModule(Plain([1]), num_clients=2).setup(), "is a list"),
    ):
        with pytest.raises(UserError, match=word):
            make()


def test_numpy_samples_reach_the_batch():
    data = FromDatasets(TensorDataset(torch.arange(4.0)), num_clients=1, batch_size=None)
    assert sorted(next(data.client_batches(0, 0, 1))[0].tolist()) == [0, 1, 2, 3]
    assert np.array_equal(data.client_sizes(), [4])
