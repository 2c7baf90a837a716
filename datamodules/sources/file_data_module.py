"""The common part of all readers of files: clients by name, their test samples, and number, size
and hash of the files for the run's card.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.read_ahead import Workers
from fl_lightning.datamodules.batches.samples import DatasetSamples
from fl_lightning.datamodules.loaders import say
from fl_lightning.datamodules.partitions.client_tests import GroupTests
from fl_lightning.datamodules.partitions.flower_splits import Grouped
from fl_lightning.datamodules.partitions.partition import ByGroup
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import NonNegativeInt

# The content of an index may change from version to version.
FORMAT = 3
FOLDER = ".fl_lightning"

Arrays = dict[str, NDArray[Any]]


def state_of(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return name, size and time of modification (ns) of each file."""
    facts = []
    # Resolve each folder once, not each file: a folder may hold one file per client, and resolving
    # a path takes ten times as long as everything else here.
    parents = {file.parent for file in files}
    folders = {parent: os.path.realpath(parent) for parent in parents}
    for file in files:
        stat = file.stat()
        name = os.path.join(folders[file.parent], file.name)
        facts.append((name, stat.st_size, stat.st_mtime_ns))
    return facts


def indexed(
    beside: Path,
    files: Sequence[Path],
    options: dict[str, Any],
    make: Callable[[], Arrays],
    tell: Callable[[str], None],
) -> Arrays:
    """Return the index of ``files``: the existing one, or a new one, which is stored.

    If a file changes, it gets another index. A damaged index is made again.

    Args:
        beside: the folder of the data. If this folder cannot be written to, the index lies in the
            user's cache folder.
        options: the reader's options on which the index depends.
        make: function that reads the files.
        tell: function that reports where a new index lies.
    """
    key = json.dumps([FORMAT, state_of(files), options], sort_keys=True)
    name = f"index-{hashlib.sha256(key.encode()).hexdigest()[:24]}.npz"
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fl_lightning"
    folders = [beside / FOLDER, cache]
    for folder in folders:
        found = _read(folder / name)
        if found is not None:
            return found
    made = make()
    if json.dumps([FORMAT, state_of(files), options], sort_keys=True) != key:
        raise UserError(
            f"The data in {str(beside)!r} changed while they were read. Start again when nothing "
            "writes to them."
        )
    for folder in folders:
        try:
            _write(folder / name, made)
        except OSError:
            continue
        tell(f"the index of these data is {str(folder / name)!r}; later runs begin with it")
        break
    return made


