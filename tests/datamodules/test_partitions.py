"""Partitions: sizes, disjointness, determinism, laziness, statistics, refusals; parts of data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.datamodules import (
    IID,
    ByGroup,
    Contiguous,
    Digits,
    Dirichlet,
    InMemoryDataModule,
    Partition,
    Pathological,
    QuantitySkew,
    Saved,
    SortedShards,
)
from fl_lightning.datamodules.partitions.partition import check_client
from fl_lightning.errors import UserError
from fl_lightning.sampling import generator


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
    with pytest.raises(UserError, match=r"num_clients is 3, but .* has 10 clients"):
        Saved(tmp_path / "p.npz").split(y, 3, 0)
    (tmp_path / "p.npz").write_bytes(b"nothing")
    for name in ("p.npz", "q.npz"):
        with pytest.raises(UserError, match=rf"{name}.*is not there, damaged"):
            Saved(tmp_path / name)


def test_a_partition_of_ones_own():
    class EverySoMany(Partition):
        needs_labels = False

        def __init__(self, first: int = 0) -> None:
            self.first = first

        def split(self, labels, num_clients, seed):
            return [np.arange(i + self.first, len(labels), num_clients) for i in range(num_clients)]

    partition = EverySoMany(1)
    data = InMemoryDataModule((np.zeros((7, 1)), np.zeros(7)), partition=partition, num_clients=2)
    assert data.client_indices(0).tolist() == [1, 3, 5]
    assert data.card()["partition"] == "EverySoMany(first=1)"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda y: Dirichlet(0.1).split(y, 11, 0), "num_clients is 11.*with replacement=True"),
        (lambda y: Dirichlet(1, replacement=True).split(y, 11, 0), r"samples_per_client\.$"),
        (lambda y: Dirichlet(0.1, samples_per_client=6).split(y, 2, 0), "is 6.*at most 5"),
        (lambda y: Pathological(4).split(y, 2, 0), "classes is 4, .* from 1 to 3"),
        (lambda y: Dirichlet(0.1, prior="unifrom"), "prior='unifrom'.*Did you mean"),
        (lambda y: ByGroup([0, 1] * 5).split(y, 3, 0), "num_clients is 3.*ByGroup has 2 .*give 2"),
        (lambda y: ByGroup([0, 1]).split(y, 2, 0), r"shape \(2,\).*10 training samples"),
        (lambda y: ByGroup().split(y, 2, 0), "groups=None"),
    ],
)
def test_refusals_name_option_value_and_what_is_accepted(make, words):
    with pytest.raises(UserError, match=words):
        make(np.arange(10) % 3)


def test_class_totals_are_those_of_all_clients() -> None:
    for replacement in (False, True):
        data = Digits(partition=Dirichlet(0.1, replacement=replacement), num_clients=30, seed=0)
        data.setup()
        assert data.train_set is not None and data.train_set.labels is not None
        held = np.concatenate([data.client_indices(i) for i in range(30)])
        totals = np.bincount(data.train_set.labels[held], minlength=10)
        *_, more, every, _, _ = data.partition_table().splitlines()
        assert more.startswith("… and 10 more")
        assert every.split() == ["all", str(totals.sum()), *map(str, totals)]


@pytest.mark.parametrize("seed", range(4))
def test_sizes_are_whole_shares_of_a_lognormal_none_below_one_and_the_largest_remainders_rounded_up(
    seed: int,
) -> None:
    """20 samples, 12 clients: where a share is below one it is one, and the others share what is
    left."""
    sizes = [len(c) for c in QuantitySkew(1.5).split(np.zeros(20), 12, seed)]
    weights = np.exp(1.5 * generator(seed, "partition").standard_normal(12))
    ones: set[int] = set()
    while True:
        left = sum(w for i, w in enumerate(weights) if i not in ones)
        quota = [1.0 if i in ones else w * (20 - len(ones)) / left for i, w in enumerate(weights)]
        small = {i for i, q in enumerate(quota) if q < 1 and i not in ones}
        if not small:
            break
        ones |= small
    expected = [int(q + 1e-9) for q in quota]
    for i in sorted(range(12), key=lambda i: expected[i] - quota[i])[: 20 - sum(expected)]:
        expected[i] += 1
    assert sizes == expected and sum(sizes) == 20 and min(sizes) == 1


@pytest.mark.parametrize("partition", [IID(), Contiguous(), SortedShards(), QuantitySkew(1.0)])
def test_each_client_needs_a_sample_of_its_own(partition: Partition) -> None:
    assert [len(c) for c in partition.split(np.arange(7), 1, 0)] == [7]
    assert sum(len(c) for c in partition.split(np.arange(7), 3, 0)) == 7
    for clients in (0, 8):
        told = f"num_clients is {clients}, but there are 7 training samples"
        with pytest.raises(UserError, match=told):
            partition.split(np.arange(7), clients, 0)


def test_sizes_that_differ_beyond_all_bounds_are_still_sizes() -> None:
    assert sorted(len(c) for c in QuantitySkew(350.0).split(np.zeros(20), 5, 0)) == [1, 1, 1, 1, 16]


def test_groups_are_clients_in_ascending_order() -> None:
    found = ByGroup([7, 3, 5, 3, 7, 7]).split(np.zeros(6), 3, 0)
    assert [c.tolist() for c in found] == [[1, 3], [2], [0, 4, 5]]


def test_a_partition_says_what_is_not_its_default() -> None:
    class Mine(Partition):
        def __init__(self, a: int = 1, b: str = "x") -> None:
            self.a, self.b = a, b

        def split(self, labels: Any, num_clients: int, seed: int) -> list[Any]:
            return [labels]

    expected = ("Mine()", "Mine(a=2)", "Mine(a=2, b='y')")
    assert (repr(Mine()), repr(Mine(2)), repr(Mine(2, "y"))) == expected
    assert (repr(ByGroup()), repr(IID())) == ("ByGroup()", "IID()")
    assert len(repr(ByGroup(list(range(1000))))) < 100
    assert (ByGroup().clients, ByGroup([3, 3, 5]).clients, IID().clients) == (None, 2, None)


def test_a_split_has_as_many_clients_as_were_asked_for() -> None:
    class Forgets(Partition):
        needs_labels = False

        def split(self, labels: Any, num_clients: int, seed: int) -> list[Any]:
            return [np.arange(i, len(labels), num_clients) for i in range(num_clients - 1)]

    pair = torch.zeros(9, 1), torch.zeros(9)
    data = InMemoryDataModule(pair, partition=Forgets(), num_clients=3)
    with pytest.raises(UserError, match="num_clients is 3, but the partition Forgets has 2 clie"):
        data.setup()


def test_groups_follow_the_samples_that_are_kept_for_training() -> None:
    kept = ByGroup([7, 7, 5, 9, 5]).restrict(np.array([1, 2, 4]))
    assert [c.tolist() for c in kept.split(np.zeros(3), 2, 0)] == [[1, 2], [0]]
    plain, none = IID(), ByGroup()
    assert plain.restrict(np.array([1])) is plain and none.restrict(np.array([1])) is none


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([], "has no samples"),
        ([[1, 2]], r"has no samples \(indices of shape \(1, 2\)"),
        ([0, 5], "such as 5: give whole numbers from 0 to 4"),
        ([-1, 2], "such as -1"),
        ([0.0, 1.0], "of type float64, such as 0.0"),
    ],
)
def test_what_is_no_index_of_a_sample_is_refused(indices: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"Client 3 .*{words}"):
        check_client(3, indices, 5)


LABELS = np.repeat([4, 1, 7], [30, 50, 20])


def test_a_client_draws_from_each_class_as_its_proportions_say() -> None:
    """The definition: q_i, then how many of each class, then which of them, from client i's own
    generator."""
    clients = Dirichlet(0.5, replacement=True, samples_per_client=40).split(LABELS, 5, 3)
    pools = [np.flatnonzero(label == LABELS) for label in (1, 4, 7)]
    for client in range(5):
        rng = generator(3, "partition", client)
        taken = rng.multinomial(40, rng.dirichlet([0.5] * 3))
        high = np.repeat([len(pool) for pool in pools], taken)
        within = rng.integers(0, high)
        expected = [pools[c][k] for c, k in zip(np.repeat(range(3), taken), within, strict=True)]
        assert clients[client].tolist() == expected


def test_the_concentration_is_that_of_each_class() -> None:
    """Dir(α · C · prior): with 4 classes and α = 2 uniform, Dir(2, 2, 2, 2)."""
    uniform, skewed = Dirichlet(2.0), Dirichlet(4.0, prior="frequencies")
    for seed in range(3):
        drawn = uniform._proportions(generator(seed, "x"), np.array([5, 5, 5, 5]))
        assert np.array_equal(drawn, generator(seed, "x").dirichlet([2.0] * 4))
        drawn = skewed._proportions(generator(seed, "x"), np.array([10, 90]))
        assert np.allclose(drawn, generator(seed, "x").dirichlet([0.8, 7.2]), rtol=1e-12)


def test_dealing_out_takes_each_sample_once_and_of_a_class_in_its_own_order() -> None:
    clients = Dirichlet(0.3).split(LABELS, 4, 5)
    assert [len(c) for c in clients] == [25] * 4
    assert sorted(np.concatenate(clients)) == list(range(100))
    for c, label in enumerate((1, 4, 7)):
        order = generator(5, "partition-stock", c).permutation(np.flatnonzero(label == LABELS))
        dealt = [i for client in clients for i in client if LABELS[i] == label]
        assert dealt == order.tolist()


def test_a_class_that_is_used_up_is_left_out_and_the_rest_are_drawn_as_before() -> None:
    """Client 0's draws by the definition."""
    stock = np.array([50, 30, 20])
    rng = generator(11, "partition", 0)
    q, taken, left = rng.dirichlet([0.2] * 3), np.zeros(3, dtype=int), 60
    turns = 0
    while left:
        q = np.where(taken < stock, q, 0) / np.where(taken < stock, q, 0).sum()
        more = np.minimum(rng.multinomial(left, q), stock - taken)
        taken, left, turns = taken + more, left - more.sum(), turns + 1
    (client,) = Dirichlet(0.2, samples_per_client=60).split(LABELS, 1, 11)
    assert turns > 1
    assert [int((LABELS[client] == label).sum()) for label in (1, 4, 7)] == taken.tolist()


