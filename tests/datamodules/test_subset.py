"""``samples=``: a part of the training data, of each class alike, before anything else is done with
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning.datamodules import IID, Dirichlet, InMemoryDataModule, SortedShards
from fl_lightning.errors import UserError
from fl_lightning.sampling import generator

LABELS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 3]).repeat(20)  # 80, 80, 20 and 20 samples


def module(samples: int | None, **arguments: Any) -> InMemoryDataModule:
    made = InMemoryDataModule(
        (torch.arange(200.0).view(200, 1), LABELS), samples=samples, **{"seed": 3, **arguments}
    )
    made.setup()
    return made


def all_of(data: InMemoryDataModule) -> list[int]:
    return sorted(int(i) for client in range(data.num_clients) for i in data.client_indices(client))


@pytest.mark.parametrize("partition", [IID(), Dirichlet(0.3), SortedShards()])
def test_every_partition_splits_the_same_samples_of_each_class_alike(partition: Any) -> None:
    data = module(50, partition=partition, num_clients=5)
    chosen = all_of(data)
    assert len(chosen) == len(set(chosen)) == 50
    assert np.bincount(LABELS[chosen]).tolist() == (np.bincount(LABELS) // 4).tolist()
    assert chosen == all_of(module(50, partition=IID(), num_clients=5))
    assert chosen != all_of(module(50, partition=IID(), num_clients=5, seed=4))
    shuffled = generator(3, "samples").permutation(200)  # the first of each class in this order
    by_class = [
        shuffled[LABELS[shuffled].numpy() == label][: count // 4]
        for label, count in enumerate([80, 80, 20, 20])
    ]
    assert chosen == sorted(np.concatenate(by_class).tolist())


def test_what_is_held_out_is_a_share_of_the_samples_that_are_used() -> None:
    data = module(100, val_fraction=0.2, partition=IID(), num_clients=4)
    held = data._who.held_out
    assert held is not None
    trained = set(all_of(data))
    assert len(held) == 20 and len(trained) == 80 and not trained & set(held.tolist())
    assert trained | set(held.tolist()) == set(all_of(module(100, partition=IID(), num_clients=4)))


def test_given_clients_keep_those_of_theirs_that_were_drawn() -> None:
    clients: Sequence[Any] = [list(range(150)), [7, 7, *range(150, 200)]]
    data = module(100, clients=clients)
    drawn = set(all_of(module(100, partition=IID(), num_clients=2)))
    for client, own in enumerate(clients):
        assert data.client_indices(client).tolist() == [i for i in own if i in drawn]


@pytest.mark.parametrize(
    "samples, words",
    [(201, "there are 200 training samples"), (0, "an integer from 1"), (1.5, "an integer from 1")],
)
def test_more_than_there_are_or_no_number_is_refused(samples: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        module(samples, partition=IID(), num_clients=2)
    assert len(all_of(module(200, partition=IID(), num_clients=2))) == 200


@pytest.mark.parametrize(
    "given",
    [
        {"partition": IID(), "num_clients": 2, "val_fraction": 0.25},
        {"partition": IID(), "num_clients": 4, "client_test_fraction": 0.25},
        {"partition": Dirichlet(1.0, samples_per_client=10), "num_clients": 4},
        {"clients": [range(20), range(20, 30)]},
    ],
)
def test_the_card_counts_what_is_trained_on(given: dict[str, Any]) -> None:
    data = module(100, **given)
    data.setup()
    assert data.card()["training samples"] == str(data.client_sizes().sum())
