"""The splits of FL-Simulator, the simulator of FedInit's and FedSMOO's authors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.partitions.partition import (
    Indices,
    Partition,
    Stream,
    as_arrays,
    by_class,
    check_classes,
    check_one_of,
    integers,
    need_samples,
    stream,
)
from fl_lightning.introspection.accepted import NonNegativeInt, PositiveFloat, PositiveInt, checked


@checked
@dataclass(repr=False, eq=False)
class DealtByShares(Partition):
    """Samples are dealt one at a time: to a client drawn at random, of a class drawn by its shares.

    Give ``alpha`` or ``classes``. If all samples of a class are dealt, the class begins again, so
    several clients may hold a sample, and some samples have no client. All clients have ⌊N/m⌋
    samples, and client 0 also has the remainder. With ``tool_seed`` the lists are exactly those of
    FL-Simulator, for the same labels in the same order.

    Args:
        alpha: shares q_i ~ Dir(alpha, …, alpha) for each client; FL-Simulator's ``Dirichlet``.
        classes: equal shares of so many classes, drawn for each client; its ``Pathological``.
        tool_seed: FL-Simulator's ``--seed``; None: the run's seed and generator.

    >>> DealtByShares(classes=1, tool_seed=20).split(np.array([0, 0, 1, 1]), 2, seed=0)
    [array([0, 1]), array([2, 3])]
    """

    alpha: PositiveFloat | None = None
    classes: PositiveInt | None = None
    tool_seed: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        check_one_of(self, alpha=self.alpha, classes=self.classes)

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        need_samples(num_clients, len(labels))
        r = stream(seed, self.tool_seed, "fl-simulator")
        order = r.permutation(len(labels))
        _, members = by_class(labels[order])
        bounds = self._cumulated_shares(r, num_clients, len(members))
        open_places = np.full(num_clients, len(labels) // num_clients)
        open_places[0] += len(labels) % num_clients
        left = [len(own) for own in members]
        clients: list[list[int]] = [[] for _ in range(num_clients)]
        for _ in range(len(labels)):
            client = int(integers(r, 0, num_clients))
            while not open_places[client]:
                client = int(integers(r, 0, num_clients))
            open_places[client] -= 1
            drawn = int(np.argmax(r.uniform() <= bounds[client]))
            while not left[drawn]:
                left[drawn] = len(members[drawn])
                drawn = int(np.argmax(r.uniform() <= bounds[client]))
            left[drawn] -= 1
            clients[client].append(int(order[members[drawn][left[drawn]]]))
        # The tool fills each client's places from the last to the first.
        return as_arrays([own[::-1] for own in clients])

    def _cumulated_shares(self, r: Stream, m: int, classes: int) -> NDArray[np.float64]:
        """Return the upper bounds ``(m, classes)`` of the classes' parts of [0, 1]; 0: no part."""
        if self.alpha is not None:
            return np.cumsum(r.dirichlet([self.alpha] * classes, m), axis=1)
        assert self.classes is not None
        check_classes(self, self.classes, classes)
        chosen = np.zeros((m, classes))
        chosen[:, : self.classes] = 1.0
        for row in chosen:
            r.shuffle(row)
        return chosen * np.cumsum(chosen, axis=1) / self.classes
