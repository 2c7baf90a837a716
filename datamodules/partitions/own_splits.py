"""Splits by given shares, mixtures of two splits, and index lists that another tool wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.accepted import PositiveInt, UnitInterval
from fl_lightning.datamodules.partitions.partition import Indices, Partition, need_samples
from fl_lightning.datamodules.partitions.partition_rng import by_class, check_same, rows, tell_left
from fl_lightning.errors import UserError
from fl_lightning.machine.lightning import rank_zero_warn
from fl_lightning.sampling import generator


class LabelShares(Partition):
    """Each client's shares of the classes come from a table.

    Args:
        shares: one row per client, one share per class, each row with the sum 1; a list of rows or
            the path of a ``.npy`` file.
        sizes: number of samples of each client; None: ⌊N / m⌋ each.
    """

    def __init__(
        self, shares: list[list[float]] | str, sizes: list[PositiveInt] | None = None
    ) -> None:
        self.shares = shares
        self.sizes = sizes
        table = rows(shares)
        wrong = table.ndim != 2 or table.dtype.kind not in "iuf"
        if wrong or (table < 0).any() or not np.allclose(table.sum(axis=1), 1, atol=1e-6):
            raise UserError(
                "LabelShares' shares have to be one row per client, of shares of at least 0 with "
                f"the sum 1 each; they have the shape {table.shape}."
            )
        if sizes is not None and len(sizes) != len(table):
            raise UserError(
                f"LabelShares has {len(table)} rows of shares and {len(sizes)} sizes: give one "
                "size per row."
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

    def __repr__(self) -> str:
        of = self.shares if isinstance(self.shares, str) else f"{len(self.shares)} rows"
        return f"LabelShares({of})"


def _apportioned(size: int, row: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return whole numbers with the sum ``size``; the largest remainders are rounded up."""
    quota = size * row
    whole = np.floor(quota + 1e-9).astype(np.int64)
    order = np.argsort(whole - quota, kind="stable")
    whole[order[: size - whole.sum()]] += 1
    return whole


class Mixed(Partition):
    """A share of all samples is divided evenly at random, and the rest by another split.

    Args:
        iid: the share.
        partition: the split of the rest; a client's list has its part of the rest first, then its
            even part.
    """

    def __init__(self, iid: UnitInterval, partition: Partition) -> None:
        self.iid = iid
        self.partition = partition

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

    A ``.json`` file with a list of lists, ``{client: list}``, ``{client: {"train": …, "test": …}}``
    or ``{"train": [[…]], "test": [[…]]}``; a ``.npz`` file with one array per client; or a folder
    with ``<client>.npy``, ``.json`` or ``.txt`` (one position per line). Clients are in the order
    of their numbers, or of their names.

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
        self._names, self._lists, self._tests = _read(Path(path).expanduser())

    @property
    def clients(self) -> int | None:
        return len(self._lists)

    @property
    def names(self) -> Sequence[str]:
        return [] if all(name.isdecimal() for name in self._names) else self._names

    def check_size(self, samples: int) -> None:
        for name, own, test in zip(self._names, self._lists, self._tests, strict=True):
            self._checked(name, own, samples, None)
            self._checked(name, test or [], samples, None)

    def restrict(self, kept: Indices) -> Partition:
        restricted = Imported(self.path)
        # ``kept`` counts among the samples that an earlier restriction left.
        restricted._kept = kept if self._kept is None else self._kept[kept]
        return restricted

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Any]:
        check_same(self, num_clients, len(self._lists))
        total = len(labels) if self._kept is None else int(self._kept.max(initial=0)) + 1
        places = None
        if self._kept is not None:
            places = np.full(total, -1)
            places[self._kept] = np.arange(len(self._kept))
        found: list[Any] = []
        everything: list[Indices] = []
        for name, given, test in zip(self._names, self._lists, self._tests, strict=True):
            own = self._checked(name, given, total, places)
            held = self._checked(name, test or [], total, places)
            both = np.intersect1d(own, held)
            if len(both):
                raise self._wrong(name, f"trains on position {both[0]} and is tested on it")
            if not len(own):
                raise self._wrong(name, "has no training samples")
            everything += [own, held]
            found.append(own if test is None else (own, held))
        self._tell(np.concatenate(everything), len(labels))
        return found

    def _checked(
        self, name: str, given: Any, total: int, places: Indices | None
    ) -> NDArray[np.int64]:
        """Return a client's positions, after checking that all exist."""
        try:
            own = np.asarray(given)
        except ValueError:
            own = np.asarray(given, dtype=object)
        if own.size == 0:
            return np.zeros(0, np.int64)
        whole = own.dtype.kind in "iu"
        if own.dtype.kind == "f":
            whole = bool((own % 1 == 0).all())
        if own.ndim != 1 or not whole:
            raise self._wrong(name, f"has positions of type {own.dtype} and shape {own.shape}")
        own = own.astype(np.int64)
        if own.min() < 0 or (places is None and own.max() >= total):
            place = int(own.min() if own.min() < 0 else own.max())
            raise self._wrong(name, f"has position {place}, and there are {total} samples")
        values, counts = np.unique(own, return_counts=True)
        if counts.max() > 1:
            raise self._wrong(name, f"has position {values[counts.argmax()]} twice in one list")
        if places is None:
            return own
        # Remove the samples that are held out for validation from the lists.
        inside = own[own < len(places)]
        left: NDArray[np.int64] = places[inside]
        return left[left >= 0]

    def _wrong(self, name: str, what: str) -> UserError:
        return UserError(
            f"The index lists in {self.path!r}: client {name} {what}. Give whole numbers from 0, "
            "each once, of samples in the training data (with pooled=True: in training data "
            "followed by test data)."
        )

    def _tell(self, used: Indices, total: int) -> None:
        counts = np.bincount(used, minlength=total)
        shared = int((counts > 1).sum())
        if shared:
            rank_zero_warn(f"{self!r}: {shared:,} of {total:,} samples belong to several clients")
        tell_left(self, int((counts == 0).sum()), total, "as no list has them")

    def __repr__(self) -> str:
        return f"Imported({self.path!r})"


