"""What of a training DataLoader is honoured within clients, and what is refused by name."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fl_lightning import InMemoryDataModule
from fl_lightning.datamodules import IID, Dirichlet, FromDataModule, FromDatasets
from fl_lightning.errors import UserError
from tests.helpers.learners import Lit, federated, trainer


class Numbers(Dataset):
    targets = [i % 3 for i in range(12)]

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.tensor(i)


class Plain(pl.LightningDataModule):
    def __init__(self, dataset=None, **options):
        super().__init__()
        self.loader = DataLoader(dataset or Numbers(), **options)

    def train_dataloader(self):
        return self.loader


class Named(Sampler):
    def __init__(self, number=12):
        self.number = number

    def __len__(self):
        return self.number

    def __iter__(self):
        return iter(range(self.number))


class Pairs(BatchSampler):
    def __iter__(self):
        yield [0, 1]


class Stream(IterableDataset):
    def __len__(self):
        return 12

    def __iter__(self):
        return iter(range(12))


def federate(num_clients=2, partition=None, **loader):
    return FromDataModule(
        Plain(**loader), partition=partition or IID(), num_clients=num_clients, seed=1
    )


def seen(data, client=0, round=0, steps=None):
    steps = data.batches_per_epoch(client) if steps is None else steps
    return [batch.tolist() for batch in data.client_batches(client, round, steps)]


def test_a_weighted_sampler_draws_within_each_client():
    weights = [0.0, *[1.0] * 10, 10.0]
    data = federate(batch_size=4, sampler=WeightedRandomSampler(weights, 12))
    drawn = Counter()
    for client in (0, 1):
        mine = set(data.client_indices(client).tolist())
        for round in range(200):
            epoch = [*chain(*seen(data, client, round))]
            assert len(epoch) == 6 and set(epoch) <= mine
            drawn.update(epoch)
    holder = next(i for i in (0, 1) if 11 in data.client_indices(i))
    others = [w for i, w in enumerate(weights) if i in data.client_indices(holder) and i != 11]
    assert drawn[0] == 0 and drawn[11] / 1200 == pytest.approx(10 / (10 + sum(others)), abs=0.05)
    again = federate(batch_size=4, sampler=WeightedRandomSampler(weights, 12))
    assert seen(again, 1, 7, 5) == seen(data, 1, 7, 5) != seen(data, 1, 8, 5)
    assert sorted(chain(*(b.tolist() for b, _ in data.full_batches(holder)))) == sorted(
        data.client_indices(holder)
    )


def test_drawing_with_replacement_is_honoured():
    data = federate(batch_size=6, sampler=RandomSampler(range(12), replacement=True))
    assert any(len(set(seen(data, 0, r)[0])) < 6 for r in range(10))


@pytest.mark.parametrize("sampler", [SubsetRandomSampler([3, 5, 7, 9]), [3, 5, 7, 9]])
def test_a_subset_sampler_leaves_the_rest_out(sampler):
    data = federate(sampler=sampler, batch_size=2)
    assert sorted(chain(*seen(data, 0), *seen(data, 1))) == [3, 5, 7, 9]
    assert data.num_classes == 3
    labelled = FromDataModule(
        Plain(sampler=sampler), targets=[i // 3 for i in range(12)], num_clients=2
    )
    labelled.setup()
    assert labelled.train_set.labels.tolist() == [1, 1, 2, 3]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 4, "sampler": DistributedSampler(Numbers(), 2, 0)},
        {"batch_sampler": BatchSampler(SequentialSampler(range(12)), 4, False)},
    ],
)
def test_what_only_orders_samples_changes_nothing(options):
    data = federate(**options)
    epochs = [data.client_indices(0)[data.order(0, 3, epoch)].tolist() for epoch in range(3)]
    assert seen(data, 0, 3, 5) == [part for epoch in epochs for part in (epoch[:4], epoch[4:])][:5]


def test_a_batch_sampler_says_size_and_drop_last():
    data = federate(batch_sampler=BatchSampler(SequentialSampler(range(12)), 4, True))
    assert (data.batches_per_epoch(0), data.batch_size, data.drop_last) == (1, 4, True)


def test_a_dataset_that_takes_lists_of_positions():
    class Lists(Numbers):
        def __getitem__(self, positions):
            assert isinstance(positions, list)
            return torch.tensor(positions)

    sampler = BatchSampler(RandomSampler(range(12)), 4, False)
    data = FromDataModule(
        Plain(Lists(), batch_size=None, sampler=sampler), partition=IID(), num_clients=2, seed=1
    )
    assert seen(data, 1, 2, 5) == seen(federate(batch_size=4), 1, 2, 5)


def test_a_dataset_that_makes_its_batches_itself():
    class Batches(Numbers):
        def __getitem__(self, i):
            return {"x": np.full(10 + i, i)}

    data = FromDataModule(
        Plain(Batches(), batch_size=None), partition=IID(), num_clients=2, val_fraction=0.5, seed=1
    )
    batches = list(data.client_batches(0, 0, 3))
    assert data.batches_per_epoch(0) == 3 and data.smallest_batch() is None
    assert all(len(b["x"]) == 10 + b["x"][0] for b in batches)  # tensors, of a batch each
    assert sorted(int(b["x"][0]) for b in batches) == sorted(data.client_indices(0))
    assert [n for _, n in data.full_batches(0)] == [1, 1, 1] and len(data.val_dataloader()) == 6
    assert len([*data.val_dataloader()]) == 6


def test_batches_of_items_can_still_be_asked_for():
    data = FromDataModule(
        Plain(batch_size=None), num_clients=2, batch_size=4, collate=torch.stack, seed=1
    )
    assert seen(data, 0, 0, 2) == seen(federate(batch_size=4), 0, 0, 2)


def test_a_collate_of_ones_own():
    data = FromDataModule(
        Plain(batch_size=3), num_clients=2, collate=lambda samples: ("mine", len(samples))
    )
    assert list(data.client_batches(0, 0, 2)) == [("mine", 3)] * 2


def test_no_val_dataloader_is_no_validation_and_said_in_one_line():
    class Training(pl.LightningDataModule):
        def train_dataloader(self):
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(12, 20, generator=generator, dtype=torch.float64)
            return DataLoader(list(zip(x, torch.arange(12) % 4, strict=True)), batch_size=4)

    module, fit = federated(Lit(), participation="all", engine="sequential"), trainer(2)
    fit.fit(module, FromDataModule(Training(), num_clients=2))
    assert [n for n in module.notes if "val" in n] == [
        "no validation: Training has no val_dataloader"
    ]
    assert "val/acc" not in fit.callback_metrics and "train/loss" in fit.callback_metrics
    module = federated(Lit(), participation="all", engine="sequential")
    trainer(1).fit(module, FromDatasets(Training().train_dataloader().dataset, num_clients=2))
    assert any("FromDatasets has neither validation nor test data" in note for note in module.notes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: FromDataModule("my_data.Plain"),
            "datamodule is 'my_data.Plain': give a LightningDataModule",
        ),
        (lambda: FromDataModule(Plain), "not its class"),
        (lambda: federate(sampler=Named()), "sampler Named"),
        (lambda: federate(batch_sampler=Pairs(Named(), 2, False)), "batch sampler Pairs"),
        (
            lambda: federate(batch_size=None, sampler=Pairs(Named(), 2, False)),
            "batch sampler Pairs",
        ),
        (
            lambda: federate(sampler=RandomSampler(range(12), num_samples=5)),
            "RandomSampler.*5 samples.*12",
        ),
        (
            lambda: federate(sampler=WeightedRandomSampler([1.0] * 12, 12, False)),
            "replacement=False",
        ),
        (lambda: federate(sampler=WeightedRandomSampler([1.0] * 8, 12)), "8 weights.*12"),
        (lambda: federate(sampler=WeightedRandomSampler([1.0] * 12, 50)), "50 samples"),
        (
            lambda: federate(12, sampler=WeightedRandomSampler([0.0, *[1.0] * 11], 12)),
            r"Client \d+ has no sample",
        ),
        (
            lambda: FromDataModule(Plain(Stream()), num_clients=2),
            "dataset of Plain is a Stream, an IterableDataset.*map-style",
        ),
        (lambda: FromDatasets(Stream(), num_clients=2), "train is a Stream.*clients=.*list"),
        (lambda: FromDatasets(Numbers(), val=Stream(), num_clients=2), "val is a Stream"),
        (lambda: FromDatasets(clients=[Numbers(), Stream()]), "client 1 is a Stream"),
        (
            lambda: federate(partition=Dirichlet(1.0), sampler=SubsetRandomSampler([0])),
            "num_clients is 2",
        ),
    ],
)
def test_refusals(make, words):
    with pytest.raises(UserError, match=words) as caught:
        make().setup()
    assert len(str(caught.value)) <= 600


def test_outside_of_a_step_the_loader_has_the_samples_of_all_clients() -> None:
    seen = {}

    class Counts(Lit):
        def on_fit_start(self):
            loader = self.trainer.datamodule.train_dataloader()
            seen.update(samples=len(loader.dataset), batch_size=loader.batch_size)
            seen["first"] = [int(loader.dataset[k][1]) for k in range(len(loader.dataset))]

    data = InMemoryDataModule(
        (torch.randn(30, 20).double(), torch.arange(30) % 4),
        clients=[range(10, 16), range(4)],
        batch_size=3,
    )
    trainer(1).fit(federated(Counts(), participation=1.0), data)
    assert (seen["samples"], seen["batch_size"]) == (10, 3)
    assert seen["first"] == [k % 4 for k in (*range(10, 16), *range(4))]
    with pytest.raises(IndexError):
        data.train_dataloader().dataset[10]


class Doubled(DataLoader):
    def __iter__(self):
        return (2 * batch for batch in super().__iter__())


def test_a_loader_that_makes_its_own_batches_is_refused():
    """The clients' batches were those of a plain DataLoader."""
    data = Plain()
    data.loader = Doubled(Numbers(), batch_size=4)
    with pytest.raises(UserError, match=r"a Doubled, whose own __iter__ .* collate_fn"):
        FromDataModule(data, num_clients=2).setup("fit")


def test_a_position_that_the_dataset_lacks_is_refused():
    with pytest.raises(UserError, match="position 12, and its dataset has 12 samples"):
        federate(sampler=[0, 1, 12]).setup("fit")
