"""What partitions are built from.

Clients drawn when asked for, whole sizes of a given sum, and what is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fl_lightning.datamodules import (
    IID,
    ByGroup,
    Contiguous,
    Dirichlet,
    InMemoryDataModule,
    Partition,
    QuantitySkew,
    Saved,
    SortedShards,
)
from fl_lightning.datamodules.partitions.partition import LazyClients, check_client
from fl_lightning.datamodules.partitions.split import partition_hash
from fl_lightning.errors import UserError
from fl_lightning.sampling import generator


def test_clients_drawn_when_asked_for_are_a_sequence() -> None:
    clients = LazyClients(np.array([1, 1, 1]), lambda i: np.array([10 * i]), "recipe")
    assert [int(c[0]) for c in clients] == [0, 10, 20] and len(clients) == 3
    assert [int(c[0]) for c in clients[1:]] == [10, 20] and [int(c[0]) for c in clients[::-2]] == [
        20,
        0,
    ]
    for outside in (-1, 3):
        with pytest.raises(IndexError, match=f"client {outside} of 3"):
            clients[outside]


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


def test_as_many_clients_as_samples_have_one_each_and_no_sigma_is_equal() -> None:
    for partition in (IID(), SortedShards(), QuantitySkew(2.0)):
        assert [len(c) for c in partition.split(np.arange(7), 7, 0)] == [1] * 7
    assert [len(c) for c in QuantitySkew(0).split(np.zeros(12), 4, 0)] == [3] * 4


@pytest.mark.parametrize("partition", [IID(), Contiguous(), SortedShards(), QuantitySkew(1.0)])
def test_each_client_needs_a_sample_of_its_own(partition: Partition) -> None:
    assert [len(c) for c in partition.split(np.arange(7), 1, 0)] == [7]
    assert sum(len(c) for c in partition.split(np.arange(7), 3, 0)) == 7
    for clients in (0, 8):
        with pytest.raises(
            UserError, match=f"num_clients is {clients}, but there are 7 training samples"
        ):
            partition.split(np.arange(7), clients, 0)


def test_pieces_of_a_text_follow_each_other() -> None:
    assert [client.tolist() for client in Contiguous().split(np.zeros(5), 2, 7)] == [
        [0, 1, 2],
        [3, 4],
    ]


def test_sizes_that_differ_beyond_all_bounds_are_still_sizes() -> None:
    assert sorted(len(c) for c in QuantitySkew(350.0).split(np.zeros(20), 5, 0)) == [1, 1, 1, 1, 16]


def test_a_number_that_has_to_be_positive_is_not_zero() -> None:
    assert Dirichlet(1e-300).alpha == 1e-300
    value: Any
    for value in (0, -1.0, float("nan"), float("inf"), "1"):
        with pytest.raises(UserError, match="it has to be a number above 0"):
            Dirichlet(value)


def test_groups_are_clients_in_ascending_order() -> None:
    found = ByGroup([7, 3, 5, 3, 7, 7]).split(np.zeros(6), 3, 0)
    assert [c.tolist() for c in found] == [[1, 3], [2], [0, 4, 5]]


def test_a_partition_says_what_is_not_its_default() -> None:
    class Mine(Partition):
        def __init__(self, a: int = 1, b: str = "x") -> None:
            self.a, self.b = a, b

    assert (repr(Mine()), repr(Mine(2)), repr(Mine(2, "y"))) == (
        "Mine()",
        "Mine(a=2)",
        "Mine(a=2, b='y')",
    )
    assert (repr(ByGroup()), repr(ByGroup([3, 3, 5])), repr(IID())) == (
        "ByGroup()",
        "ByGroup(2 groups)",
        "IID()",
    )
    assert (ByGroup().clients, ByGroup([3, 3, 5]).clients, IID().clients) == (None, 2, None)


def test_groups_follow_the_samples_that_are_kept_for_training() -> None:
    kept = ByGroup([7, 7, 5, 9, 5]).restrict(np.array([1, 2, 4]))
    assert [c.tolist() for c in kept.split(np.zeros(3), 2, 0)] == [[1, 2], [0]]
    plain, none = IID(), ByGroup()
    assert plain.restrict(np.array([1])) is plain and none.restrict(np.array([1])) is none


def test_a_saved_partition_knows_its_clients_and_is_of_as_many(tmp_path: Any) -> None:
    x, y = np.zeros((10, 2), np.float32), np.arange(10) % 2
    InMemoryDataModule((x, y), partition=IID(), num_clients=4, seed=0).save_partition(
        tmp_path / "p.npz"
    )
    saved = Saved(tmp_path / "p.npz")
    assert saved.clients == 4 and repr(saved) == f"Saved({str(tmp_path / 'p.npz')!r})"
    assert [len(c) for c in saved.split(y, 4, 7)] == [3, 3, 2, 2]
    with pytest.raises(UserError, match=r"num_clients is 3, but .* has 4 clients"):
        saved.split(y, 3, 0)


@pytest.mark.parametrize("indices", [[0], [4], [0, 4, 2], np.array([1], dtype=np.uint8)])
def test_indices_of_samples_are_accepted(indices: Any) -> None:
    check_client(3, indices, 5)


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([], "has no samples"),
        ([[1, 2]], r"has no samples \(indices of shape \(1, 2\)"),
        ([0, 5], "from 0 to 5"),
        ([-1, 2], "from -1 to 2"),
        ([0.0, 1.0], "of type float64"),
    ],
)
def test_what_is_no_index_of_a_sample_is_refused(indices: Any, words: str) -> None:
    with pytest.raises(UserError, match=f"Client 3 .*{words}"):
        check_client(3, indices, 5)


@pytest.mark.parametrize("sigma", [-0.1, float("inf"), float("nan"), "1"])
def test_a_sigma_is_a_finite_number_of_at_least_zero(sigma: Any) -> None:
    with pytest.raises(UserError, match=r"QuantitySkew: sigma=.*; it has to be a number from 0"):
        QuantitySkew(sigma)


def test_clients_that_lie_one_after_the_other_have_the_hash_of_lists() -> None:
    groups = np.random.default_rng(0).integers(0, 9, 200)
    lazy = ByGroup(groups.tolist()).split(np.zeros(200, np.int64), 9, 0)
    lists = [np.flatnonzero(groups == group) for group in range(9)]
    assert partition_hash(lazy, None) == partition_hash(lists, None)
