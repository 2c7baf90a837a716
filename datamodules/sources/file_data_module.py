"""The common part of all readers of files: clients by name, their test samples, and number, size
and hash of the files for the run's card.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from fl_lightning.accepted import NonNegativeInt
from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.read_ahead import Workers
from fl_lightning.datamodules.batches.sample_labels import MOST_CLASSES, classes_in
from fl_lightning.datamodules.batches.samples import DatasetSamples
from fl_lightning.datamodules.loaders import say
from fl_lightning.datamodules.partitions.client_tests import GroupTests
from fl_lightning.datamodules.partitions.flower_splits import Grouped
from fl_lightning.datamodules.partitions.partition import ByGroup
from fl_lightning.errors import UserError

# Number of clients whose samples are kept in memory.
KEPT = 1000
SHOWN = 20


class OfClients(Dataset[Any]):
    """Samples that are read one client at a time; the latest clients stay in memory.

    Args:
        sizes: number of samples of each client ``(m,)``; samples are numbered client by client.
        read: function that returns the x of all samples of a client.
        targets: labels of all samples ``(N,)``.
    """

    def __init__(
        self,
        sizes: NDArray[np.int64],
        read: Callable[[int], Iterable[Any]],
        targets: NDArray[np.int64],
    ) -> None:
        self.ends = np.cumsum(sizes)
        self.targets = targets
        self._read = read
        self._latest: OrderedDict[Hashable, Sequence[Any]] = OrderedDict()

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, i: int) -> Any:
        client = int(np.searchsorted(self.ends, i, side="right"))
        own = self._latest.get(client)
        if own is None:
            own = self._samples(client)
            # Threads may read in parallel, so another thread may have removed an entry already.
            while len(self._latest) >= KEPT:
                try:
                    self._latest.popitem(last=False)
                except KeyError:
                    break
            self._latest[client] = own
        return own[i - self._start(client)]

    def _start(self, client: int) -> int:
        return int(self.ends[client - 1]) if client else 0

    def _samples(self, client: int) -> Sequence[Any]:
        labels = self.targets[self._start(client) : self.ends[client]]
        return list(zip(self._read(client), labels.tolist(), strict=True))

    def keep_all(self) -> None:
        """Read every client now, because forked worker processes would each read their clients
        in each round.
        """
        for client in range(len(self.ends)):
            self._latest[client] = self._samples(client)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": OrderedDict()}


@dataclass
class Side:
    """Training, test or validation samples.

    ``names``: the clients' names; ``groups``: the client of each sample ``(N,)``; ``dataset`` has
    the labels as ``targets``, if there are labels.
    """

    names: list[str]
    groups: NDArray[np.int64]
    dataset: Dataset[Any]

    @property
    def labels(self) -> NDArray[np.int64] | None:
        return getattr(self.dataset, "targets", None)

    @classmethod
    def of_clients(
        cls,
        names: list[str],
        sizes: NDArray[np.int64],
        read: Callable[[int], Iterable[Any]],
        targets: NDArray[np.int64],
    ) -> Side:
        """Return samples that are read one client at a time; the arguments as in ``OfClients``."""
        groups = np.repeat(np.arange(len(names)), sizes)
        return cls(names, groups, OfClients(sizes, read, targets))


def ascending(names: Sequence[str]) -> list[int]:
    """Return the places of the names in ascending order, by number if all are numbers.

    >>> ascending(["10", "9"]), ascending(["b10", "b9"])
    ([1, 0], [0, 1])
    """
    # Python refuses to make a number of thousands of digits.
    if all(name.isdecimal() and len(name) < 100 for name in names):
        return sorted(range(len(names)), key=lambda i: (int(names[i]), names[i]))
    return sorted(range(len(names)), key=names.__getitem__)


class FileDataModule(FederatedDataModule):
    """A data module whose clients lie in files. Subclasses override ``read``.

    Args:
        tests: ``"own"``: test samples under a client's name are its own test set, and all of them
            together are the global one. ``"common"``: they are only the global test set. None:
            ``"own"`` if training and test files have the same client names.
    """

    default_partition = ByGroup()

    def __init__(
        self,
        tests: Literal["own", "common"] | None = None,
        num_workers: NonNegativeInt = 0,
        **arguments: Any,
    ) -> None:
        # A config such as `base` may give a number, but the files decide how many clients there
        # are.
        if arguments.get("partition") is None:
            arguments = {**arguments, "num_clients": None}
        super().__init__(**arguments)
        self.tests = tests
        self._workers = Workers(num_workers)
        self._files: list[Path] = []

    def read(self) -> tuple[Side, Side | None, Side | None]:
        """Return training, test and validation samples; set ``_files``, and optionally
        ``class_names``.
        """
        raise NotImplementedError  # abstract: each reader knows its own file format

    def tell(self, text: str) -> None:
        """Report a text once, before the run."""
        say(self.trainer, text)

    @classmethod
    def own_clients(cls, **arguments: Any) -> bool:
        """Return whether the data decide how many clients there are, so ``num_clients`` has no
        effect.
        """
        return arguments.get("partition") is None

    @classmethod
    def shape_of_samples(cls, **arguments: Any) -> tuple[int, ...] | None:
        """Return the shape of the first training sample; None for tokens."""
        _, sides = cls._first_read(arguments)
        try:
            x, _ = sides[0].dataset[0]
        except Exception:  # as in `_first_read`
            return None
        return tuple(x.shape) if x.is_floating_point() else None

    @classmethod
    def classes_of_samples(cls, **arguments: Any) -> int | None:
        """Return the number of classes, as the run counts them: those that only test samples have
        count, too. None if y are numbers to predict, or no labels of classes.
        """
        names, sides = cls._first_read(arguments)
        return classes_of(names, [side.labels for side in sides])

    @classmethod
    def _first_read(cls, arguments: Mapping[str, Any]) -> tuple[Sequence[str], list[Side]]:
        """Return the classes' names, and the training and test samples.

        Both are empty if an argument is wrong, which the parser reports.

        Raises:
            UserError: the files are wrong.
        """
        try:
            data = before_the_run(cls, arguments)
        except Exception:  # arguments are not checked yet
            return (), []
        try:
            train, test, _ = data.read()
        except UserError:
            raise
        except Exception:  # libraries raise many kinds
            return (), []
        return data.class_names, [train] if test is None else [train, test]

    def load(self) -> None:
        train, test, val = self.read()
        if not len(train.groups):
            raise UserError(f"{type(self).__name__}: the files have no training samples.")
        for side in (train, test, val):
            self._check_labels(side)
        self._tell_of_labels(train, test)
        self._without_empty(train)
        self.train_set = self._samples(train.dataset)
        self.val_set = None if val is None else self._samples(val.dataset)
        self.groups = train.groups
        if isinstance(self.partition, ByGroup | Grouped):
            self.client_names = train.names
        if test is None or not len(test.groups):
            return
        test = by_client(test)
        self.test_set = self._samples(test.dataset)
        if self._tests_are_own(train, test) and isinstance(self.partition, ByGroup):
            places = {name: i for i, name in enumerate(train.names)}
            of = np.array([places.get(name, -1) for name in test.names], np.int64)
            self.own_tests = GroupTests.of(self.test_set, train.groups, of[test.groups])

    def _samples(self, dataset: Any) -> DatasetSamples:
        return DatasetSamples(dataset, getattr(dataset, "targets", None), workers=self._workers)

    def _tests_are_own(self, train: Side, test: Side) -> bool:
        """Return whether test samples under a client's name are its own."""
        if self.tests is not None:
            return self.tests == "own"
        both = set(train.names) & set(test.names)
        if both and both != set(train.names) | set(test.names):
            self.tell(
                f"{len(both)} of {len(train.names)} clients' names occur among the "
                f"{len(test.names)} names of the test samples, which are tested on in common "
                "only; data.tests=own makes test samples of a client's name its own test set"
            )
            return False
        return bool(both)

    def _check_labels(self, side: Side | None) -> None:
        """Refuse labels that are not numbers of classes."""
        labels = None if side is None else side.labels
        if side is None or labels is None or labels.dtype.kind not in "iu" or not len(labels):
            return
        place = int(labels.argmax())
        if labels[place] >= MOST_CLASSES:
            raise UserError(
                f"{type(self).__name__}: client {side.names[side.groups[place]]!r} has the label "
                f"{labels[place]}, and classes are numbered from 0: number them anew."
            )
        if self.class_names and labels[place] >= len(self.class_names):
            raise UserError(
                f"{type(self).__name__}: client {side.names[side.groups[place]]!r} has the label "
                f"{labels[place]}, but there are {len(self.class_names)} classes, numbered from 0 "
                f"({', '.join(map(str, self.class_names[:SHOWN]))}). Mend the label, or name all "
                "classes."
            )

    def _without_empty(self, train: Side) -> None:
        """Number only the clients that have training samples."""
        sizes = np.bincount(train.groups, minlength=len(train.names))
        empty = np.flatnonzero(sizes == 0)
        if len(empty):
            first = ", ".join(train.names[i] for i in empty[:SHOWN])
            self.tell(f"{len(empty)} clients have no training samples, and no number: {first}")
            train.groups = (np.cumsum(sizes > 0) - 1)[train.groups]
            train.names = [name for name, size in zip(train.names, sizes, strict=True) if size]

    def _tell_of_labels(self, train: Side, test: Side | None) -> None:
        """Report which classes only the test samples have."""
        if train.labels is None or test is None or test.labels is None:
            return
        if train.labels.dtype.kind not in "iu":
            return
        more = np.setdiff1d(test.labels, train.labels)
        if len(more):
            numbers = ", ".join(map(str, more[:SHOWN].tolist()))
            self.tell(f"only test samples have the labels {numbers}; they count as classes")

    @property
    def num_classes(self) -> int | None:
        self._ready()
        sides = (self.train_set, self.test_set)
        return classes_of(self.class_names, [None if one is None else one.labels for one in sides])

    def card(self) -> dict[str, str]:
        facts = super().card()
        if self.class_names:
            names = list(self.class_names)[:SHOWN]
            more = ", …" if len(self.class_names) > SHOWN else ""
            facts["label map"] = ", ".join(f"{i} = {name}" for i, name in enumerate(names)) + more
        sizes = sorted((file.name, file.stat().st_size) for file in self._files if file.is_file())
        if sizes:
            total = sum(size for _, size in sizes)
            facts["data files"] = f"{len(sizes)}, {total:,} bytes"
            facts["files hash"] = hashlib.sha256(repr(sizes).encode()).hexdigest()[:16]
        return facts


