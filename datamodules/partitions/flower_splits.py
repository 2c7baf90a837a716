"""Splits by shards, sizes, values and proportions; they equal flwr-datasets' lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.datamodules.partitions.partition import (
    Indices,
    Partition,
    Stream,
    as_arrays,
    by_class,
    check_none_empty,
    check_one_each,
    check_one_of,
    check_same,
    groups_of,
    need_samples,
    no_groups,
    rows,
    shuffled,
    stream,
    tell_left,
)
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    checked,
)
from fl_lightning.introspection.papers import Paper


@checked
@dataclass(repr=False, eq=False)
class Shards(Partition):
    """Samples are sorted by label (stable) and cut into shards, dealt at random (McMahan, 2017).

    Args:
        per_client: shards per client; None: all shards, divided evenly.
        size: samples per shard; None: ⌊N / (m · per_client)⌋.
        keep_incomplete: also use a last, smaller shard.
        shuffle: shuffle each client's list.
        tool_seed: flwr-datasets' ``seed``, which gives exactly its lists; None: the run's seed.
    """

    paper = Paper("mcmahan2017fedavg")

    per_client: PositiveInt | None = 2
    size: PositiveInt | None = None
    keep_incomplete: bool = False
    shuffle: bool = True
    tool_seed: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        if self.per_client is None and self.size is None:
            raise UserError("Shards: per_client and size are both None: give at least one of them.")

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        need_samples(num_clients, len(labels))
        total = len(labels)
        size = self.size or total // (num_clients * (self.per_client or 1))
        size = max(size, 1)
        usable = total // size
        # If both numbers are given, flwr-datasets leaves out an incomplete shard.
        if self.keep_incomplete and (self.per_client is None or self.size is None):
            usable = -(-total // size)
        if self.per_client is None:
            each = np.full(num_clients, usable // num_clients)
            each[: usable % num_clients] += 1
        else:
            each = np.full(num_clients, self.per_client)
        if each.sum() > usable or each.min() < 1:
            raise UserError(
                f"{self!r}: {num_clients} clients need {max(each.sum(), num_clients)} shards of "
                f"{size} samples, and {total} training samples make {usable}. Give a smaller size, "
                "fewer shards per client, or fewer clients."
            )
        r = stream(seed, self.tool_seed)
        order = np.argsort(labels, kind="stable")
        dealt = r.permutation(usable)[: each.sum()]
        clients: list[list[int]] = []
        for own in np.split(dealt, np.cumsum(each)[:-1]):
            clients.append([])
            for shard in own:
                clients[-1].extend(order[shard * size : (shard + 1) * size].tolist())
        tell_left(self, total - sum(map(len, clients)), total, "since no shard of theirs is used")
        return shuffled(r, clients) if self.shuffle else as_arrays(clients)


class Grouped(Partition):
    """Each client is a bunch of ``size`` of the data's own groups (persons, files, …).

    A client's samples are those of its groups, one group after the other. Names are joined by
    ``+``. The clients' lists are those of flwr-datasets' GroupedNaturalIdPartitioner.

    Args:
        size: groups per client.
        mode: how left-over groups are treated. ``"allow-smaller"``: a last, smaller client;
            ``"allow-bigger"``: ⌊G / size⌋ clients, some of which have more; ``"drop-remainder"``:
            they are left out; ``"strict"``: an error.
        order: order of the groups, as they first appear (``"seen"``), or ``"sorted"``.
        groups: one value per training sample; None: the groups of the data set.
    """

    needs_labels = False

    def __init__(
        self,
        size: PositiveInt,
        mode: Literal["allow-smaller", "allow-bigger", "drop-remainder", "strict"] = (
            "allow-smaller"
        ),
        order: Literal["seen", "sorted"] = "seen",
        groups: Sequence[int] | Sequence[str] | None = None,
    ) -> None:
        self.size = size
        self.mode = mode
        self.order = order
        self.groups = None if groups is None else groups_of("Grouped", groups)

    def bound(self, data: Any) -> Partition:
        if self.groups is not None:
            return self
        if data.groups is None:
            raise no_groups(self, data)
        groups = data.groups
        # After a split the clients have the names of their bunches.
        if names := data._group_names or data.client_names:
            groups = np.asarray(names)[groups]
        return Grouped(self.size, self.mode, self.order, groups)

    @property
    def clients(self) -> int | None:
        return None if self.groups is None else len(self._bunches())

    @property
    def names(self) -> list[str]:
        if self.groups is None:
            return []
        return ["+".join(map(str, bunch)) for bunch in self._bunches()]

    def restrict(self, kept: Indices) -> Partition:
        if self.groups is None:
            return self
        left: Any = self.groups[kept]
        return Grouped(self.size, self.mode, self.order, left)

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        if self.groups is None:
            raise no_groups(self)
        check_one_each(self, "groups", self.groups, len(labels))
        bunches = self._bunches()
        check_same(self, num_clients, len(bunches))
        distinct, members = by_class(self.groups)
        own = dict(zip(distinct.tolist(), members, strict=True))
        clients = [np.concatenate(list(map(own.get, bunch))) for bunch in bunches]
        tell_left(self, len(labels) - sum(map(len, clients)), len(labels), "by drop-remainder")
        return clients

    def _bunches(self) -> list[list[Any]]:
        assert self.groups is not None
        distinct, first = np.unique(self.groups, return_index=True)
        names = distinct[np.argsort(first)] if self.order == "seen" else distinct
        whole = len(names) // self.size
        rest = len(names) % self.size
        if (rest and self.mode == "strict") or not (whole or self.mode == "allow-smaller"):
            raise UserError(
                f"Grouped: {len(names)} groups cannot be divided into bunches of {self.size} with "
                f"mode={self.mode!r}. Give another size, or mode='allow-smaller'."
            )
        if self.mode == "allow-bigger":
            return [bunch.tolist() for bunch in np.array_split(names, whole)]
        end = len(names) if self.mode == "allow-smaller" else whole * self.size
        bunches = np.split(names[:end], np.arange(self.size, end, self.size))
        return [bunch.tolist() for bunch in bunches]


class ByValue(Partition):
    """Samples are sorted by a number, such as age, and cut into equal pieces; noise may be added.

    The clients' lists are those of flwr-datasets' ContinuousPartitioner.

    Args:
        values: one number per training sample; or give the ``column`` of a table.
        column: a column of ``FromTable`` or ``FromHuggingFace``.
        strictness: s in s · (v − mean) / std + (1 − s) · noise; 1 sorts only by the values, 0 is a
            random split.
        shuffle: shuffle each client's list.
        tool_seed: flwr-datasets' ``seed``; None: the run's seed.
    """

    needs_labels = False

    def __init__(
        self,
        values: Sequence[float] | None = None,
        column: str | None = None,
        strictness: UnitInterval = 1.0,
        shuffle: bool = True,
        tool_seed: NonNegativeInt | None = None,
    ) -> None:
        check_one_of(self, values=values, column=column)
        self.values: NDArray[np.float64] | None = None
        if values is not None:
            with refused("ByValue's values are not numbers", "Give one per training sample."):
                self.values = np.asarray(values, np.float64)
        self.column = column
        self.strictness = strictness
        self.shuffle = shuffle
        self.tool_seed = tool_seed

    def _with(self, values: Any) -> Partition:
        found = ByValue(values, None, self.strictness, self.shuffle, self.tool_seed)
        found.column = self.column
        return found

    def bound(self, data: Any) -> Partition:
        if self.values is not None:
            return self
        read = getattr(data, "column_values", None)
        if read is None:
            raise UserError(
                f"ByValue's column is {self.column!r}, and {type(data).__name__} has no columns: "
                "give values, one number per training sample."
            )
        return self._with(read(self.column))

    def restrict(self, kept: Indices) -> Partition:
        return self if self.values is None else self._with(self.values[kept])

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        need_samples(num_clients, len(labels))
        v = np.asarray(self.values)
        check_one_each(self, "values", v, len(labels))
        if not np.isfinite(v).all() or (v.min() == v.max() and self.strictness > 0):
            raise UserError(
                f"ByValue: the values are from {v.min()} to {v.max()}, which give no order: give "
                "finite numbers that differ, or strictness=0 for a random split."
            )
        # flwr-datasets calculates in single precision, which would merge large numbers.
        if (v == v.astype(np.float32)).all():
            v = v.astype(np.float32)
        std = np.std(v)
        z = (v - np.mean(v)) / std if std else v
        r = stream(seed, self.tool_seed)
        noise = r.normal(0, 1, len(z))
        blended = self.strictness * z + (1 - self.strictness) * noise
        pieces = np.array_split(np.argsort(blended), num_clients)
        return shuffled(r, [piece.tolist() for piece in pieces]) if self.shuffle else pieces


@checked
@dataclass(repr=False, eq=False)
class LabelBuckets(Partition):
    """Each client has ``per_client`` neighbouring classes: FedProx's power law (Li et al., 2020).

    The clients' lists are those of flwr-datasets' DistributionPartitioner.

    Args:
        array: amounts ``(C, m · per_client / C)``, a list of rows or the path of a ``.npy`` file. A
            row holds the buckets of a class, in the order of the clients that get them.
        per_client: classes per client: i, i + 1, … modulo C.
        preassigned: samples that each bucket gets before the rest is divided.
        rescale: a row's amounts are shares of its class; if False, numbers of samples.
        tool_seed: flwr-datasets' ``seed``; None: the run's seed.
    """

    paper = Paper("li2020fedprox")

    array: list[list[float]] | str
    per_client: PositiveInt
    preassigned: NonNegativeInt = 0
    rescale: bool = True
    shuffle: bool = True
    tool_seed: NonNegativeInt | None = None

    @property
    def clients(self) -> int | None:
        array = rows(self.array)
        return array.size // self.per_client if array.ndim == 2 else None

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        _, members = by_class(labels)
        array = rows(self.array)
        m = num_clients
        classes = len(members)
        columns = m * self.per_client // classes
        if m % classes or self.per_client > classes or array.shape != (classes, columns):
            raise UserError(
                f"LabelBuckets' array has the shape {array.shape}, per_client is "
                f"{self.per_client} and num_clients {m}: {classes} classes need a multiple of "
                f"{classes} clients, an array ({classes}, {columns}), and at most {classes} "
                "classes per client."
            )
        r = stream(seed, self.tool_seed)
        amounts = self._amounts(array, members, columns)
        buckets = []
        for own, amount in zip(members, amounts, strict=True):
            pieces = np.split(own, np.cumsum(amount))
            rest = pieces.pop()
            if self.rescale:
                place = int(np.asarray(r.integers(0, columns)))  # type: ignore[union-attr]
                pieces[place] = np.append(pieces[place], rest)
            buckets.append(pieces)
        used = [0] * classes
        clients: list[list[int]] = [[] for _ in range(m)]
        for i, client in enumerate(clients):
            for c in (np.arange(self.per_client) + i) % classes:
                client.extend(buckets[c][used[c]].tolist())
                used[c] += 1
        check_none_empty(self, clients, "give larger amounts, or preassigned samples")
        tell_left(self, len(labels) - sum(map(len, clients)), len(labels), "by the amounts")
        return shuffled(r, clients) if self.shuffle else as_arrays(clients)

    def _amounts(
        self, array: NDArray[Any], members: list[Indices], columns: int
    ) -> NDArray[np.int64]:
        """Return the number of samples of each bucket ``(C, columns)``."""
        sizes = np.array([len(own) for own in members], np.float64)
        amounts: NDArray[np.int64] = array.astype(np.int64)
        if self.rescale:
            shares = array / array.sum(axis=-1, keepdims=True)
            left = (sizes - self.preassigned * columns)[:, None]
            amounts = np.floor(shares * left).astype(int) + self.preassigned
        wrong = np.flatnonzero((amounts.sum(axis=1) > sizes) | (amounts < 0).any(axis=1))
        if len(wrong):
            raise UserError(
                f"LabelBuckets: array and preassigned={self.preassigned} ask for the numbers "
                f"{amounts[wrong[0]].tolist()} of class {wrong[0]}, which has "
                f"{int(sizes[wrong[0]])} samples: give smaller ones, or rescale=True."
            )
        return amounts


@checked
@dataclass(repr=False, eq=False)
class InnerDirichlet(Partition):
    """Clients of given sizes, each with class proportions q ~ Dir(alpha) (Acar et al., 2021).

    Samples are given one by one to clients in random order; a class that is used up is used up for
    all clients. The clients' lists are those of flwr-datasets' InnerDirichletPartitioner.

    Args:
        sizes: number of samples of each client.
        alpha: one number, one per class, or ``m`` rows with one number per class.
        tool_seed: flwr-datasets' ``seed``; None: the run's seed.
    """

    paper = Paper("acar2021feddyn")

    sizes: list[PositiveInt]
    alpha: PositiveFloat | list[PositiveFloat] | list[list[PositiveFloat]]
    shuffle: bool = True
    tool_seed: NonNegativeInt | None = None

    @property
    def clients(self) -> int | None:
        return len(self.sizes)

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        m = len(self.sizes)
        check_same(self, num_clients, m)
        check_enough(self, sum(self.sizes), len(labels))
        _, members = by_class(labels)
        classes = len(members)
        alpha = np.asarray(self.alpha, np.float64)
        if alpha.shape not in ((), (classes,), (m, classes)):
            raise UserError(
                f"InnerDirichlet's alpha has the shape {alpha.shape}: give one number, {classes} "
                f"numbers (one per class), or {m} rows of {classes}."
            )
        r = stream(seed, self.tool_seed)
        if alpha.ndim < 2:
            q = r.dirichlet(np.broadcast_to(alpha, classes), m)
        else:
            q = np.stack([r.dirichlet(row) for row in alpha])
        clients = [own.tolist() for own in self._dealt(r, members, q)]
        tell_left(self, len(labels) - sum(self.sizes), len(labels), "as sizes leave them out")
        return shuffled(r, clients) if self.shuffle else as_arrays(clients)

    def _dealt(self, r: Stream, members: list[Indices], q: NDArray[np.float64]) -> list[Indices]:
        """Return each client's list, filled from its end."""
        stock = [len(own) for own in members]
        free = list(self.sizes)
        clients = [np.zeros(size, np.int64) for size in self.sizes]
        numbers = np.arange(len(members))
        # A client that is full stays in the draw until it is drawn once more.
        waiting = list(range(len(free)))
        left = sum(free)
        while left:
            i = int(r.choice(waiting))
            if not free[i]:
                waiting.remove(i)
                continue
            free[i] -= 1
            left -= 1
            while True:
                c = int(r.choice(numbers, p=q[i]))
                if stock[c]:
                    break
                q = _without(q, c, stock)
            stock[c] -= 1
            clients[i][free[i]] = members[c][stock[c]]
        return clients


