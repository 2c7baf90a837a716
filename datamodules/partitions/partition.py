"""Partitions decide which client has which training samples.

Partitions are pure functions of (labels, number of clients, seed). If possible, each client is
drawn on demand: with replacement, a million clients cost nothing until they are sampled. Partitions
of skewed labels, such as Dirichlet, are in ``label_skew.py``.
"""

from __future__ import annotations

import hashlib
import inspect
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import Checked, NonNegativeFloat, checked
from fl_lightning.machine.lightning import rank_zero_warn
from fl_lightning.sampling import generator

Indices = NDArray[np.int64]
SHORT = reprlib.Repr()
SHORT.maxlist = 4
SHORT.maxstring = 200
SHORT.maxother = 60


class LazyClients(Sequence[Indices]):
    """The clients' index arrays, each drawn when it is asked for.

    ``sizes`` are the clients' numbers of samples ``(m,)``; ``draw(i)`` gives client i's indices,
    always the same; ``recipe`` names everything the draw depends on (for the partition's hash).
    """

    def __init__(self, sizes: Indices, draw: Callable[[int], Indices], recipe: str) -> None:
        self.sizes = sizes
        self.draw = draw
        self.recipe = recipe

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, client: Any) -> Any:
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return self.draw(client)


class Partition(Checked, ABC):
    """Base class of partitions: override ``split``.

    The constructor's arguments have to be kept as attributes of the same name.

    >>> class EverySoMany(Partition):
    ...     needs_labels = False
    ...     def split(self, labels, num_clients, seed):
    ...         return [np.arange(i, len(labels), num_clients) for i in range(num_clients)]
    >>> [client.tolist() for client in EverySoMany().split(np.zeros(5), 2, seed=0)]
    [[0, 2, 4], [1, 3]]
    """

    needs_labels = True

    @property
    def clients(self) -> int | None:
        """Return the number of clients if the partition itself fixes it, else None."""
        return None

    @abstractmethod
    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Any]:
        """Return one index array per client: positions in ``labels`` ``(N,)``; the same for the
        same three arguments. Return tuples ``(train, test)`` instead to give each client test
        samples, too.

        Draw random numbers only from ``fl_lightning.sampling.generator(seed, "partition", …)``.

        Raises:
            UserError: a client would be left without samples.
        """

    @property
    def names(self) -> Sequence[str]:
        """Return the clients' names, if the partition itself names them."""
        return []

    def bound(self, data: Any) -> Partition:
        """Return the partition with what it reads from a data module that has been loaded."""
        return self

    def check_size(self, samples: int) -> None:
        """Refuse a number of training samples that does not fit, before any of them are held out.

        Raises:
            UserError: naming what does not fit.
        """

    def restrict(self, kept: Indices) -> Partition:
        """Return the partition of the samples ``kept``; the others are held out."""
        return self

    def __repr__(self) -> str:
        words = []
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name, None)
            # The text of a function has its address, which differs between runs.
            shown = getattr(value, "__qualname__", None) or SHORT.repr(value)
            if shown != repr(parameter.default):
                words.append(f"{name}={shown}")
        return f"{type(self).__name__}({', '.join(words)})"


def need_samples(num_clients: int, samples: int) -> None:
    if not 1 <= num_clients <= samples:
        raise UserError(
            f"num_clients is {num_clients}, but there are {samples} training samples, and each "
            f"client needs at least one of its own: give a number from 1 to {samples}, or a "
            "partition with replacement=True and samples_per_client."
        )


class IID(Partition):
    """A shuffled split into equal parts, whose sizes differ by at most one."""

    needs_labels = False

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        need_samples(num_clients, len(labels))
        return np.array_split(generator(seed, "partition").permutation(len(labels)), num_clients)


class Contiguous(Partition):
    """Samples in the order of the data, cut into equal pieces; of a text, one part after the other.

    >>> [client.tolist() for client in Contiguous().split(np.zeros(5, np.int64), 2, seed=0)]
    [[0, 1, 2], [3, 4]]
    """

    needs_labels = False

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        need_samples(num_clients, len(labels))
        return np.array_split(np.arange(len(labels)), num_clients)


