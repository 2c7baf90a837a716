"""Splits by shards, sizes, values and proportions, which equal flwr-datasets' lists sample by
sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.accepted import NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval
from fl_lightning.datamodules.partitions.partition import (
    Indices,
    Partition,
    groups_of,
    need_samples,
    no_groups,
)
from fl_lightning.datamodules.partitions.partition_rng import (
    Stream,
    as_arrays,
    by_class,
    check_none_empty,
    check_same,
    rows,
    shuffled,
    stream,
    tell_left,
)
from fl_lightning.errors import UserError
from fl_lightning.introspection.papers import Paper


class Shards(Partition):
    """Samples are sorted by label (stable) and cut into shards, which are divided at random
    (McMahan et al., 2017).

    Args:
        per_client: shards per client; None: all shards, divided evenly.
        size: samples per shard; None: ⌊N / (m · per_client)⌋.
        keep_incomplete: also use a last, smaller shard.
        shuffle: shuffle each client's list.
        tool_seed: flwr-datasets' ``seed``, which gives exactly its lists; None: the run's seed.
    """

    paper = Paper("mcmahan2017fedavg")

    def __init__(
        self,
        per_client: PositiveInt | None = 2,
        size: PositiveInt | None = None,
        keep_incomplete: bool = False,
        shuffle: bool = True,
        tool_seed: NonNegativeInt | None = None,
    ) -> None:
        if per_client is None and size is None:
            raise UserError("Shards: per_client and size are both None: give at least one of them.")
        self.per_client = per_client
        self.size = size
        self.keep_incomplete = keep_incomplete
        self.shuffle = shuffle
        self.tool_seed = tool_seed

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        need_samples(num_clients, len(labels))
        total = len(labels)
        size = self.size or total // (num_clients * (self.per_client or 1))
        if size == 0:
            raise UserError(
                f"{self!r}: {num_clients} clients of {self.per_client} shards each are more shards "
                f"than the {total} training samples. Give fewer clients or shards."
            )
        complete = total // size
        usable = complete
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
        if self.groups.shape != (len(labels),):
            raise UserError(
                f"Grouped's groups have the shape {self.groups.shape}: give one for each of the "
                f"{len(labels)} training samples."
            )
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
        if rest and self.mode == "strict":
            raise UserError(
                f"Grouped: {len(names)} groups cannot be divided into bunches of {self.size}: "
                f"{rest} are left over, and mode is 'strict'. Give another size, or "
                "mode='allow-smaller', 'allow-bigger' or 'drop-remainder'."
            )
        if not whole and self.mode != "allow-smaller":
            raise UserError(
                f"Grouped: each client gets size={self.size} groups, but there are only "
                f"{len(names)} groups. Give a size of at most {len(names)}, or "
                "mode='allow-smaller'."
            )
        if self.mode == "allow-bigger":
            return [bunch.tolist() for bunch in np.array_split(names, whole)]
        end = len(names) if self.mode == "allow-smaller" else whole * self.size
        bunches = np.split(names[:end], np.arange(self.size, end, self.size))
        return [bunch.tolist() for bunch in bunches]

    def __repr__(self) -> str:
        options = [repr(self.size)]
        if self.mode != "allow-smaller":
            options.append(f"mode={self.mode!r}")
        if self.order != "seen":
            options.append(f"order={self.order!r}")
        if self.groups is not None:
            options.append(f"{len(np.unique(self.groups))} groups")
        return f"Grouped({', '.join(options)})"


class ByValue(Partition):
    """Samples are sorted by a number, such as age, and cut into equal pieces; noise can be added
    first.

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
        if (values is None) == (column is None):
            raise UserError(
                "ByValue needs values, one number per training sample, or column, the name of a "
                "table's column: give one of the two."
            )
        self.values = None if values is None else self._numbers(values)
        self.column = column
        self.strictness = strictness
        self.shuffle = shuffle
        self.tool_seed = tool_seed

    @staticmethod
    def _numbers(values: Any) -> NDArray[np.float64]:
        try:
            return np.asarray(values, np.float64)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"ByValue's values are not numbers ({str(error)[:120]}): give one number per "
                "training sample."
            ) from None

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
        v = self.values
        if v is None or v.shape != (len(labels),):
            shape = None if v is None else v.shape
            raise UserError(
                f"ByValue's values have the shape {shape}: give one number for each of the "
                f"{len(labels)} training samples."
            )
        if not np.isfinite(v).all():
            place = int(np.flatnonzero(~np.isfinite(v))[0])
            raise UserError(
                f"ByValue: the value of training sample {place} is {v[place]}: give a finite "
                "number for each sample, or leave the sample out."
            )
        # flwr-datasets calculates in single precision, which would merge large numbers.
        if (v == v.astype(np.float32)).all():
            v = v.astype(np.float32)
        std = np.std(v)
        if v.min() == v.max() and self.strictness > 0:
            raise UserError(
                f"ByValue: all values are {v[0]:g}, so they give no order: give other values, or "
                "strictness=0 for a random split."
            )
        z = (v - np.mean(v)) / std if std else v
        r = stream(seed, self.tool_seed)
        noise = r.normal(0, 1, len(z))
        blended = self.strictness * z + (1 - self.strictness) * noise
        pieces = np.array_split(np.argsort(blended), num_clients)
        return shuffled(r, [piece.tolist() for piece in pieces]) if self.shuffle else pieces

    def __repr__(self) -> str:
        of = f"column={self.column!r}" if self.column else "values"
        seed = "" if self.tool_seed is None else f", tool_seed={self.tool_seed}"
        return f"ByValue({of}, strictness={self.strictness:g}{seed})"


