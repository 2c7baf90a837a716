"""The facts of a training DataLoader: its samples, how they become batches, and which processes
read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fl_lightning.datamodules.batches.read_ahead import Workers
from fl_lightning.errors import UserError

KNOWN = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)


@dataclass(frozen=True)
class LoaderFacts:
    """A DataLoader's ``dataset``. It uses the ``positions`` (None: all) and draws by ``weights``
    (None: each once).

    ``fetch`` is explained at ``Reading``.
    """

    dataset: Any
    collate: Any
    batch_size: int
    drop_last: bool
    fetch: Literal["sample", "list", "batch"]
    positions: NDArray[np.int64] | None
    weights: NDArray[np.float64] | None
    workers: Workers


def check_map_style(dataset: Any, what: str) -> None:
    """Refuse streams, which have no positions, even if they have a length.

    Raises:
        UserError: the loader cannot be used; the error says what to do instead.
    """
    if isinstance(dataset, IterableDataset):
        raise UserError(
            f"{what} is a {type(dataset).__name__}, an IterableDataset: a stream without "
            "positions, which cannot be split over clients. Give map-style Datasets (with __len__ "
            "and __getitem__): one per client as FromDatasets(clients=[…]), or list(stream) if it "
            "fits into memory."
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"{what} is a {type(dataset).__name__}, which cannot be split: give a map-style "
            "Dataset (with __len__ and __getitem__)."
        )


def loader_facts(loader: Any, name: str) -> LoaderFacts:
    """Return the facts of the training loader of the data module ``name``.

    Raises:
        UserError: there is no single loader of a map-style dataset, or clients cannot use its
            sampler, which is named.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if dataset is None:
        raise UserError(
            f"The training loader of {name} is a {type(loader).__name__} without a dataset, which "
            "cannot be split: give a data module whose train_dataloader is one DataLoader, or the "
            "clients' Datasets to FromDatasets(clients=[…])."
        )
    check_map_style(dataset, f"The training loader's dataset of {name}")
    refuse_own_batches(loader, name)
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None)
    drop_last = getattr(loader, "drop_last", False)
    fetch: Literal["sample", "list", "batch"] = "sample"
    # With batch_size=None and a BatchSampler as sampler, the dataset takes lists of positions.
    if batches is None and isinstance(sampler, BatchSampler):
        batches = sampler
        fetch = "list"
    if batches is not None:
        if type(batches).__iter__ is not BatchSampler.__iter__:
            refuse(
                batches,
                "batch sampler",
                name,
                "a client's samples are shuffled and cut by batch_size",
            )
        sampler = batches.sampler
        size = batches.batch_size
        drop_last = batches.drop_last
    elif size is None and sampler is not None:
        size = 1
        fetch = "batch"
    total = len(dataset)
    positions, weights = sampled(sampler, total, name)
    workers = Workers(
        int(getattr(loader, "num_workers", 0)),
        getattr(loader, "prefetch_factor", None) or 2,
        getattr(loader, "worker_init_fn", None),
        getattr(loader, "multiprocessing_context", None),
        getattr(loader, "timeout", 0),
    )
    collate = getattr(loader, "collate_fn", None)
    return LoaderFacts(
        dataset, collate, int(size or 1), bool(drop_last), fetch, positions, weights, workers
    )


def sampled(
    sampler: Any, total: int, name: str
) -> tuple[NDArray[np.int64] | None, NDArray[np.float64] | None]:
    """Return the positions out of ``total`` that a sampler uses, and their weights.

    None: the sampler uses all positions, or each position once per epoch.
    """
    if isinstance(sampler, list | tuple | range):
        return within(np.asarray(sampler, np.int64), total, name), None
    kind = next(
        (k for k in KNOWN if isinstance(sampler, k) and type(sampler).__iter__ is k.__iter__), None
    )
    if sampler is not None and kind is None:
        refuse(
            sampler,
            "sampler",
            name,
            "which samples a client sees, and in which order, is drawn from the run's seed",
        )
    if kind is SubsetRandomSampler:
        return within(np.asarray(sampler.indices, np.int64), total, name), None
    number = total if kind in (None, DistributedSampler) else len(sampler)
    if number != total:
        refuse(
            sampler,
            "sampler",
            name,
            f"it gives {number} samples an epoch, and the dataset has {total}",
        )
    weighted = kind is WeightedRandomSampler
    if weighted and len(sampler.weights) != total:
        refuse(
            sampler,
            "sampler",
            name,
            f"it has {len(sampler.weights)} weights, and the dataset {total} samples",
        )
    if weighted and not sampler.replacement:
        refuse(
            sampler,
            "sampler",
            name,
            "with replacement=False an epoch has all samples once, so the weights have no effect",
        )
    if weighted:
        return None, np.asarray(sampler.weights, np.float64)
    return None, np.ones(total) if kind is RandomSampler and sampler.replacement else None


def refuse(sampler: Any, kind: str, name: str, why: str) -> None:
    raise UserError(
        f"The training loader of {name} has the {kind} {type(sampler).__name__}, which clients "
        f"cannot use: {why}. Give the loader shuffle=True instead (the help of FromDataModule "
        "lists the samplers that work), or the samples as Datasets to FromDatasets."
    )


def refuse_own_batches(loader: Any, name: str) -> None:
    """Refuse a DataLoader that makes other batches than those of its dataset and sampler."""
    if isinstance(loader, DataLoader) and type(loader).__iter__ is not DataLoader.__iter__:
        raise UserError(
            f"The training loader of {name} is a {type(loader).__name__}, whose own __iter__ "
            "clients cannot use: their batches are made of the dataset's samples. Let a "
            "collate_fn, the dataset, or the data module's on_after_batch_transfer do what "
            "__iter__ does, in a plain DataLoader."
        )


def within(positions: NDArray[np.int64], total: int, name: str) -> NDArray[np.int64]:
    """Return positions, after checking that the dataset has them."""
    beyond = positions[(positions < -total) | (positions >= total)]
    if len(beyond):
        raise UserError(
            f"The sampler of the training loader of {name} has the position {beyond[0]}, and its "
            f"dataset has {total} samples, numbered from 0: give positions in the dataset."
        )
    return positions
