"""The split of the training samples over clients: by a partition and a seed, or as you give it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, Subset

from fl_lightning.datamodules.batches.samples import DatasetSamples, Samples, TensorSamples
from fl_lightning.datamodules.partitions.client_tests import (
    ClientTests,
    HeldOut,
    SplitTests,
    apart,
    stratified,
)
from fl_lightning.datamodules.partitions.partition import (
    ByGroup,
    Indices,
    LazyClients,
    Partition,
    check_client,
    check_same,
    digest,
    positions,
)
from fl_lightning.errors import UserError, suggest
from fl_lightning.machine.lightning import rank_zero_warn
from fl_lightning.sampling import generator

# Up to this number of indices, a split's hash is computed from the indices.
HASHED_BY_CONTENT = 10_000_000
# The client's training samples, its test samples, or these positions.
What = Literal["train", "test"] | Indices
# Number of clients whose indices of both sides are kept in memory.
LATEST = 1000
# Up to this number of clients, their test samples are compared with others' training samples.
COMPARED = 10_000


@dataclass
class Split:
    """The samples of each client, out of ``total`` training samples.

    ``clients``: each client's index array, into ``kept`` if some samples are ``held_out`` for
    validation. ``by_partition``: whether a partition made ``clients``; otherwise you gave them.
    ``test``: each client's test samples. ``labels``: the labels ``(N,)`` of all training samples;
    None: the samples have no class labels.
    """

    clients: Sequence[Any]
    total: int
    kept: Indices | None = None
    held_out: Indices | None = None
    by_partition: bool = True
    test: ClientTests | None = None
    labels: NDArray[np.int64] | None = None
    _latest: dict[int, tuple[Indices, Indices]] = field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Return the numbers of training samples ``(m,)``; counted once, over all m clients."""
        m = len(self.clients)
        if self.test is not None:
            return np.fromiter((len(self.indices(i)) for i in range(m)), np.int64, m)
        sizes = getattr(self.clients, "sizes", None)
        if sizes is None:
            sizes = np.fromiter((len(self._all(i)) for i in range(m)), np.int64, m)
        return np.asarray(sizes, np.int64)

    @cached_property
    def hash(self) -> str:
        return partition_hash(self.clients, self.kept, self.test)

    @cached_property
    def label_hash(self) -> str:
        return "" if self.labels is None else digest(self.labels)

    def indices(self, client: int) -> Indices:
        """Return the positions in the training data that a client trains on ``(N_i,)``."""
        return self._all(client) if self.test is None else self._sides(client)[0]

    def asked(self, client: int, what: What) -> Indices:
        """Return the positions in the training data of a client's training or test samples."""
        if not isinstance(what, str):
            return what
        return self.indices(client) if what == "train" else self.test_indices(client)

    def test_indices(self, client: int) -> Indices:
        """Return the positions of a client's test samples; empty if the client has none.

        Positions from ``total`` on are those in clients' own test sets.
        """
        return np.zeros(0, np.int64) if self.test is None else self._sides(client)[1]

    def _sides(self, client: int) -> tuple[Indices, Indices]:
        assert self.test is not None
        sides = self._latest.get(client)
        if sides is None:
            # A million clients would fill the memory, and a round asks for its own clients only a
            # few times.
            if len(self._latest) >= LATEST:
                self._latest.clear()
            sides = self._latest[client] = self.test.sides(self._all(client), client)
        return sides

    def _all(self, client: int) -> Indices:
        indices = positions(self.clients[client])
        if not isinstance(self.clients, list | tuple):
            check_client(client, indices, self.total)
        if self.kept is None:
            return indices.astype(np.int64, copy=False)
        kept: Indices = self.kept[indices]
        return kept


def _drawn(samples: int, labels: Indices | None, total: int, seed: int) -> Indices:
    """Return the sorted positions of ``samples`` drawn samples, in the classes' proportions."""
    if samples > total:
        raise UserError(
            f"samples is {samples}: there are {total} training samples. Give at most {total}, or "
            "leave samples out to use all."
        )
    shuffled = generator(seed, "samples").permutation(total)
    if labels is None:
        return np.sort(shuffled[:samples])
    return np.sort(stratified(shuffled, labels[shuffled], samples))


