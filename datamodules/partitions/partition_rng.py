"""The random numbers of a split: this project's, or those of another tool."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.partitions.partition import Indices, Partition
from fl_lightning.errors import UserError
from fl_lightning.machine.lightning import rank_zero_warn
from fl_lightning.sampling import generator

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


def check_share(owner: Partition, share: float, source: str) -> None:
    """Refuse a share of test samples that the source does not support."""
    if share and source not in ("pfllib", "fl-bench"):
        raise UserError(
            f"{type(owner).__name__}'s test_share is {share:g}, but source is {source!r}, and only "
            "source='pfllib' and 'fl-bench' have a test_share: give the data module's "
            f"client_test_fraction={share:g} in its place."
        )


def check_same(owner: Partition, num_clients: int, own: int) -> None:
    """Refuse a number of clients that differs from the split's own."""
    if num_clients != own:
        raise UserError(
            f"num_clients is {num_clients}, but the partition {type(owner).__name__} has {own} "
            f"clients: give {own}, or null."
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