def _write(path: Path, made: Arrays) -> None:
    """Write an index whole or not at all; processes that start together do not disturb each
    other, and a killed one leaves a folder that no later run reads.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as aside:
        np.savez(Path(aside, path.name), **made)  # type: ignore[arg-type]
        Path(aside, path.name).replace(path)


def _read(path: Path) -> Arrays | None:
    """Return an index whose checksums are right, or None if it is missing or damaged."""
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception:  # NumPy and zipfile raise many kinds of errors for damaged files
        return None


def texts(values: Sequence[str]) -> NDArray[np.uint8]:
    """Return texts as bytes, for an index."""
    return np.frombuffer(json.dumps(list(values)).encode(), np.uint8)


def texts_of(array: NDArray[np.uint8]) -> list[str]:
    """The texts again."""
    found: list[str] = json.loads(array.tobytes().decode())
    return found


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
        self._latest: dict[int, Sequence[Any]] = {}

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, i: int) -> Any:
        client = int(np.searchsorted(self.ends, i, side="right"))
        own = self._latest.get(client)
        if own is None:
            own = self._samples(client)
            if len(self._latest) >= KEPT:
                self._latest.clear()
            self._latest[client] = own
        return own[i - self._start(client)]

    def _start(self, client: int) -> int:
        return int(self.ends[client - 1]) if client else 0

    def _samples(self, client: int) -> Sequence[Any]:
        labels = self.targets[self._start(client) : self.ends[client]]
        return list(zip(self._read(client), labels.tolist(), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": {}}


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
    def of_index(cls, index: Arrays, side: str, read: Callable[[int], Iterable[Any]]) -> Side:
        """Return samples that are read one client at a time, as in ``OfClients``."""
        names = texts_of(index[f"{side} names"])
        sizes = index[f"{side} sizes"]
        groups = np.repeat(np.arange(len(names)), sizes)
        return cls(names, groups, OfClients(sizes, read, index[f"{side} labels"]))


def indexed_side(side: str, names: list[str], labels: Sequence[NDArray[np.int64]]) -> Arrays:
    """Return an index of clients, given the labels ``(n,)`` of each."""
    return {
        f"{side} names": texts(names),
        f"{side} sizes": np.array([len(own) for own in labels], np.int64),
        f"{side} labels": np.concatenate([np.zeros(0, np.int64), *labels]),
    }


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

    @abstractmethod
    def read(self) -> tuple[Side, Side | None, Side | None]:
        """Return training, test and validation samples; set ``_files`` and ``class_names``."""

    def tell(self, text: str) -> None:
        """Report a text once, before the run."""
        say(self.trainer, text)

    @classmethod
    def own_clients(cls, **arguments: Any) -> bool:
        """Return whether the data decide how many clients there are."""
        return arguments.get("partition") is None

    @classmethod
    def shape_of_samples(cls, **arguments: Any) -> tuple[int, ...] | None:
        """Return the shape of the first training sample; None for tokens."""
        data = first_read(cls, arguments)
        try:
            x, _ = data.train_set.read.dataset[0]
        except Exception:  # as in `first_read`
            return None
        return tuple(x.shape) if x.is_floating_point() else None

    @classmethod
    def classes_of_samples(cls, **arguments: Any) -> int | None:
        """Return the number of classes, as the run counts them: those that only test samples have
        count, too. None if y are numbers to predict, or no labels of classes.
        """
        data = first_read(cls, arguments)
        return None if data is None else data._classes()

    def load(self) -> None:
        train, test, val = self.read()
        if not len(train.groups):
            raise UserError(f"{type(self).__name__}: the files have no training samples.")
        self._without_empty(train)
        self.train_set = self._samples(train.dataset)
        self.val_set = None if val is None else self._samples(val.dataset)
        self.groups = train.groups
        if isinstance(self.partition, ByGroup | Grouped):
            self.client_names = train.names
        if test is None or not len(test.groups):
            return
        self.test_set = self._samples(test.dataset)
        if self._tests_are_own(train, test) and isinstance(self.partition, ByGroup):
            places = {name: i for i, name in enumerate(train.names)}
            of = np.array([places.get(name, -1) for name in test.names], np.int64)
            self.own_tests = GroupTests.of(self.test_set, train.groups, of[test.groups])

    def _samples(self, dataset: Any) -> DatasetSamples:
        return DatasetSamples(dataset, getattr(dataset, "targets", None), workers=self._workers)

    def _tests_are_own(self, train: Side, test: Side) -> bool:
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

    def _without_empty(self, train: Side) -> None:
        sizes = np.bincount(train.groups, minlength=len(train.names))
        empty = np.flatnonzero(sizes == 0)
        if len(empty):
            first = ", ".join(train.names[i] for i in empty[:SHOWN])
            self.tell(f"{len(empty)} clients have no training samples, and no number: {first}")
            train.groups = (np.cumsum(sizes > 0) - 1)[train.groups]
            train.names = [name for name, size in zip(train.names, sizes, strict=True) if size]

    @property
    def num_classes(self) -> int | None:
        self._ready()
        return self._classes()

    def _classes(self) -> int | None:
        if self.class_names:
            return len(self.class_names)
        sets = [one for one in (self.train_set, self.test_set) if one is not None]
        labels = [one.labels for one in sets if one.labels is not None]
        return (
            None if not labels or len(labels) < len(sets) else max(int(y.max()) for y in labels) + 1
        )

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


def first_read(cls: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a data module that has read its data, and reported nothing, to ask for their sizes.

    None: an argument is wrong, and the parser will tell.

    Args:
        arguments: as in a config, where objects are still texts; the class's own plain ones count.

    Raises:
        UserError: the files are wrong.
    """
    own = set(inspect.signature(cls.__init__).parameters) - {"partition", "num_clients"}
    try:
        data = cls(**{name: arguments[name] for name in own if arguments.get(name) is not None})
    except Exception:  # arguments are not checked yet
        return None
    vars(data)["tell"] = lambda text: None
    try:
        data.load()
    except UserError:
        raise
    except Exception:  # libraries raise many kinds
        return None
    return data


def whole_labels(labels: NDArray[Any], where: str) -> NDArray[np.int64]:
    """Return labels ``(n,)`` or ``(n, 1)`` as int64 ``(n,)``.

    Raises:
        UserError: one is negative or not a whole number; ``where`` is the place in the error.
    """
    labels = labels.ravel() if labels.shape[1:] == (1,) else labels
    if labels.ndim != 1 or labels.dtype.kind not in "iubf":
        what = f"labels {labels.dtype} of shape {labels.shape}"
        raise UserError(f"{where} has {what}: give one whole number per sample.")
    with np.errstate(invalid="ignore"):
        # Numbers beyond int64 become negative.
        whole = labels.astype(np.int64)
    wrong = (whole < 0) | (whole != labels)
    if wrong.any():
        place = int(wrong.argmax())
        raise UserError(
            f"{where} has the label {labels[place]} in sample {place}: classes are whole numbers "
            "from 0."
        )
    return whole


def check_finite(x: NDArray[Any], where: str) -> None:
    """Refuse samples ``(n, …)`` that are not numbers within single precision.

    Raises:
        UserError: with the first sample that is not; ``where`` is the place in the error.
    """
    if x.dtype.kind not in "iufb":
        raise UserError(f"{where} has x {x.dtype}, but x has to be numbers.")
    with np.errstate(over="ignore"):
        single = x.astype(np.float32, copy=False)
    wrong = ~np.isfinite(single.reshape(len(x), -1)).all(1) if x.size else np.zeros(0, bool)
    if wrong.any():
        raise UserError(
            f"{where} has an x in sample {wrong.argmax()} that is not finite in single precision: "
            "mend the sample, or leave it out."
        )