def split_samples(
    data: Samples,
    partition: Partition,
    counts: tuple[int | None, int | None],
    clients: Sequence[Any] | None,
    val_fraction: float,
    test: ClientTests | None,
    samples: int | None,
    seed: int,
) -> Split:
    """Draw ``samples``, hold out ``val_fraction`` of them, and split the rest over clients.

    If you give ``clients``, each client has its listed samples without the held-out ones; otherwise
    the partition splits the rest.

    Args:
        samples: number of samples to use; None: all.
        test: each client's test samples.
        counts: the requested number of clients; the default if the partition has no number either.

    Raises:
        UserError: there are too few samples, no number of clients, or no classes although the
            partition needs them.
    """
    total = len(data)
    # Check now: once samples are left out, groups of the wrong length would go unnoticed.
    if clients is None:
        partition.check_size(total)
    kept, held_out = _kept_and_held_out(data, val_fraction, samples, seed)
    if kept is not None:
        whole = partition
        partition = partition.restrict(kept)
        if isinstance(whole, ByGroup) and clients is None and whole.clients != partition.clients:
            rank_zero_warn(
                f"{partition.clients} of {whole.clients} groups are clients: samples={samples} and "
                f"val_fraction={val_fraction} leave out all samples of the other groups. Clients "
                "are numbered without these groups, so client 0 is not the first group if that "
                "group is left out"
            )
    if clients is not None:
        clients = _checked(clients, total)
        clients = clients if kept is None else without_held_out(clients, kept, total)
        return Split(clients, total, kept, held_out, False, test, data.labels)
    wanted, default = counts
    num_clients = wanted or partition.clients or default
    check_partition(partition, num_clients, data.labels, data.why_no_classes)
    assert num_clients is not None
    labels = np.zeros(total, np.int64) if data.labels is None else data.labels
    labels = labels if kept is None else labels[kept]
    drawn, tests = apart(partition.split(labels, num_clients, seed))
    check_same(partition, num_clients, len(drawn))
    clients = _checked(drawn, len(labels))
    if tests is not None:
        test = _tested(partition, tests, kept, len(labels), test)
    return Split(clients, total, kept, held_out, True, test, data.labels)


def check_apart(split: Split, pooled: bool) -> None:
    """Warn if clients are tested on samples on which other clients train.

    Raises:
        UserError: with ``pooled``, because these samples are the global test set.
    """
    of_training = isinstance(split.test, HeldOut | SplitTests)
    if not of_training or len(split.clients) > COMPARED:
        return
    trained = np.zeros(split.total, bool)
    tested = np.zeros(split.total, bool)
    for client in range(len(split.clients)):
        trained[split.indices(client)] = True
        tested[split.test_indices(client)] = True
    both = int((trained & tested).sum())
    if not both:
        return
    text = (
        f"{both:,} of {int(tested.sum()):,} samples on which clients are tested are training "
        "samples of other clients, because the split gives samples to several clients, so test "
        "accuracy is too high"
    )
    if pooled:
        raise UserError(
            f"pooled=True: {text}. Give a partition without replacement, or lists that do not "
            "overlap."
        )
    rank_zero_warn(text)


def _tested(
    partition: Partition,
    tests: list[Indices],
    kept: Indices | None,
    total: int,
    other: ClientTests | None,
) -> SplitTests:
    """Return the partition's test samples; ``other``: test samples from the data's options."""
    if other is not None:
        what, kind = other.described
        raise UserError(
            f"The partition {partition!r} gives each client test samples, and the data module has "
            f"others ({what}: {kind}). Leave client_test_fraction and test_clients out, or choose "
            "a partition without test samples."
        )
    for client, test in enumerate(tests):
        if len(test):
            check_client(client, test, total)
    return SplitTests(tests if kept is None else [kept[test] for test in tests])