class SortedShards(Partition):
    """Samples sorted by label (stable), cut into equal contiguous pieces (FedALS, 2024)."""

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        need_samples(num_clients, len(labels))
        return np.array_split(np.argsort(labels, kind="stable"), num_clients)


@checked
@dataclass(repr=False, eq=False)
class QuantitySkew(Partition):
    """Sizes proportional to lognormal(0, sigma), at least one; the samples are iid."""

    needs_labels = False

    sigma: NonNegativeFloat

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        need_samples(num_clients, len(labels))
        rng = generator(seed, "partition")
        sizes = _apportion(len(labels), np.exp(self.sigma * rng.standard_normal(num_clients)))
        return np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1])


def _apportion(total: int, weights: NDArray[np.float64]) -> Indices:
    """Return whole numbers from 1 with the sum ``total``, nearly as the ``weights``."""
    weights = weights / weights.max()
    # A client whose share would be below one sample gets one sample. Giving one sample reduces what
    # is left for the other clients, so repeat. Each pass adds at least one client with one sample,
    # so the loop ends.
    ones = np.zeros(len(weights), dtype=bool)
    while True:
        rest = np.where(ones, 0.0, weights)
        quota = np.where(ones, 1.0, rest * ((total - ones.sum()) / rest.sum()))
        small = quota < 1 - 1e-9
        if not small.any():
            break
        ones |= small
    sizes = np.floor(quota + 1e-9).astype(np.int64)
    order = np.argsort(sizes - quota, kind="stable")
    sizes[order[: total - int(sizes.sum())]] += 1
    return sizes


class ByGroup(Partition):
    """The data's own clients: one for each value of ``groups`` ``(N,)``, whole numbers or names.

    ``groups=None``: the groups of the data set (``HumanActivity``: the subjects).
    """

    needs_labels = False

    def __init__(self, groups: Sequence[int] | Sequence[str] | None = None) -> None:
        self.groups: NDArray[Any] | None = None
        if groups is not None:
            self.groups = groups_of("ByGroup", groups)

    def bound(self, data: Any) -> Partition:
        if self.groups is not None:
            return self
        if data.groups is None:
            raise no_groups(self, data)
        return ByGroup(data.groups.tolist())

    @property
    def clients(self) -> int | None:
        return None if self.groups is None else len(np.unique(self.groups))

    @property
    def names(self) -> list[str]:
        """Return the clients' names, if groups have names and not numbers."""
        if self.groups is None or self.groups.dtype.kind not in "UO":
            return []
        return [str(name) for name in np.unique(self.groups)]

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        if self.groups is None:
            raise no_groups(self)
        self.check_size(len(labels))
        _, group, sizes = np.unique(self.groups, return_inverse=True, return_counts=True)
        check_same(self, num_clients, len(sizes))
        # A list of a million arrays would take seconds, and a hundred bytes per client.
        order = np.argsort(group, kind="stable")
        return LazyClients(sizes, partial(_part, order, np.cumsum(sizes), sizes), "")

    def check_size(self, samples: int) -> None:
        if self.groups is not None:
            check_one_each(self, "groups", self.groups, samples)

    def restrict(self, kept: Indices) -> Partition:
        return self if self.groups is None else ByGroup(cast(Any, self.groups[kept]))


def check_same(owner: Partition, num_clients: int, own: int) -> None:
    """Refuse a number of clients that differs from the split's own."""
    if num_clients != own:
        raise UserError(
            f"num_clients is {num_clients}, but the partition {type(owner).__name__} has {own} "
            f"clients: give {own}, or null."
        )


def check_one_each(owner: Partition, name: str, values: Any, samples: int) -> None:
    """Refuse an argument ``name`` that has not one value per training sample."""
    if np.shape(values) != (samples,):
        raise UserError(
            f"{type(owner).__name__}'s {name} have the shape {np.shape(values)}: give one for each "
            f"of the {samples} training samples."
        )


