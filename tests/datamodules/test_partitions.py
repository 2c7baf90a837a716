"""Partitions: sizes, disjointness, determinism, laziness, statistics, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.datamodules import (
    IID,
    ByGroup,
    Digits,
    Dirichlet,
    InMemoryDataModule,
    Partition,
    Pathological,
    QuantitySkew,
    Saved,
    SortedShards,
)
from fl_lightning.errors import UserError


@st.composite
def problems(draw):
    n = draw(st.integers(1, 200))
    labels = np.random.default_rng(draw(st.integers(0, 99))).integers(
        0, draw(st.integers(1, 12)), n
    )
    return labels, draw(st.integers(1, n)), draw(st.integers(0, 2**31))


DEALING = st.sampled_from(
    [
        IID(),
        SortedShards(),
        QuantitySkew(0.0),
        QuantitySkew(3.0),
        Dirichlet(1e-4),
        Dirichlet(0.1),
        Dirichlet(100.0, prior="frequencies"),
        Pathological(1),
    ]
)


@pytest.mark.parametrize("partition", ["dirichlet", Dirichlet, 0.3])
def test_what_is_no_partition_is_refused_before_data_are_read(partition) -> None:
    with pytest.raises(UserError, match=r"partition=.*is not a partition: give an object"):
        Digits(partition=partition)


@settings(max_examples=150, deadline=None)
@given(problems(), DEALING)
def test_dealt_samples_are_disjoint_and_nobody_is_left_empty(problem, partition):
    labels, m, seed = problem
    clients = list(partition.split(labels, m, seed))
    sizes = np.array([len(c) for c in clients])
    everything = np.concatenate(clients)
    assert len(clients) == m and sizes.min() >= 1
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0 and everything.max() < len(labels)
    if isinstance(partition, Dirichlet | Pathological):
        assert (sizes == len(labels) // m).all()
    else:
        assert len(everything) == len(labels)
    if isinstance(partition, IID | SortedShards) or partition == QuantitySkew(0.0):
        assert sizes.max() - sizes.min() <= 1
    again = partition.split(labels, m, seed)
    assert all(np.array_equal(a, b) for a, b in zip(clients, again, strict=True))


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(1, 30), st.sampled_from([Dirichlet, Pathological]))
def test_with_replacement_sizes_are_free_and_any_client_can_be_asked_first(problem, size, kind):
    labels, m, seed = problem
    partition = kind(1, replacement=True, samples_per_client=size)
    clients = partition.split(labels, m + 500, seed)
    last, first = clients[m + 499], clients[0]
    assert np.array_equal(partition.split(labels, m + 500, seed)[0], first)
    assert np.array_equal(clients[m + 499], last) and len(first) == len(last) == size
    if kind is Pathological:
        assert len(np.unique(labels[first])) == 1


def test_another_seed_gives_another_split_but_sorted_shards_has_none():
    labels = np.arange(1000) % 10
    for partition in (IID(), QuantitySkew(1.0), Dirichlet(0.5), Pathological(3)):
        one, other = (np.concatenate(list(partition.split(labels, 10, seed))) for seed in (0, 1))
        assert not np.array_equal(one, other)
    shards = SortedShards().split(np.array([2, 0, 1, 0, 2, 1]), 3, 0)
    assert [s.tolist() for s in shards] == [[1, 3], [2, 5], [0, 4]]


def test_a_million_clients_are_drawn_only_when_asked_for(monkeypatch):
    drawn = []
    partition = Dirichlet(0.1, replacement=True, samples_per_client=50)
    proportions = partition._proportions
    monkeypatch.setattr(partition, "_proportions", lambda *a: drawn.append(1) or proportions(*a))
    x, y = np.zeros((1000, 2), np.float32), np.arange(1000) % 10
    data = InMemoryDataModule((x, y), partition=partition, num_clients=10**6, seed=0)
    assert data.num_clients == 10**6 and data.client_sizes().sum() == 50 * 10**6
    assert len(data.partition_hash) == 16 and data.batches_per_epoch(999_999) == 1
    assert len(data.client_indices(999_999)) == 50
    assert len(drawn) <= 2


def totals_deviation(replacement: bool, seed: int) -> float:
    labels = np.repeat(np.arange(10), 5000)
    clients = Dirichlet(0.1, replacement=replacement).split(labels, 100, seed)
    return float(np.bincount(labels[np.concatenate(list(clients))], minlength=10).std())


def test_dirichlet_class_totals_spread_as_published():
    """1036 on average over seeds with deviation 251: three standard errors of 50 seeds are 107."""
    assert abs(np.mean([totals_deviation(True, seed) for seed in range(50)]) - 1036) < 107
    assert totals_deviation(False, 0) == 0


def test_saved_partition_comes_back_whatever_the_seed(tmp_path):
    x, y = np.zeros((100, 2), np.float32), np.arange(100) % 10
    first = InMemoryDataModule((x, y), partition=Dirichlet(0.1), num_clients=10, seed=0)
    first.save_partition(tmp_path / "p.npz")
    again = InMemoryDataModule((x, y), partition=Saved(tmp_path / "p.npz"), seed=1)
    assert again.num_clients == 10 and again.partition_hash == first.partition_hash
    assert all(np.array_equal(first.client_indices(i), again.client_indices(i)) for i in range(10))
    other = InMemoryDataModule((x, y[::-1].copy()), partition=Saved(tmp_path / "p.npz"))
    with pytest.raises(UserError, match="made for other data"):
        other.setup()
    (tmp_path / "p.npz").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"p\.npz.*damaged"):
        Saved(tmp_path / "p.npz")
    with pytest.raises(UserError, match="no such file"):
        Saved(tmp_path / "q.npz")


def test_a_partition_of_ones_own():
    class EverySoMany(Partition):
        needs_labels = False

        def __init__(self, first: int = 0) -> None:
            self.first = first

        def split(self, labels, num_clients, seed):
            return [np.arange(i + self.first, len(labels), num_clients) for i in range(num_clients)]

    data = InMemoryDataModule(
        (np.zeros((7, 1)), np.zeros(7)), partition=EverySoMany(1), num_clients=2
    )
    assert (
        data.client_indices(0).tolist() == [1, 3, 5]
        and data.card()["partition"] == "EverySoMany(first=1)"
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda y: Dirichlet(0.1).split(y, 11, 0),
            ["num_clients is 11", "at most 10", "samples_per_client"],
        ),
        (
            lambda y: Dirichlet(0.1, samples_per_client=6).split(y, 2, 0),
            ["samples_per_client is 6", "at most 5", "replacement=True"],
        ),
        (lambda y: Pathological(4).split(y, 2, 0), ["classes is 4", "from 1 to 3"]),
        (
            lambda y: Dirichlet(0.1, prior="unifrom"),
            ["prior='unifrom'", "'frequencies'", "Did you mean"],
        ),
        (lambda y: ByGroup([0, 1] * 5).split(y, 3, 0), ["num_clients is 3", "2 groups", "give 2"]),
        (lambda y: ByGroup([0, 1]).split(y, 2, 0), ["(2,)", "10 training samples"]),
        (lambda y: ByGroup().split(y, 2, 0), ["groups=None"]),
    ],
)
def test_refusals_name_option_value_and_what_is_accepted(make, words):
    with pytest.raises(UserError) as caught:
        make(np.arange(10) % 3)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert len(message) <= 600 and "\n" not in message


def test_class_totals_and_their_deviation_are_those_of_all_clients() -> None:
    for replacement in (False, True):
        data = Digits(partition=Dirichlet(0.1, replacement=replacement), num_clients=30, seed=0)
        data.setup()
        assert data.train_set is not None and data.train_set.labels is not None
        held = np.concatenate([data.client_indices(i) for i in range(30)])
        totals = np.bincount(data.train_set.labels[held], minlength=10)
        *_, more, every, spread, _, _ = data.partition_table().splitlines()
        assert more.startswith("… and 10 more") and every.split() == [
            "all",
            str(totals.sum()),
            *map(str, totals),
        ]
        deviation = np.sqrt(((totals - totals.mean()) ** 2).sum() / 9)
        assert spread == (
            f"samples of a class: {totals.min()} to {totals.max()}, standard deviation "
            f"{deviation:.1f} "
            f"({100 * deviation / totals.mean():.0f} %)"
        )
        bars = [bar.get_height() for bar in data.plot_partition().axes[-1].patches]
        assert bars == totals.tolist()