def _kept_and_held_out(
    data: Samples, val_fraction: float, samples: int | None, seed: int
) -> tuple[Indices | None, Indices | None]:
    """Return the positions of training samples (None: all) and held-out samples (None: none)."""
    drawn = None if samples is None else _drawn(samples, data.labels, len(data), seed)
    if val_fraction == 0:
        return drawn, None
    used = len(data) if drawn is None else len(drawn)
    held = round(val_fraction * used)
    if not 0 < held < used:
        raise UserError(
            f"val_fraction is {val_fraction}: of {used} training samples that leaves none to "
            "train or to validate on. Give another share, or 0 to validate on the test set."
        )
    order = generator(seed, "val-fraction").permutation(used)
    held_out = np.sort(order[:held])
    kept = np.sort(order[held:])
    if drawn is None:
        return kept, held_out
    return drawn[kept], drawn[held_out]


def check_partition(
    partition: Partition, num_clients: int | None, labels: object, why: str
) -> None:
    """Refuse a partition without a number of clients, or without the classes that it uses."""
    if num_clients is None:
        raise UserError(
            "num_clients is not given: give the number of clients, or clients=[…] with each "
            "client's sample indices."
        )
    if labels is None and partition.needs_labels:
        raise UserError(
            f"The partition is {partition!r}, which uses classes, but the training data have no "
            f"class labels (whole numbers from 0, one per sample): {why}; give targets, or a "
            "partition such as IID."
        )


def without_held_out(clients: Sequence[Any], kept: Indices, total: int) -> LazyClients:
    """Return each client's own list without held-out samples, as positions into ``kept``.

    >>> left = without_held_out([[0, 4, 3], [3, 1, 1]], kept=np.array([0, 1, 4]), total=5)
    >>> [client.tolist() for client in left], left.sizes
    ([[0, 2], [1, 1]], array([2, 2]))

    Raises:
        UserError: a client would be left without samples.
    """
    places = np.full(total, -1)
    places[kept] = np.arange(len(kept))
    own = partial(_left, clients, places)
    sizes = np.fromiter((len(own(i)) for i in range(len(clients))), np.int64, len(clients))
    return LazyClients(sizes, own, getattr(clients, "recipe", ""))


def _left(clients: Sequence[Any], places: Indices, client: int) -> Indices:
    own = positions(clients[client])
    check_client(client, own, len(places))
    left: Indices = places[own]
    left = left[left >= 0]
    if not len(left):
        raise UserError(
            f"val_fraction holds out all {len(own)} samples of client {client}, or samples= "
            "leaves them out: give a smaller val_fraction, the client more samples, or "
            "validation data of their own and val_fraction=0."
        )
    return left


def check_given(clients: Any, num_clients: int | None, partition: Partition | None) -> None:
    """Refuse what is no Partition, and clients together with a partition."""
    if partition is not None and not isinstance(partition, Partition):
        raise UserError(
            f"partition={partition!r} is not a partition: give an object, such as Dirichlet(0.3)."
        )
    if clients is not None and (partition is not None or num_clients not in (None, len(clients))):
        raise UserError(
            f"clients gives {len(clients)} clients' samples, and num_clients is {num_clients}, "
            f"partition {partition!r}: give either only clients, or num_clients and partition."
        )


def _checked(clients: Sequence[Any], total: int) -> Sequence[Any]:
    """Check lists at once, and lazy sequences when a client is read."""
    if len(clients) == 0:
        raise UserError("clients is empty: give at least one client's sample indices.")
    if isinstance(clients, list | tuple):
        for i, indices in enumerate(clients):
            check_client(i, indices, total)
    return clients


def partition_hash(
    clients: Sequence[Indices], kept: Indices | None, test: ClientTests | None = None
) -> str:
    """Return a hash of all indices, or of the recipe if there are very many lazy ones."""
    state = hashlib.sha256(b"" if kept is None else kept.tobytes())
    if test is not None:
        state.update(test.recipe)
    recipe = ""
    if isinstance(clients, LazyClients) and int(clients.sizes.sum()) > HASHED_BY_CONTENT:
        recipe = clients.recipe
    if recipe:
        state.update(recipe.encode())
    else:
        for i in range(len(clients)):
            array = positions(clients[i]).astype(np.int64, copy=False)
            state.update(len(array).to_bytes(8, "little"))
            state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()[:16]