def classes_of(names: Sequence[str], labels: Sequence[Any]) -> int | None:
    """Return the number of classes: of their names, or else of the labels of all sides; None:
    they are no classes, which the run refuses or predicts as numbers.
    """
    if names:
        return len(names)
    found = [own for own in labels if own is not None and len(own)]
    classes = classes_in(np.concatenate(found)) if found else None
    return None if classes is None else int(classes.max()) + 1


def by_client(side: Side) -> Side:
    """Return the samples client by client, each client's in the order of the data."""
    order = np.argsort(side.groups, kind="stable")
    if (np.diff(order) > 0).all():
        return side
    dataset: Any = Subset(side.dataset, order.tolist())
    if side.labels is not None:
        dataset.targets = side.labels[order]
    return Side(side.names, side.groups[order], dataset)


def before_the_run(cls: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a data module that is made to ask for its samples' sizes, and that reports nothing.

    Args:
        arguments: as in a config, where objects are still texts; the class's own plain ones count.
    """
    own = set(inspect.signature(cls.__init__).parameters) - {"partition", "num_clients"}
    given = {name: arguments[name] for name in own if arguments.get(name) is not None}
    data = cls(**given)
    vars(data)["tell"] = lambda text: None
    return data


def missing_package(package: str, extra: str) -> UserError:
    return UserError(
        f"This data module reads files with {package}, which is not installed: pip install "
        f"'fl-lightning[{extra}]'."
    )


def no_class(labels: NDArray[Any]) -> int | None:
    """Return the place of the first label ``(n,)`` that is negative or fractional, or None."""
    with np.errstate(invalid="ignore"):
        # Numbers beyond int64 become negative.
        whole = labels.astype(np.int64)
    wrong = np.flatnonzero((whole < 0) | (whole != labels))
    return int(wrong[0]) if len(wrong) else None


def not_finite(x: NDArray[Any]) -> int | None:
    """Return the first of the samples ``(n, …)`` that has a number beyond single precision."""
    if x.dtype.kind != "f" or not x.size:
        return None
    with np.errstate(over="ignore"):
        single = x.astype(np.float32, copy=False)
    wrong = np.flatnonzero(~np.isfinite(single.reshape(len(x), -1)).all(1))
    return int(wrong[0]) if len(wrong) else None
