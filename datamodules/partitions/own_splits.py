"""Splits by given shares, mixtures of two splits, and index lists that another tool wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.datamodules.partitions.partition import (
    Indices,
    Partition,
    by_class,
    check_same,
    need_samples,
    positions,
    rows,
    tell_left,
)
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import PositiveInt, UnitInterval, checked
from fl_lightning.machine.lightning import rank_zero_warn
from fl_lightning.sampling import generator


@checked
@dataclass(repr=False, eq=False)
class LabelShares(Partition):
    """Each client's shares of the classes come from a table.

    Args:
        shares: one row per client, one share per class, each row with the sum 1; a list of rows or
            the path of a ``.npy`` file.
        sizes: number of samples of each client; None: ⌊N / m⌋ each.
    """

    shares: list[list[float]] | str
    sizes: list[PositiveInt] | None = None

    def __post_init__(self) -> None:
        table = rows(self.shares)
        wrong = table.ndim != 2 or table.dtype.kind not in "iuf"
        if wrong or (table < 0).any() or not np.allclose(table.sum(axis=1), 1, atol=1e-6):
            raise UserError(
                "LabelShares' shares have to be one row per client, of shares of at least 0 with "
                f"the sum 1 each; they have the shape {table.shape}."
            )

    @property
    def clients(self) -> int | None:
        return len(rows(self.shares))

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        shares = rows(self.shares)
        check_same(self, num_clients, len(shares))
        need_samples(num_clients, len(labels))
        _, members = by_class(labels)
        if shares.shape[1] != len(members):
            raise UserError(
                f"LabelShares' rows have {shares.shape[1]} shares, and the training data have "
                f"{len(members)} classes: give one share per class."
            )
        sizes = self.sizes or [len(labels) // num_clients] * num_clients
        wanted = [_apportioned(size, row) for size, row in zip(sizes, shares, strict=True)]
        taken = np.array(wanted)
        for c, own in enumerate(members):
            if taken[:, c].sum() > len(own):
                raise UserError(
                    f"LabelShares: the clients want {taken[:, c].sum()} samples of class {c}, and "
                    f"there are {len(own)}: give smaller sizes, or smaller shares of this class."
                )
        clients: list[list[Indices]] = [[] for _ in shares]
        for c, own in enumerate(members):
            stock = generator(seed, "partition-stock", c).permutation(own)
            ends = np.cumsum(taken[:, c])
            for client, piece in zip(clients, np.split(stock[: ends[-1]], ends[:-1]), strict=True):
                client.append(piece)
        left = len(labels) - int(taken.sum())
        tell_left(self, left, len(labels), "because the shares and sizes leave them out")
        return [np.concatenate(own) for own in clients]


def _apportioned(size: int, row: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return whole numbers with the sum ``size``; the largest remainders are rounded up."""
    quota = size * row
    whole = np.floor(quota + 1e-9).astype(np.int64)
    order = np.argsort(whole - quota, kind="stable")
    whole[order[: size - whole.sum()]] += 1
    return whole


@checked
@dataclass(repr=False, eq=False)
class Mixed(Partition):
    """A share of all samples is divided evenly at random, and the rest by another split.

    Args:
        iid: the share.
        partition: the split of the rest; a client's list has its part of the rest first, then its
            even part.
    """

    iid: UnitInterval
    partition: Partition

    @property
    def needs_labels(self) -> bool:  # type: ignore[override]
        return self.partition.needs_labels

    @property
    def clients(self) -> int | None:
        return self.partition.clients

    def bound(self, data: Any) -> Partition:
        return Mixed(self.iid, self.partition.bound(data))

    def check_size(self, samples: int) -> None:
        self.partition.check_size(samples)

    def restrict(self, kept: Indices) -> Partition:
        return Mixed(self.iid, self.partition.restrict(kept))

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Any]:
        total = len(labels)
        drawn = generator(seed, "partition-mixed").permutation(total)[: int(self.iid * total)]
        rest = np.setdiff1d(np.arange(total), drawn)
        even = np.array_split(drawn, num_clients)
        if not len(rest):
            return even
        clients: list[Any] = []
        own = self.partition.restrict(rest).split(labels[rest], num_clients, seed)
        for i in range(num_clients):
            if isinstance(own[i], tuple):
                train, test = own[i]
                clients.append((np.append(rest[train], even[i]), rest[test]))
            else:
                clients.append(np.append(rest[own[i]], even[i]))
        return clients


