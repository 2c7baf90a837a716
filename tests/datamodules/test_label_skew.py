"""Skewed labels: what each client draws, what is dealt out, and the boundaries of what is
accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fl_lightning.datamodules import Dirichlet, Pathological
from fl_lightning.errors import UserError
from fl_lightning.sampling import generator

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
    """Dir(α · C · prior): with 4 classes and α = 2 uniform, Dir(2, 2, 2, 2).

    Of frequencies 0.1, 0.9, Dir(0.8, 7.2).
    """
    uniform, skewed = Dirichlet(2.0), Dirichlet(4.0, prior="frequencies")
    for seed in range(3):
        drawn = uniform._proportions(generator(seed, "x"), np.array([5, 5, 5, 5]))
        assert np.array_equal(drawn, generator(seed, "x").dirichlet([2.0] * 4))
        drawn = skewed._proportions(generator(seed, "x"), np.array([10, 90]))
        assert np.allclose(drawn, generator(seed, "x").dirichlet([0.8, 7.2]), rtol=1e-12)


def test_dealing_out_takes_each_sample_once_and_of_a_class_in_its_own_order() -> None:
    clients = Dirichlet(0.3).split(LABELS, 4, 5)
    assert [len(c) for c in clients] == [25] * 4 and sorted(np.concatenate(clients)) == list(
        range(100)
    )
    for c, label in enumerate((1, 4, 7)):
        order = generator(5, "partition-stock", c).permutation(np.flatnonzero(label == LABELS))
        dealt = [i for client in clients for i in client if LABELS[i] == label]
        assert dealt == order.tolist()


def test_a_class_that_is_used_up_is_left_out_and_the_rest_are_drawn_as_before() -> None:
    """Client 0's draws by the definition.

    What is over its stock is drawn again among the other classes.
    """
    stock = np.array([50, 30, 20])
    rng = generator(11, "partition", 0)
    q, taken, left = rng.dirichlet([0.2] * 3), np.zeros(3, dtype=int), 60
    turns = 0
    while left:
        q = np.where(taken < stock, q, 0) / np.where(taken < stock, q, 0).sum()
        more = np.minimum(rng.multinomial(left, q), stock - taken)
        taken, left, turns = taken + more, left - more.sum(), turns + 1
    (client,) = Dirichlet(0.2, samples_per_client=60).split(LABELS, 1, 11)
    assert (
        turns > 1
        and [int((LABELS[client] == label).sum()) for label in (1, 4, 7)] == taken.tolist()
    )


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


@pytest.mark.parametrize(
    ("given", "sizes"), [({}, [6] * 16), ({"samples_per_client": 1}, [1] * 16)]
)
def test_sizes_are_an_equal_share_or_those_asked_for(given: Any, sizes: list[int]) -> None:
    for replacement in (True, False):
        assert [
            len(c) for c in Dirichlet(1.0, replacement=replacement, **given).split(LABELS, 16, 0)
        ] == sizes
    # exactly all of them
    assert sum(len(c) for c in Dirichlet(1.0, samples_per_client=25).split(LABELS, 4, 0)) == 100


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Dirichlet(1.0).split(LABELS, 0, 0),
            "num_clients is 0: give a number of at least 1",
        ),
        (lambda: Dirichlet(1.0).split(LABELS, 101, 0), "samples_per_client with replacement=True"),
        (
            lambda: Dirichlet(1.0, replacement=True).split(LABELS, 101, 0),
            "Dirichlet's samples_per_client.$",
        ),
        (lambda: Dirichlet(1.0, samples_per_client=0), "samples_per_client=0"),
        (lambda: Pathological(2, samples_per_client=0), "samples_per_client=0"),
        (lambda: Pathological(0), "classes=0"),
        (lambda: Pathological(1.0), "classes=1.0"),  # type: ignore[arg-type]  # a YAML's 1.0
        (lambda: Pathological(True), "classes=True"),
        (
            lambda: Pathological(4, replacement=True).split(LABELS, 2, 0),
            "classes is 4, but the training data have 3",
        ),
    ],
)
def test_what_cannot_be_dealt_is_refused_before_anybody_draws(make: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()