class LabelBuckets(Partition):
    """Each client has ``per_client`` neighbouring classes, with the amounts in ``array``: the power
    law of FedProx (Li et al., 2020).

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

    def __init__(
        self,
        array: list[list[float]] | str,
        per_client: PositiveInt,
        preassigned: NonNegativeInt = 0,
        rescale: bool = True,
        shuffle: bool = True,
        tool_seed: NonNegativeInt | None = None,
    ) -> None:
        self.array = array
        self.per_client = per_client
        self.preassigned = preassigned
        self.rescale = rescale
        self.shuffle = shuffle
        self.tool_seed = tool_seed

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
        if m % classes:
            raise UserError(
                f"LabelBuckets: num_clients is {m}, which is not a multiple of the {classes} "
                f"classes. Give {-(-m // classes) * classes}."
            )
        if self.per_client > classes or array.shape != (classes, columns):
            raise UserError(
                f"LabelBuckets' array has the shape {array.shape} and per_client is "
                f"{self.per_client}: {m} clients and {classes} classes need "
                f"({classes}, {columns}), and at most {classes} classes per client."
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
        if self.rescale:
            reserved = self.preassigned * columns
            if (sizes - 2 * reserved < columns).any():
                raise UserError(
                    f"LabelBuckets' preassigned is {self.preassigned}: the smallest class has "
                    f"{int(sizes.min())} samples for {columns} buckets. Give a smaller number."
                )
            shares = array / array.sum(axis=-1, keepdims=True)
            dealt: NDArray[np.int64] = np.floor(shares * (sizes - reserved)[:, None]).astype(int)
            return dealt + self.preassigned
        amounts = array.astype(np.int64)
        over = np.flatnonzero(amounts.sum(axis=1) > sizes)
        if len(over):
            c = int(over[0])
            raise UserError(
                f"LabelBuckets: row {c} of array has {amounts[c].sum()} samples, and the class has "
                f"{int(sizes[c])}: give smaller amounts, or rescale=True."
            )
        return amounts

    def __repr__(self) -> str:
        shape = self.array if isinstance(self.array, str) else f"array {rows(self.array).shape}"
        seed = "" if self.tool_seed is None else f", tool_seed={self.tool_seed}"
        return f"LabelBuckets({shape}, per_client={self.per_client}{seed})"


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

    def __init__(
        self,
        sizes: list[PositiveInt],
        alpha: PositiveFloat | list[PositiveFloat] | list[list[PositiveFloat]],
        shuffle: bool = True,
        tool_seed: NonNegativeInt | None = None,
    ) -> None:
        self.sizes = sizes
        self.alpha = alpha
        self.shuffle = shuffle
        self.tool_seed = tool_seed

    @property
    def clients(self) -> int | None:
        return len(self.sizes)

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        m = len(self.sizes)
        check_same(self, num_clients, m)
        if sum(self.sizes) > len(labels):
            raise UserError(
                f"InnerDirichlet: the sizes are {sum(self.sizes)} samples, and there are "
                f"{len(labels)} training samples: give smaller sizes."
            )
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

    def __repr__(self) -> str:
        alpha = self.alpha if isinstance(self.alpha, int | float) else np.shape(self.alpha)
        seed = "" if self.tool_seed is None else f", tool_seed={self.tool_seed}"
        return f"InnerDirichlet({len(self.sizes)} sizes, alpha={alpha}{seed})"


def _without(q: NDArray[np.float64], c: int, stock: list[int]) -> NDArray[np.float64]:
    """Return the clients' proportions without a class that is used up."""
    q[:, c] = 0
    sums = q.sum(axis=1, keepdims=True)
    open_classes = np.array(stock) > 0
    # A client that had only this class takes from all classes that are left.
    even = open_classes / max(1, open_classes.sum())
    left: NDArray[np.float64] = np.where(sums > 0, q / np.where(sums > 0, sums, 1), even)
    return left