def groups_of(name: str, groups: Any) -> NDArray[Any]:
    """Return the group of each sample ``(N,)``.

    Raises:
        UserError: a sample has no group.
    """
    found = np.asarray(cast(ArrayLike, groups))
    missing = [i for i, one in enumerate(found.tolist()) if one is None or one != one]
    if missing:
        raise UserError(
            f"{name}'s groups have {found[missing[0]]} for sample {missing[0]}: give each sample "
            "a group, or leave it out."
        )
    return found


def no_groups(partition: Partition, data: Any = None) -> UserError:
    whose = "this data set" if data is None else type(data).__name__
    return UserError(
        f"The partition {partition!r} has groups=None, but {whose} brings no groups: give groups, "
        "one value per training sample, or another partition such as IID."
    )


def _part(order: Indices, ends: Indices, sizes: Indices, client: int) -> Indices:
    return order[ends[client] - sizes[client] : ends[client]]


class Saved(Partition):
    """A split written by ``FederatedDataModule.save_partition``: the same clients for any seed."""

    needs_labels = False

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        with (
            refused(
                f"The partition's file {self.path!r} is not there, damaged, or was not written by "
                "save_partition",
                "Give another file, or save the partition again.",
            ),
            np.load(self.path, allow_pickle=False) as file,
        ):
            self._ends = file["ends"]
            self._indices = file["indices"]
            self._labels = str(file["labels"])
            self._kept = str(file["kept"])
            self._tests: list[Indices] | None = None
            if "test_ends" in file:
                self._tests = np.split(file["test_indices"], file["test_ends"][:-1])

    @property
    def clients(self) -> int | None:
        return len(self._ends)

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Any]:
        if digest(labels) != self._labels:
            raise UserError(
                f"The partition in {self.path!r} was made for other data (the training labels "
                "differ): give the data set, val_fraction and seed that it was made with, or "
                "another partition."
            )
        check_same(self, num_clients, len(self._ends))
        clients = np.split(self._indices, self._ends[:-1])
        return clients if self._tests is None else list(zip(clients, self._tests, strict=True))

    def restrict(self, kept: Indices) -> Partition:
        if self._kept != digest(kept):
            raise UserError(
                f"The partition in {self.path!r} was made when other samples were held out for "
                "validation: give the val_fraction and the seed that it was made with "
                "(--data.seed), or another partition."
            )
        return self


def digest(array: NDArray[Any]) -> str:
    """Return sixteen hexadecimal digits of an array's content."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def positions(given: Any) -> NDArray[Any]:
    """Return a client's indices as an array."""
    try:
        return np.asarray(given)
    except ValueError:
        # Lists of different lengths: the next check reports that these are not whole numbers.
        return np.asarray(given, dtype=object)


def check_client(client: int, indices: Any, total: int) -> None:
    """Refuse a client without indices, or with others than whole numbers below ``total``."""
    array = positions(indices)
    if array.ndim != 1 or len(array) == 0:
        raise UserError(
            f"Client {client} has no samples (indices of shape {array.shape}): give each at least "
            "one."
        )
    check_positions(f"Client {client}", array, total)


def check_positions(whose: str, array: NDArray[Any], total: int) -> None:
    """Refuse positions ``(n,)`` that are no whole numbers from 0 to below ``total``."""
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= total:
        odd = [one for one in array.tolist() if type(one) is not int or not 0 <= one < total]
        raise UserError(
            f"{whose} has sample indices of type {array.dtype}, such as {odd[0]!r:.60}: give whole "
            f"numbers from 0 to {total - 1}."
        )


def own_or_grouped(
    partition: Partition | None, group: str | None, arguments: Mapping[str, Any]
) -> Partition | None:
    """Return the split by the column ``group``; None if the arguments give the clients."""
    if partition is not None or arguments.get("clients") is not None:
        return partition
    return IID() if group is None else ByGroup()


Stream = np.random.Generator | np.random.RandomState


def stream(seed: int, tool_seed: int | None, source: str = "flwr") -> Stream:
    """Return the stream from which a split draws, in the order that its class describes.

    Args:
        seed: the run's seed.
        tool_seed: seed of the other tool, whose own generator is then used; None: the run's.
        source: the tool. flwr-datasets uses NumPy's default generator, the others the older one.
    """
    if tool_seed is None:
        return generator(seed, "partition")
    if source == "flwr":
        return np.random.default_rng(tool_seed)
    return np.random.RandomState(tool_seed)