def check_enough(owner: Partition, wanted: int, total: int) -> None:
    """Refuse sizes of more samples than there are."""
    if wanted > total:
        raise UserError(
            f"{type(owner).__name__}: the sizes are {wanted} samples, and there are {total} "
            "training samples: give smaller sizes."
        )


def _without(q: NDArray[np.float64], c: int, stock: list[int]) -> NDArray[np.float64]:
    q[:, c] = 0
    sums = q.sum(axis=1, keepdims=True)
    open_classes = np.array(stock) > 0
    # A client that had only this class takes from all classes that are left.
    even = open_classes / max(1, open_classes.sum())
    left: NDArray[np.float64] = np.where(sums > 0, q / np.where(sums > 0, sums, 1), even)
    return left


GROWTH: dict[str, Callable[[Any], Any]] = {
    "linear": lambda u: u,
    "square": np.square,
    "exponential": np.exp,
}


@checked
@dataclass(repr=False, eq=False)
class Sizes(Partition):
    """Clients of given sizes, in the order of the data, or sizes by a rule.

    Args:
        sizes: one whole number per client; or ``"linear"``, ``"square"``, ``"exponential"`` or a
            function of one number, 1.0 … m: client i gets a share proportional to f(i), rounded
            down, and the last client gets the rest.
        shuffle: divide the samples in random order; False: in the order of the data, as
            flwr-datasets' SizePartitioner, LinearPartitioner and similar ones do.
    """

    needs_labels = False

    sizes: list[PositiveInt] | Literal["linear", "square", "exponential"] | Callable[[Any], Any]
    shuffle: bool = False

    @property
    def clients(self) -> int | None:
        fixed = not isinstance(self.sizes, str) and not callable(self.sizes)
        return len(self.sizes) if fixed else None  # type: ignore[arg-type]

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        need_samples(num_clients, len(labels))
        sizes = self._sizes(len(labels), num_clients)
        ends = np.cumsum(sizes)
        tell_left(self, len(labels) - int(ends[-1]), len(labels), "as sizes leave them out")
        order = np.arange(len(labels))
        if self.shuffle:
            order = stream(seed, None).permutation(len(labels))
        return np.split(order[: ends[-1]], ends[:-1])

    def _sizes(self, total: int, m: int) -> NDArray[np.int64]:
        given = self.sizes
        if isinstance(given, list | tuple):
            check_same(self, m, len(given))
            check_enough(self, sum(given), total)
            return np.array(given, np.int64)
        if callable(given):
            units = np.array([given(place) for place in np.linspace(1, m, m).tolist()])
        else:
            units = GROWTH[given](np.linspace(1, m, m))
        shares = units / units.sum()
        with np.errstate(invalid="ignore"):
            sizes = np.array(shares * total, dtype=np.int64)
        sizes[-1] += total - sizes.sum()
        if not np.isfinite(units).all() or sizes.min() < 1:
            raise UserError(
                f"{self!r} leaves client {int(sizes.argmin())} {sizes.min()} of {total} samples: "
                "give fewer clients, or another rule."
            )
        return sizes
