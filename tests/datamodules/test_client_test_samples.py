"""Samples that each client holds out to test its model on."""

from __future__ import annotations

import warnings
from collections import Counter
from decimal import ROUND_HALF_UP, Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning import UserError
from fl_lightning.datamodules import Dirichlet, InMemoryDataModule

CLASSES = 4


def data(clients=None, fraction=0.25, seed=0, labels=None, samples=200, **arguments):
    y = torch.arange(samples) % CLASSES if labels is None else labels
    x = torch.arange(len(y), dtype=torch.float32).view(-1, 1)
    made = InMemoryDataModule(
        (x, y), clients=clients, client_test_fraction=fraction, seed=seed, **arguments
    )
    made.setup()
    return made


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 199), min_size=1, max_size=80),
    st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.9]),
    st.integers(0, 2**63 - 1),
)
def test_each_distinct_sample_lies_on_one_side(indices, fraction, seed):
    made = data([indices], fraction, seed)
    train, test = made.client_indices(0).tolist(), made.client_test_indices(0).tolist()
    distinct = sorted(set(indices))
    assert sorted({*train, *test}) == distinct and not set(train) & set(test)
    assert train == [i for i in indices if i not in set(test)], (
        "those that are left keep their order and multiplicity"
    )
    assert test == sorted(set(test))
    half_up = int((Decimal(str(fraction)) * len(distinct)).quantize(Decimal(1), ROUND_HALF_UP))
    assert len(test) == (0 if len(distinct) == 1 else min(max(half_up, 1), len(distinct) - 1))
    assert made.client_sizes().tolist() == [len(train)]
    by_class, held = (Counter(i % CLASSES for i in side) for side in (distinct, test))
    assert all(abs(held[c] - len(test) * by_class[c] / len(distinct)) < 1 for c in by_class), (
        "of each class its share"
    )


def test_the_draw_is_a_function_of_seed_and_client():
    clients = [list(range(0, 40)), list(range(0, 40)), list(range(40, 80))]
    one, again, other = data(clients), data(clients[:2]), data(clients, seed=1)
    assert (one.client_test_indices(0) == again.client_test_indices(0)).all()
    assert (one.client_test_indices(0) != one.client_test_indices(1)).any()
    assert (one.client_test_indices(0) != other.client_test_indices(0)).any()


def test_it_is_part_of_the_hash_the_table_and_the_card():
    clients = [list(range(0, 40)), [5]]
    one, none = data(clients), data(clients, 0.0)
    assert len({one.partition_hash, none.partition_hash, data(clients, 0.5).partition_hash}) == 3
    lines = one.partition_table().splitlines()
    assert lines[0].split()[:3] == ["client", "samples", "test"]
    assert lines[1].split()[:3] == ["0", "30", "10"] and lines[2].split()[:3] == ["1", "1", "0"]
    assert one.card()["held out by each client"] == "0.25 of its samples"
    assert none.client_test_indices(0).tolist() == [] and "test" not in none.partition_table()


def test_what_a_client_trains_on_and_is_tested_on():
    made = data([list(range(40)), [7]], batch_size=8)
    seen = [
        int(v) for batch in made.client_batches(0, 0, made.batches_per_epoch(0)) for v in batch[0]
    ]
    assert sorted(seen) == made.client_indices(0).tolist()
    batches = list(made.full_batches(0, what="test"))
    assert [int(v) for batch, _ in batches for v in batch[0]] == made.client_test_indices(
        0
    ).tolist()
    assert [n for _, n in batches] == [8, 2]
    assert list(made.full_batches(1, what="test")) == []


def test_lazy_clients_and_a_validation_set_beside_it():
    arguments = {"partition": Dirichlet(0.1, replacement=True), "num_clients": 8, "samples": 400}
    made = data(None, 0.25, val_fraction=0.1, **arguments)
    held = set(made._who.held_out.tolist())
    for i in range(8):
        train, test = (
            set(made.client_indices(i).tolist()),
            set(made.client_test_indices(i).tolist()),
        )
        assert test and not train & test and not (train | test) & held
        assert made.client_sizes()[i] == len(made.client_indices(i))


def test_without_labels():
    made = data([list(range(20))], labels=torch.linspace(0, 1, 20))
    assert len(made.client_test_indices(0)) == 5


def test_what_is_no_share_is_refused():
    for fraction in (-0.1, 1.0, 1.5, float("nan")):
        with pytest.raises(UserError, match="client_test_fraction="):
            data([[0, 1]], fraction)


def test_a_saved_split_gives_the_same_sides(tmp_path):
    from fl_lightning.datamodules import Saved

    first = data(None, 0.25, partition=Dirichlet(0.3), num_clients=5)
    first.save_partition(tmp_path / "split.npz")
    second = data(None, 0.25, partition=Saved(tmp_path / "split.npz"))
    assert all(
        np.array_equal(first.client_test_indices(i), second.client_test_indices(i))
        for i in range(5)
    )
    assert all(np.array_equal(first.client_indices(i), second.client_indices(i)) for i in range(5))
    assert first.partition_hash == second.partition_hash


def test_a_warning_counts_test_samples_on_which_others_train_and_pooled_refuses_them():
    with pytest.warns(
        UserWarning, match="16 of 18 samples on which clients are tested are training"
    ):
        data([[*range(40)], [*range(40)]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data([[*range(40)], [*range(40, 80)]])
    split = Dirichlet(0.5, replacement=True, samples_per_client=40)
    test = (torch.zeros(9, 1), torch.arange(9) % CLASSES)
    with pytest.raises(UserError, match=r"pooled=True: .* training samples of other clients"):
        data(partition=split, num_clients=10, pooled=True, test=test)
