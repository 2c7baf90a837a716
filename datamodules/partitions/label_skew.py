"""Partitions of skewed labels: each client has class proportions of its own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.partitions.partition import (
    Indices,
    LazyClients,
    Partition,
    check_classes,
    digest,
)
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import PositiveFloat, PositiveInt, checked
from fl_lightning.introspection.papers import Paper
from fl_lightning.sampling import generator


class _LabelSkew(Partition):
    """Each client draws class proportions q, then its samples' classes from q; sizes are equal."""

    replacement: bool
    samples_per_client: int | None

    @abstractmethod
    def _proportions(self, rng: np.random.Generator, counts: Indices) -> NDArray[np.float64]:
        """Return one client's class proportions ``(C,)``, given the data's class counts."""

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        size = self.samples_per_client or len(labels) // num_clients
        if size == 0:
            how = " with replacement=True" if not self.replacement else ""
            raise UserError(
                f"num_clients is {num_clients}, but there are only {len(labels)} training samples, "
                f"fewer than one per client: give at most {len(labels)}, or "
                f"{type(self).__name__}'s samples_per_client{how}."
            )
        if not self.replacement and size * num_clients > len(labels):
            raise UserError(
                f"{type(self).__name__}'s samples_per_client is {size}: for num_clients "
                f"{num_clients} that is more than the {len(labels)} training samples. Give at "
                f"most {len(labels) // num_clients}, or replacement=True."
            )
        _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
        # Refuse impossible settings here, and not only when the first client is drawn.
        self._proportions(generator(seed, "partition", 0), counts)
        pool = np.argsort(inverse, kind="stable")
        if not self.replacement:
            return self._without(pool, counts, num_clients, size, seed)
        offsets = np.cumsum(counts) - counts

        def draw(client: int) -> Indices:
            rng = generator(seed, "partition", client)
            taken = rng.multinomial(size, self._proportions(rng, counts))
            start = np.repeat(offsets, taken)
            high = np.repeat(counts, taken)
            return pool[start + rng.integers(0, high)]

        sizes = np.broadcast_to(np.int64(size), (num_clients,))
        return LazyClients(sizes, draw, f"{self!r} {num_clients} {seed} {digest(labels)}")

    def _without(
        self, pool: Indices, counts: Indices, num_clients: int, size: int, seed: int
    ) -> Sequence[Indices]:
        classes = np.split(pool, np.cumsum(counts)[:-1])
        stocks = [
            generator(seed, "partition-stock", c).permutation(one) for c, one in enumerate(classes)
        ]
        stock = counts.copy()
        used = np.zeros_like(counts)
        clients = []
        for client in range(num_clients):
            rng = generator(seed, "partition", client)
            q = self._proportions(rng, counts)
            taken = np.zeros_like(counts)
            left = size
            # If a class is used up, its samples are drawn again from the other classes, at most
            # once per class.
            while left:
                q = np.where(stock - taken > 0, q, 0.0)
                if q.sum() > 0:
                    q = q / q.sum()
                    more = np.minimum(rng.multinomial(left, q), stock - taken)
                else:
                    more = rng.multivariate_hypergeometric(stock - taken, left, method="marginals")
                taken += more
                left -= int(more.sum())
            by_class = [s[a : a + k] for s, a, k in zip(stocks, used, taken, strict=True) if k]
            clients.append(np.concatenate(by_class))
            stock -= taken
            used += taken
        return clients


@checked
@dataclass(repr=False, eq=False)
class Dirichlet(_LabelSkew):
    """Class proportions q_i ~ Dir(alpha · C · prior) for each client (Hsu et al., 2019).

    All sizes are ⌊N/m⌋.

    Args:
        alpha: with a smaller alpha a client has fewer classes.
        replacement: True draws each class's samples from all of that class, so clients may share
            samples and the union is not balanced. False gives each sample to one client: a class
            that is used up is dropped from q_i.
        samples_per_client: number of samples per client, instead of ⌊N/m⌋.
        prior: ``"uniform"`` (1/C each, so Dir(alpha · 1)) or the ``"frequencies"`` of the classes.
    """

    paper = Paper("hsu2019measuring")

    alpha: PositiveFloat
    replacement: bool = False
    samples_per_client: PositiveInt | None = None
    prior: Literal["uniform", "frequencies"] = "uniform"

    def _proportions(self, rng: np.random.Generator, counts: Indices) -> NDArray[np.float64]:
        if self.prior == "uniform":
            prior = np.full(len(counts), 1 / len(counts))
        else:
            prior = counts / counts.sum()
        return rng.dirichlet(self.alpha * len(counts) * prior)


@checked
@dataclass(repr=False, eq=False)
class Pathological(_LabelSkew):
    """Each client has ``classes`` classes, drawn for it without replacement, in equal proportions.

    ``replacement`` and ``samples_per_client`` as for ``Dirichlet``; without replacement, the last
    clients may get samples of other classes if their own are used up.
    """

    classes: PositiveInt
    replacement: bool = False
    samples_per_client: PositiveInt | None = None

    def _proportions(self, rng: np.random.Generator, counts: Indices) -> NDArray[np.float64]:
        check_classes(self, self.classes, len(counts))
        q = np.zeros(len(counts))
        q[rng.choice(len(counts), self.classes, replace=False)] = 1 / self.classes
        return q