def integers(r: Stream, low: int, high: int, size: int | None = None) -> Any:
    """Return whole numbers from ``low`` to below ``high``."""
    if isinstance(r, np.random.RandomState):
        return r.randint(low, high, size)
    return r.integers(low, high, size)


def by_class(labels: Indices) -> tuple[Indices, list[Indices]]:
    """Return the classes that occur, ascending, and the positions of each, ascending."""
    classes, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    return classes, np.split(order, np.cumsum(counts)[:-1])


def shuffled(r: Stream, clients: list[Any]) -> list[Indices]:
    """Return each client's list in another order."""
    for own in clients:
        r.shuffle(own)
    return as_arrays(clients)


def as_arrays(clients: list[Any]) -> list[Indices]:
    return [np.asarray(own, np.int64) for own in clients]


def tested(owner: Partition, r: Stream, clients: list[Any], source: str, share: float) -> list[Any]:
    """Return each client's list cut into training and test samples, as the source does.

    Raises:
        UserError: a client has too few samples for a test sample, or none to train on.
    """
    if not share:
        return as_arrays(clients)
    pairs: list[tuple[Indices, Indices]] = []
    for client, own in enumerate(as_arrays(clients)):
        n = len(own)
        if source == "pfllib":
            # This repeats scikit-learn's train_test_split, which PFLlib calls.
            held = n - int(np.floor((1 - share) * n))
            places = r.permutation(n)
            pair = (own[places[held:]], own[places[:held]])
        else:
            r.shuffle(own)
            held = int(share * n)
            pair = (own[held:], own[:held])
        if not len(pair[0]) or not len(pair[1]):
            raise UserError(
                f"{type(owner).__name__}'s test_share is {share:g}: client {client} has {n} "
                f"samples, of which {len(pair[1])} would be test samples. Give another share, or "
                "a split in which every client has more samples."
            )
        pairs.append(pair)
    return pairs


def check_one_of(owner: Partition, **options: Any) -> None:
    """Refuse several of these options, and none of them."""
    if sum(value is not None for value in options.values()) != 1:
        raise UserError(
            f"{type(owner).__name__} needs one of the arguments {' and '.join(options)}: give "
            "exactly one of them."
        )


def check_classes(owner: Partition, classes: int, there: int) -> None:
    """Refuse more classes per client than there are."""
    if classes > there:
        raise UserError(
            f"{type(owner).__name__}'s classes is {classes}, but the training data have {there}: "
            f"give a number from 1 to {there}."
        )


def check_share(owner: Partition, share: float, source: str) -> None:
    """Refuse a share of test samples that the source does not support."""
    if share and source not in ("pfllib", "fl-bench"):
        raise UserError(
            f"{type(owner).__name__}'s test_share is {share:g}, but source is {source!r}, and only "
            "source='pfllib' and 'fl-bench' have a test_share: give the data module's "
            f"client_test_fraction={share:g} in its place."
        )


def check_none_empty(owner: Partition, clients: list[Any], mend: str) -> None:
    """Refuse a split that leaves a client without samples."""
    empty = [i for i, own in enumerate(clients) if not len(own)]
    if empty:
        raise UserError(
            f"{owner!r} leaves client {empty[0]} without samples ({len(empty)} of {len(clients)} "
            f"clients): {mend}."
        )


def tell_left(owner: Partition, left: int, total: int, why: str) -> None:
    """Report how many samples belong to no client."""
    if left:
        rank_zero_warn(
            f"{type(owner).__name__}: {left:,} of {total:,} training samples belong to no client, "
            f"{why}"
        )


def rows(value: Any) -> NDArray[Any]:
    """Return the numbers of a list, of lists, or of a file ``.npy``."""
    if isinstance(value, str):
        return np.asarray(np.load(value, allow_pickle=False))
    return np.asarray(value)


Source = Literal["flwr", "pfllib", "niid-bench", "fl-bench"]