def joined(name: str, train: Samples, test: Samples | None) -> Samples:
    """Return the training samples followed by the test samples.

    Args:
        name: name of the data module, for errors.

    Raises:
        UserError: there are no test data, or they have another kind or shape.
    """
    kinds = [getattr(getattr(one, "x", None), "dtype", None) for one in (train, test)]
    if test is None or type(train) is not type(test) or kinds[0] != kinds[1]:
        raise UserError(
            f"pooled=True joins training and test data, and {name} has no test data here of the "
            f"same kind (x are {kinds[0]} to train on, and {kinds[1]} to test on): give test data, "
            "or leave pooled out."
        )
    if isinstance(train, TensorSamples) and isinstance(test, TensorSamples):
        return train.with_samples(torch.cat([train.x, test.x]), torch.cat([train.y, test.y]))
    assert isinstance(train, DatasetSamples) and isinstance(test, DatasetSamples)
    parts: list[Dataset[Any]] = [train.read.dataset, test.read.dataset]
    labels = None
    if train.labels is not None and test.labels is not None:
        labels = np.concatenate([train.labels, test.labels])
    return _like(train, ConcatDataset(parts), labels)


def part_of(samples: Samples, index: Indices) -> Samples:
    """Return the samples ``index`` (n,), in this order."""
    if isinstance(samples, TensorSamples):
        return samples.with_samples(samples.x[index], samples.y[index])
    assert isinstance(samples, DatasetSamples)
    labels = None if samples.labels is None else samples.labels[index]
    return _like(samples, Subset(samples.read.dataset, index.tolist()), labels)


def _like(samples: DatasetSamples, dataset: Dataset[Any], labels: Any) -> DatasetSamples:
    """Return another dataset, read and collated in the same way."""
    read = samples.read
    return DatasetSamples(dataset, labels, read.collate, samples.workers, read.fetch)


def global_test(pool: Samples, split: Split) -> Samples | None:
    """Return all clients' test samples, ascending; None: they have none.

    Raises:
        UserError: neither the split nor an option gives clients test samples.
    """
    if split.test is None:
        raise UserError(
            "pooled=True splits training and test data together, so each client needs its own test "
            "samples: give the partition's test_share=0.25 (DirichletByClass, LabelsPerClient), "
            "Imported lists with test samples, or the data module's client_test_fraction=0.25."
        )
    tests = [split.test_indices(i) for i in range(len(split.clients))]
    index = np.unique(np.concatenate(tests))
    return part_of(pool, index) if len(index) else None


def by_name(clients: Any, test_clients: Any) -> tuple[tuple[str, ...], Any, Any]:
    """Return the clients' names (none if they have none), and both arguments by number.

    A client's number is its place in ``clients``. A client without an entry in ``test_clients`` has
    an empty one.

    >>> by_name({"anna": [0], "ben": [1, 2]}, {"ben": [5]})
    (('anna', 'ben'), [[0], [1, 2]], [[], [5]])

    Raises:
        UserError: ``test_clients`` names clients that ``clients`` does not name, or two clients
            have one name.
    """
    names: tuple[str, ...] = ()
    if isinstance(clients, Mapping):
        names = tuple(str(name) for name in clients)
        if len(set(names)) < len(names) or not all(name.strip() for name in names):
            raise UserError(
                f"clients has the names {', '.join(names[:20])}: give each client its own name."
            )
        clients = list(clients.values())
    if isinstance(test_clients, Mapping):
        tests = {str(name): given for name, given in test_clients.items()}
        unknown = [name for name in tests if name not in names]
        if unknown:
            whose = f"clients names {', '.join(names[:20])}" if names else "clients has no names"
            raise UserError(
                f"test_clients names the client {unknown[0]!r}, and {whose}."
                f"{suggest(unknown[0], list(names))} Give clients={{name: …}} with the same names."
            )
        test_clients = [tests.get(name, []) for name in names]
    return names, clients, test_clients