def test_classes_are_drawn_for_each_client_in_equal_proportions() -> None:
    q = Pathological(2)._proportions(generator(0, "x"), np.array([5, 5, 5]))
    assert sorted(q) == [0.0, 0.5, 0.5]
    assert (
        Pathological(3)._proportions(generator(0, "x"), np.array([5, 5, 5])).tolist() == [1 / 3] * 3
    )
    (all_of_it,) = Pathological(1).split(np.zeros(6), 1, 0)
    assert len(all_of_it) == 6


@pytest.mark.parametrize("seed", range(20))
def test_who_finds_its_only_class_used_up_is_dealt_the_rest_from_what_is_left(seed: int) -> None:
    labels = np.repeat([0, 1], [3, 5])
    clients = Pathological(1).split(labels, 4, seed)
    assert [len(client) for client in clients] == [2] * 4
    assert sorted(np.concatenate(clients)) == list(range(8)), "each sample once"


CLASSES = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 2, 3]).repeat(20)  # 80, 80, 20 and 20 samples


def module(samples: int | None, **arguments: Any) -> InMemoryDataModule:
    made = InMemoryDataModule(
        (torch.arange(200.0).view(200, 1), CLASSES), samples=samples, **{"seed": 3, **arguments}
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
    assert np.bincount(CLASSES[chosen]).tolist() == (np.bincount(CLASSES) // 4).tolist()
    assert chosen == all_of(module(50, partition=IID(), num_clients=5))
    assert chosen != all_of(module(50, partition=IID(), num_clients=5, seed=4))
    shuffled = generator(3, "samples").permutation(200)  # the first of each class in this order
    by_class = [
        shuffled[CLASSES[shuffled].numpy() == label][: count // 4]
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
        {"partition": IID(), "num_clients": 4, "client_test_fraction": 0.25},
        {"partition": Dirichlet(1.0, samples_per_client=10), "num_clients": 4},
        {"clients": [range(20), range(20, 30)]},
    ],
)
def test_the_card_counts_what_is_trained_on(given: dict[str, Any]) -> None:
    data = module(100, **given)
    data.setup()
    assert data.card()["training samples"] == str(data.client_sizes().sum())