TO_JSON = (
    'python -c "import json, pickle, sys; '
    "json.dump([list(map(int, own)) for own in pickle.load(open(sys.argv[1], 'rb'))], "
    "open('lists.json', 'w'))\" FILE.pkl"
)


def _read(path: Path) -> tuple[list[str], list[Any], list[Any]]:
    """Return the clients' names, training lists and test lists (None: no such list), in order."""
    if path.suffix in (".pkl", ".pickle"):
        raise UserError(
            f"The index lists {str(path)!r} are a pickle, which can run any program when it is "
            f"read. If you trust it, convert it to JSON: {TO_JSON}"
        )
    if not path.exists():
        raise UserError(f"The index lists {str(path)!r} are not there: give a file or a folder.")
    found: Any = _of_folder(path) if path.is_dir() else _one(path)
    if isinstance(found, Mapping) and set(found) == {"train", "test"}:
        train, test = found["train"], found["test"]
        for side, lists in found.items():
            if not isinstance(lists, Mapping | list):
                raise UserError(
                    f"The index lists {str(path)!r} have {str(lists)[:60]} as {side!r}: give a "
                    "list of lists of positions, or {client: list}."
                )
        pairs = train if isinstance(train, Mapping) else dict(enumerate(train))
        tests = test if isinstance(test, Mapping) else dict(enumerate(test))
        both_lists = not isinstance(train, Mapping) and len(pairs) != len(tests)
        if both_lists or set(tests) - set(pairs):
            raise UserError(
                f"The index lists {str(path)!r} have {len(pairs)} clients in train and "
                f"{len(tests)} in test, which do not belong together: give a test list per client "
                "in the same order or by the same names; it may be empty."
            )
        found = {k: {"train": own, "test": tests.get(k, [])} for k, own in pairs.items()}
    elif isinstance(found, list):
        found = dict(enumerate(found))
    if not isinstance(found, Mapping) or not found:
        raise UserError(
            f"The index lists {str(path)!r} have no clients: give a list of lists of positions, or "
            "{client: list}."
        )
    named = {_plain(str(name)): own for name, own in found.items()}
    if len(named) < len(found):
        raise UserError(
            f"The index lists {str(path)!r} have clients with one name, such as 'arr_0' and '0': "
            "rename them."
        )
    names = list(named)
    # Python refuses to make a number of thousands of digits.
    numbers = all(name.isdecimal() and len(name) < 100 for name in names)
    names.sort(key=int if numbers else str)
    lists = []
    tests_of = []
    for name in names:
        own = named[name]
        pair = own if isinstance(own, Mapping) else {"train": own, "test": None}
        lists.append(pair.get("train", []))
        tests_of.append(pair.get("test"))
    if any(test is not None for test in tests_of):
        tests_of = [[] if test is None else test for test in tests_of]
    return names, lists, tests_of


def _of_folder(path: Path) -> dict[str, Any]:
    """The lists of a folder with one file per client."""
    accepted = (".npy", ".json", ".txt")
    found: dict[str, Any] = {}
    for file in sorted(f for f in path.iterdir() if f.suffix in accepted and f.name[0] != "."):
        if file.stem in found:
            raise UserError(
                f"The index lists {str(path)!r} have two files of client {file.stem}: remove one "
                f"of them, such as {file.name}."
            )
        found[file.stem] = _one(file)
    return found


def _plain(name: str) -> str:
    """Return NumPy's name of an unnamed array (arr_0, arr_1, …) without its prefix."""
    return name.removeprefix("arr_") if name.removeprefix("arr_").isdecimal() else name


def _one(path: Path) -> Any:
    """What a file holds."""
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text("utf-8"))
        if path.suffix == ".txt":
            return [int(line) for line in path.read_text("utf-8").split()]
        if path.suffix == ".npy":
            return np.load(path, allow_pickle=False)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
    except Exception as error:  # NumPy raises many kinds of errors for damaged files
        raise UserError(
            f"The index lists {str(path)!r} cannot be read: {str(error)[:200]}."
        ) from None
    raise UserError(
        f"The index lists {str(path)!r} are of an unknown kind: give .json, .npz, or a folder of "
        ".npy, .json or .txt files."
    )
