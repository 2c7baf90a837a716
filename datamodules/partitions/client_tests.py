"""Samples on which each client is tested: held out from its own, or its own test set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from fl_lightning.datamodules.batches.samples import Samples
from fl_lightning.datamodules.partitions.partition import Indices, check_positions, positions
from fl_lightning.errors import UserError
from fl_lightning.sampling import generator


@dataclass
class HeldOut:
    """Each client's own held-out samples: a share of its distinct samples, of each class alike.

    A sample that a client holds several times lies on only one side. The draw is a function of
    (seed, client).

    Args:
        fraction: h = fraction · (distinct samples), rounded half up, at least 1 and at most all but
            one.
        labels: labels of the training data ``(N,)``, or None.
    """

    fraction: float
    labels: Indices | None
    seed: int

    @property
    def recipe(self) -> bytes:
        return f"test {self.fraction} {self.seed}".encode()

    @property
    def described(self) -> tuple[str, str]:
        return "held out by each client", f"{self.fraction:g} of its samples"

    def sides(self, indices: Indices, client: int) -> tuple[Indices, Indices]:
        """Return the samples to train on ``(N_i,)``, in order, and to test on ``(h,)``, ascending.

        >>> train, test = HeldOut(0.25, None, seed=0).sides(np.array([7, 3, 7, 5, 1]), client=4)
        >>> len(test), sorted({*train, *test}) == [1, 3, 5, 7], set(train) & set(test)
        (1, True, set())
        """
        distinct = np.unique(indices)
        if len(distinct) < 2:
            return indices, distinct[:0]
        # Use the decimal form that you wrote: the float would round some halves down.
        h = int(Decimal(str(self.fraction)) * len(distinct) + Decimal("0.5"))
        h = min(max(h, 1), len(distinct) - 1)
        shuffled = generator(self.seed, "client-test", client).permutation(distinct)
        if self.labels is None:
            test = np.sort(shuffled[:h])
        else:
            test = np.sort(stratified(shuffled, self.labels[shuffled], h))
        return indices[~np.isin(indices, test)], test


def stratified(samples: Indices, labels: Indices, h: int) -> Indices:
    """Return h of the samples: of each class its share, the first ones."""
    # The samples that rounding leaves over go to the classes with the largest remainders.
    _, label, counts = np.unique(labels, return_inverse=True, return_counts=True)
    taken = h * counts // len(samples)
    rest = h * counts % len(samples)
    taken[np.argsort(-rest, kind="stable")[: h - taken.sum()]] += 1
    return np.concatenate([samples[label == c][:k] for c, k in enumerate(taken)])


@dataclass
class SplitTests:
    """Test samples that the split itself gives each client, as positions in the training data."""

    tests: Sequence[Indices]

    described = ("test samples", "by the split")

    @property
    def recipe(self) -> bytes:
        return b"split" + bytes_of(self.tests)

    def sides(self, indices: Indices, client: int) -> tuple[Indices, Indices]:
        return indices, self.tests[client]


def bytes_of(arrays: Sequence[Indices]) -> bytes:
    sizes = np.array([len(array) for array in arrays], np.int64)
    return b"".join(array.tobytes() for array in (sizes, *arrays))


def apart(clients: Sequence[Any]) -> tuple[Sequence[Any], list[Indices] | None]:
    """Return the training lists and the test lists of pairs (train, test), or None without tests.

    >>> apart([([0, 1], [2]), ([3], [])])
    ([[0, 1], [3]], [array([2]), array([], dtype=int64)])
    """
    if not isinstance(clients, list) or not clients or not all(map(is_pair, clients)):
        return clients, None
    return [own for own, _ in clients], [np.asarray(test, np.int64) for _, test in clients]


def is_pair(client: Any) -> bool:
    """Return whether this is a tuple of two lists, and not of two positions."""
    return isinstance(client, tuple) and len(client) == 2 and all(np.ndim(c) == 1 for c in client)


@dataclass
class OwnTests:
    """Clients with their own test sets, separate from the training data.

    Args:
        clients: each client's positions in ``samples``; a client may have none.
        total: number N of training samples; position N + j is sample j of ``samples``.
    """

    samples: Samples
    clients: Sequence[Any]
    total: int

    described = ("test samples", "each client's own")

    def __post_init__(self) -> None:
        if isinstance(self.clients, list | tuple):
            for client in range(len(self.clients)):
                self._of(client)

    def check_number(self, clients: int) -> None:
        if len(self.clients) != clients:
            raise UserError(
                f"test_clients gives {len(self.clients)} clients' test samples, and there are "
                f"{clients} clients: give one entry per client, which may be empty."
            )

    @property
    def recipe(self) -> bytes:
        return b"own tests" + bytes_of([self._of(client) for client in range(len(self.clients))])

    def sides(self, indices: Indices, client: int) -> tuple[Indices, Indices]:
        """Return all of ``indices``, and the client's test set.

        >>> OwnTests(range(4), [[0], [3, 1]], total=10).sides(np.array([7, 8]), client=1)
        (array([7, 8]), array([13, 11]))
        """
        return indices, self.total + self._of(client)

    def _of(self, client: int) -> Indices:
        array = positions(self.clients[client])
        if len(array):  # an empty array has dtype float64
            check_positions(f"test_clients[{client}]", array, len(self.samples))
        return array.astype(np.int64, copy=False)


@dataclass
class GroupTests:
    """The test samples that belong to a client's own group.

    Args:
        groups: group of each training sample ``(N,)``; ``by_group``: positions in ``samples``.
    """

    samples: Samples
    groups: Indices
    by_group: Mapping[int, Indices]

    # The lists follow from the test data, as the global test set does, so they need no recipe.
    recipe = b""
    described = OwnTests.described

    @classmethod
    def of(cls, samples: Samples, groups: Indices, of_tests: Indices) -> GroupTests:
        """``of_tests``: group of each of ``samples``."""
        order = np.argsort(of_tests, kind="stable")
        names, starts = np.unique(of_tests[order], return_index=True)
        parts = np.split(order, starts[1:])
        return cls(samples, groups, dict(zip(names.tolist(), parts, strict=True)))

    def sides(self, indices: Indices, client: int) -> tuple[Indices, Indices]:
        own = self.by_group.get(int(self.groups[indices[0]]), np.zeros(0, np.int64))
        return indices, len(self.groups) + own


def check_test_clients(test_clients: Any, client_test_fraction: float) -> None:
    """Refuse test sets that are given together with a share."""
    if test_clients is not None and client_test_fraction > 0:
        raise UserError(
            f"test_clients gives each client test samples, and client_test_fraction is "
            f"{client_test_fraction}, the share of its training samples that it holds out to "
            "test on: give one of the two."
        )


# A client's training samples and test samples. ``recipe``: bytes that are equal for equal test
# samples; ``described``: which test samples clients have, for a run's card; ``sides``: a client's
# samples to train on, among the given ones, and to test on.
ClientTests = HeldOut | SplitTests | OwnTests | GroupTests