class Imported(Partition):
    """Index lists that another tool wrote.

    A ``.json`` file with a list of lists or ``{client: list}``; a list may also be ``{"train": …,
    "test": …}``; or a ``.npz`` file with one array per client. Clients are in the order of their
    numbers, or of their names.

    Positions count from 0 in the training data; with ``pooled=True`` in training data followed by
    test data.

    Raises:
        UserError: a position is out of range, twice in a list, or in a client's training and test
            samples; or a client has no training samples. The error names file and client.
    """

    needs_labels = False

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._kept: Indices | None = None
        self._lists = _lists_of(Path(path).expanduser())

    @property
    def clients(self) -> int | None:
        return len(self._lists)

    @property
    def names(self) -> Sequence[str]:
        return [] if all(name.isdecimal() for name in self._lists) else list(self._lists)

    def check_size(self, samples: int) -> None:
        for name, (own, test) in self._lists.items():
            train, held = (
                positions(one) if len(one) else np.zeros(0, np.int64) for one in (own, test or ())
            )
            every = np.concatenate([train.ravel(), held.ravel()])
            fits = train.ndim == held.ndim == 1 and every.dtype.kind in "iu" and len(train) > 0
            if not fits or every.min() < 0 or every.max() >= samples:
                what = f"has {str(own)[:60]} and {str(test)[:60]} of {samples} samples"
            elif len(np.unique(every)) < len(every):
                values, counts = np.unique(every, return_counts=True)
                what = f"has position {values[counts.argmax()]} twice"
            else:
                continue
            raise UserError(
                f"The index lists in {self.path!r}: client {name} {what}. Give at least one sample "
                "to train on, as whole numbers from 0, each once, of samples in the training data "
                "(with pooled=True: in training data followed by test data)."
            )

    def restrict(self, kept: Indices) -> Partition:
        restricted = Imported(self.path)
        # ``kept`` counts among the samples that an earlier restriction left.
        restricted._kept = kept if self._kept is None else self._kept[kept]
        return restricted

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Any]:
        check_same(self, num_clients, len(self._lists))
        kept = np.arange(len(labels)) if self._kept is None else self._kept
        if self._kept is None:
            self.check_size(len(labels))

        def left(own: Any) -> Indices:
            # Samples that are held out for validation leave the lists.
            found = np.asarray(own, np.int64)
            return np.searchsorted(kept, found[np.isin(found, kept)])

        tested = any(test is not None for _, test in self._lists.values())
        sides = [(left(own), left(test or ())) for own, test in self._lists.values()]
        every = np.concatenate(list(chain.from_iterable(sides)))
        counts = np.bincount(every, minlength=len(labels))
        shared = int((counts > 1).sum())
        if shared:
            rank_zero_warn(
                f"{self!r}: {shared:,} of {len(labels):,} samples belong to several clients"
            )
        tell_left(self, int((counts == 0).sum()), len(labels), "as no list has them")
        return sides if tested else [own for own, _ in sides]


TO_JSON = (
    'python -c "import json, pickle, sys; '
    "json.dump([list(map(int, own)) for own in pickle.load(open(sys.argv[1], 'rb'))], "
    "open('lists.json', 'w'))\" FILE.pkl"
)


def _lists_of(path: Path) -> dict[str, tuple[Any, Any]]:
    """Return each client's training list and test list (None: it has no such list), in order."""
    if path.suffix in (".pkl", ".pickle"):
        raise UserError(
            f"The index lists {str(path)!r} are a pickle, which can run any program when it is "
            f"read. If you trust it, convert it to JSON: {TO_JSON}"
        )
    with refused(
        f"The index lists {str(path)!r} cannot be read",
        "Give a .json file with a list of lists of positions, or {client: list}, or a .npz file "
        "with an array per client.",
    ):
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                # NumPy calls unnamed arrays arr_0, arr_1, …
                found: Any = {name.removeprefix("arr_"): file[name] for name in file.files}
        else:
            found = json.loads(path.read_text("utf-8"))
        named = found if isinstance(found, Mapping) else dict(enumerate(found))
        pairs = {
            str(name): (own["train"], own.get("test")) if isinstance(own, Mapping) else (own, None)
            for name, own in named.items()
        }
        numbers = all(name.isdecimal() for name in pairs)
        assert all(len(own) for own, _ in pairs.values()), "a client has no training samples"
        return dict(sorted(pairs.items(), key=lambda item: int(item[0]) if numbers else item[0]))
