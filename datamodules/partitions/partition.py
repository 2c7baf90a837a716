"""Partitions decide which client has which training samples.

Partitions are pure functions of (labels, number of clients, seed). If possible, each client is
drawn on demand: with replacement, a million clients cost nothing until they are sampled. Partitions
of skewed labels, such as Dirichlet, are in ``label_skew.py``.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fl_lightning.accepted import Checked, NonNegativeFloat
from fl_lightning.errors import UserError
from fl_lightning.sampling import generator

Indices = NDArray[np.int64]


class LazyClients(Sequence[Indices]):
    """The clients' index arrays, each drawn when it is asked for.

    ``sizes`` are the clients' numbers of samples ``(m,)``; ``draw(i)`` gives client i's indices,
    always the same; ``recipe`` names everything the draw depends on (for the partition's hash).
    ``flat``: all clients' indices, one client after the other, if they lie in memory like this.
    """

    def __init__(
        self,
        sizes: Indices,
        draw: Callable[[int], Indices],
        recipe: str,
        flat: Indices | None = None,
    ) -> None:
        self.sizes = sizes
        self.draw = draw
        self.recipe = recipe
        self.flat = flat

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> Indices: ...

    @overload
    def __getitem__(self, client: slice) -> Sequence[Indices]: ...

    def __getitem__(self, client: int | slice) -> Indices | Sequence[Indices]:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(len(self)))]
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        return self.draw(client)

    def __iter__(self) -> Iterator[Indices]:
        return (self[i] for i in range(len(self)))


class Partition(Checked):
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

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Any]:
        """Return one index array per client: positions in ``labels`` ``(N,)``; the same for the
        same three arguments. Return tuples ``(train, test)`` instead to give each client test
        samples, too.

        Draw random numbers only from ``fl_lightning.sampling.generator(seed, "partition", …)``.

        Raises:
            UserError: a client would be left without samples.
        """
        raise NotImplementedError  # abstract: each partition decides who gets which samples

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
        """Return the partition of only the samples ``kept``; the others are held out for
        validation.
        """
        return self

    def __repr__(self) -> str:
        defaults = {name: p.default for name, p in inspect.signature(type(self)).parameters.items()}
        changed = [
            f"{name}={value!r}" for name, value in vars(self).items() if value != defaults.get(name)
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


def need_samples(num_clients: int, samples: int) -> None:
    if not 1 <= num_clients <= samples:
        raise UserError(
            f"num_clients is {num_clients}, but there are {samples} training samples, and each "
            f"client needs at least one of its own: give a number from 1 to {samples}, or a "
            "partition with "
            "replacement=True and samples_per_client."
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


class QuantitySkew(Partition):
    """Sizes proportional to lognormal(0, sigma), with at least one sample each; the samples
    themselves are iid.
    """

    needs_labels = False

    def __init__(self, sigma: NonNegativeFloat) -> None:
        self.sigma = sigma

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        need_samples(num_clients, len(labels))
        rng = generator(seed, "partition")
        sizes = _apportion(len(labels), np.exp(self.sigma * rng.standard_normal(num_clients)))
        return np.split(rng.permutation(len(labels)), np.cumsum(sizes)[:-1])


def _apportion(total: int, weights: NDArray[np.float64]) -> Indices:
    """Return whole numbers of at least one that sum to ``total``, nearly proportional to
    ``weights``.
    """
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
    """The data's own clients: one for each distinct value of ``groups`` ``(N,)``, in ascending
    order; values are whole numbers or names.

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
        if num_clients != len(sizes):
            raise UserError(
                f"num_clients is {num_clients}, but the partition ByGroup has {len(sizes)} "
                f"groups, one per client: give {len(sizes)}, or another partition such as IID."
            )
        # A list of a million arrays would take seconds, and a hundred bytes per client.
        order = np.argsort(group, kind="stable")
        return LazyClients(sizes, partial(_part, order, np.cumsum(sizes), sizes), "", order)

    def check_size(self, samples: int) -> None:
        if self.groups is not None and self.groups.shape != (samples,):
            raise UserError(
                f"ByGroup's groups have the shape {self.groups.shape}: give one for each of the "
                f"{samples} training samples."
            )

    def restrict(self, kept: Indices) -> Partition:
        return self if self.groups is None else ByGroup(cast(Any, self.groups[kept]))

    def __repr__(self) -> str:
        return f"ByGroup({'' if self.groups is None else f'{self.clients} groups'})"


def groups_of(name: str, groups: Any) -> NDArray[Any]:
    """Return the group of each sample ``(N,)``.

    Raises:
        UserError: a sample has no group.
    """
    found = np.asarray(cast(ArrayLike, groups))
    missing = np.zeros(0, np.int64)
    if found.dtype.kind in "Of" and found.ndim == 1:
        missing = np.flatnonzero([one is None or one != one for one in found.tolist()])
    if len(missing):
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
        try:
            with np.load(self.path, allow_pickle=False) as file:
                self._ends = file["ends"]
                self._indices = file["indices"]
                self._labels = str(file["labels"])
                self._kept = str(file["kept"])
                self._tests = self._tests_of(file)
        except FileNotFoundError:
            raise UserError(
                f"The partition's path is {self.path!r}, but there is no such file: give a .npz "
                "file that save_partition wrote."
            ) from None
        except Exception as error:  # NumPy raises many kinds of errors for damaged files
            raise UserError(
                f"The partition's file {self.path!r} is damaged, or was not written by "
                f"save_partition ({error})."
            ) from None

    @staticmethod
    def _tests_of(file: Any) -> list[Indices] | None:
        if "test_ends" not in file:
            return None
        return np.split(file["test_indices"], file["test_ends"][:-1])

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
        if num_clients != len(self._ends):
            raise UserError(
                f"num_clients is {num_clients}, but the partition in {self.path!r} has "
                f"{len(self._ends)} clients: give {len(self._ends)}, or null."
            )
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

    def __repr__(self) -> str:
        return f"Saved({self.path!r})"


def digest(array: NDArray[Any]) -> str:
    """Return sixteen hexadecimal digits of an array's content."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def positions(given: Any) -> NDArray[Any]:
    """Return a client's indices as an array."""
    # If your sequence has a length, it is read only up to there, because it may not end.
    is_sequence = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    read = hasattr(given, "__array__") or isinstance(given, list | tuple | range)
    if is_sequence and not read:
        given = [given[i] for i in range(len(given))]
    try:
        return np.asarray(given)
    except ValueError:
        # Lists of different lengths: the next check reports that these are not whole numbers.
        return np.asarray(given, dtype=object)


def check_sequence(name: str, clients: Any, each: str) -> None:
    """Refuse clients that cannot be counted, or not be read by number.

    Args:
        each: the type that ``clients[i]`` has to have.

    Raises:
        UserError: names ``name`` and its type.
    """
    counted = hasattr(clients, "__len__") and hasattr(clients, "__getitem__")
    if not counted or isinstance(clients, Mapping | str | bytes):
        raise UserError(
            f"{name} is of type {type(clients).__name__}, which is not a sequence. Give one with a "
            f"length, len(clients), and with {each} at clients[i], such as a list."
        )


def check_client(client: int, indices: Any, total: int) -> None:
    """Refuse a client without indices, or with indices that are not whole numbers from 0 to
    below ``total``.
    """
    array = positions(indices)
    if array.ndim != 1 or len(array) == 0:
        raise UserError(
            f"Client {client} has no samples (indices of shape {array.shape}): give each at least "
            "one."
        )
    if array.dtype.kind not in "iu":
        odd = [one for one in array.tolist() if not isinstance(one, float) or one % 1]
        first = str([*odd, *array.tolist()][0])[:60]
        raise UserError(
            f"Client {client} has sample indices of type {array.dtype}, such as {first}: give "
            f"whole numbers from 0 to {total - 1}."
        )
    if array.min() < 0 or array.max() >= total:
        raise UserError(
            f"Client {client} has sample indices of type {array.dtype} from {array.min()} to "
            f"{array.max()}: give whole numbers from 0 to {total - 1}."
        )


def own_or_grouped(
    partition: Partition | None, group: str | None, arguments: Mapping[str, Any]
) -> Partition | None:
    """Return the partition of data whose column ``group`` names clients; None if the arguments give
    the clients themselves.
    """
    if partition is not None or arguments.get("clients") is not None:
        return partition
    return IID() if group is None else ByGroup()
