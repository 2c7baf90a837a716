"""drop_last, the smallest batch that clients meet, batches of evaluation, and seeds that would
collide."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fl_lightning import InMemoryDataModule
from fl_lightning.datamodules import Digits, FromDataModule, FromDatasets
from fl_lightning.errors import UserError
from fl_lightning.sampling import generator

SIZES = [9, 8, 3, 1, 12]


def numbered(made="memory", **options):
    """Samples that are their own numbers, clients of SIZES, batches of four."""
    n = sum(SIZES)
    clients = np.split(np.arange(n), np.cumsum(SIZES)[:-1])
    x, y = torch.arange(n, dtype=torch.float64).view(n, 1), torch.arange(n) % 4
    options = {"batch_size": 4, "seed": 2, **options}
    if made == "memory":
        return InMemoryDataModule((x, y), test=(x, y), clients=clients, **options)
    return FromDatasets(
        clients=[TensorDataset(x[c], y[c]) for c in clients], test=TensorDataset(x, y), **options
    )


def lengths(data, client, steps):
    return [len(x) for x, _ in data.client_batches(client, 0, steps)]


@pytest.mark.parametrize("made", ["memory", "datasets"])
def test_drop_last_leaves_the_short_batch_out_and_counts_the_others(made):
    data = numbered(made, drop_last=True)
    assert [data.batches_per_epoch(i) for i in range(5)] == [2, 2, 1, 1, 3]
    assert [lengths(data, i, 3) for i in range(5)] == [
        [4, 4, 4],
        [4, 4, 4],
        [3, 3, 3],
        [1, 1, 1],
        [4, 4, 4],
    ]
    seen = [
        chain(*(x.flatten().tolist() for x, _ in data.client_batches(0, r, 2))) for r in range(20)
    ]
    left_out = {next(iter(set(range(9)) - set(one))) for one in seen}
    assert len(left_out) > 3  # another one each time
    kept = numbered(made)
    assert torch.equal(next(data.client_batches(0, 0, 1))[0], next(kept.client_batches(0, 0, 1))[0])


@pytest.mark.parametrize("made", ["memory", "datasets"])
def test_full_batches_keep_every_sample_and_none_is_short(made):
    data = numbered(made, drop_last=True)
    for client, expected in enumerate([[4, 5], [4, 4], [3], [1], [4, 4, 4]]):
        batches = list(data.full_batches(client))
        assert [n for _, n in batches] == [len(x) for (x, _), _ in batches] == expected
        everything = torch.cat([x for (x, _), _ in batches]).flatten().tolist()
        assert everything == data.client_indices(client).tolist()


def test_the_loaders_drop_last_is_honoured():
    class Plain(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(
                TensorDataset(torch.zeros(10, 1), torch.zeros(10)), batch_size=4, drop_last=True
            )

    data = FromDataModule(Plain(), num_clients=2, seed=0)
    assert data.batches_per_epoch(0) == 1 and lengths(data, 0, 2) == [4, 4]
    assert "shorter ones dropped" in data.card()["batch size"]
    assert FromDataModule(Plain(), num_clients=2, drop_last=False).batches_per_epoch(0) == 2


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 50, None])
def test_the_smallest_batch_is_the_smallest_that_clients_meet(batch_size, drop_last):
    data = numbered(batch_size=batch_size, drop_last=drop_last)
    for steps in (None, 1, 2, np.array([1, 2, 3, 4, 2])):
        numbers = (
            [data.batches_per_epoch(i) for i in range(5)]
            if steps is None
            else np.broadcast_to(steps, 5)
        )
        met = [min(lengths(data, i, int(k))) for i, k in enumerate(numbers)]
        smallest, client = data.smallest_batch(steps)
        assert smallest == min(met) and client == met.index(smallest)


class Large(Dataset):
    """Samples of 8 MiB."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return 20

    def __getitem__(self, i):
        self.read += 1
        return torch.full((2**20,), i + torch.rand(()).item(), dtype=torch.float64), i % 2


def test_evaluation_batches_of_datasets_go_by_memory():
    data = FromDatasets(Large(), test=Large(), num_clients=2)
    before = torch.get_rng_state()
    loader = data.val_dataloader()
    assert torch.equal(before, torch.get_rng_state()) and len(loader) == 3
    assert [len(y) for _, y in loader] == [7, 7, 6]  # a label more than 8 MiB each
    assert (
        len(FromDatasets(Large(), test=Large(), num_clients=2, eval_batch_size=20).val_dataloader())
        == 1
    )
    held = FromDatasets(Large(), num_clients=2, val_fraction=0.5)
    assert [len(y) for _, y in held.val_dataloader()] == [7, 3]


def test_evaluation_batches_are_an_option_and_a_thousand_samples_by_default():
    x = torch.arange(2300.0).view(-1, 1)
    for options, expected in (({}, [1000, 1000, 300]), ({"eval_batch_size": 1500}, [1500, 800])):
        for data in (
            InMemoryDataModule((x, x), test=(x, x), clients=[[0]], **options),
            FromDatasets(TensorDataset(x), test=TensorDataset(x), num_clients=1, **options),
        ):
            assert [len(batch[0]) for batch in data.test_dataloader()] == expected
    assert [len(b[1]) for b in Digits(eval_batch_size=200).test_dataloader()] == [200, 159]


class Told:
    """A dataset whose samples are no tensors, by their pickled size."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return 1200

    def __getitem__(self, i):
        return "a" * self.size


def test_samples_that_are_no_tensors_are_measured_as_they_are_written():
    for size, first in ((1, 1000), (2**20, 63)):
        data = FromDatasets(Told(size), test=Told(size), num_clients=1, collate=list)
        assert len(next(iter(data.test_dataloader()))) == first


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 + 3, 1.0, True, "1"])
def test_seeds_that_would_collide_are_refused_by_name(seed):
    with pytest.raises(UserError, match=r"data\.seed is .*2\*\*63 - 1"):
        Digits(seed=seed)
    with pytest.raises(UserError, match="seed is"):
        generator(seed, "order")


def test_draws_of_every_accepted_seed_are_what_they_were_and_differ():
    assert generator(0, "order", 3, 7).permutation(5).tolist() == [0, 4, 1, 3, 2]
    drawn = {
        tuple(generator(s, "order").integers(2**32, size=4))
        for s in (0, 1, 2**62, 2**63 - 2, 2**63 - 1)
    }
    assert len(drawn) == 5
    assert Digits(seed=np.int64(3)).partition_hash == Digits(seed=3).partition_hash


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drop_last": "yes"}, "drop_last='yes' is not accepted; it has to be true or false"),
        (
            {"eval_batch_size": 0},
            "eval_batch_size=0 is not accepted; it has to be an integer from 1",
        ),
        ({"batch_size": 2.5}, r"batch_size=2\.5"),
        ({"batch_size": True}, "batch_size=True"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(UserError, match=words):
        Digits(**options)
