"""Training and test data joined to one pool of samples, which is split."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from fl_lightning.datamodules.batches.samples import DatasetSamples, Samples, TensorSamples
from fl_lightning.datamodules.partitions.partition import Indices
from fl_lightning.datamodules.partitions.split import Split
from fl_lightning.errors import UserError


def joined(name: str, train: Samples, test: Samples | None) -> Samples:
    """Return the training samples followed by the test samples.

    Args:
        name: name of the data module, for errors.

    Raises:
        UserError: there are no test data, or they have another kind or shape.
    """
    if test is None:
        raise UserError(
            f"pooled=True joins training and test data, and {name} has no test data here: give "
            "test data, or leave pooled out."
        )
    if isinstance(train, TensorSamples) and isinstance(test, TensorSamples):
        if train.x.shape[1:] != test.x.shape[1:] or train.x.dtype != test.x.dtype:
            raise UserError(
                f"pooled=True joins training and test data, whose x differ: {train.x.dtype} of "
                f"shape {tuple(train.x.shape[1:])} and {test.x.dtype} of shape "
                f"{tuple(test.x.shape[1:])}. Give both the same."
            )
        return train.with_samples(torch.cat([train.x, test.x]), torch.cat([train.y, test.y]))
    if isinstance(train, DatasetSamples) and isinstance(test, DatasetSamples):
        parts: list[Dataset[Any]] = [train.read.dataset, test.read.dataset]
        labels = None
        if train.labels is not None and test.labels is not None:
            labels = np.concatenate([train.labels, test.labels])
        return _like(train, ConcatDataset(parts), labels)
    raise UserError(
        f"pooled=True joins training and test data, which {name} has in two forms: give both as "
        "Datasets, or both as tensors."
    )


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
            "samples: give the partition's test_share=0.25 (DirichletByClass, LabelsPerClient, or "
            "Imported "
            "lists with test samples), or the data module's client_test_fraction=0.25."
        )
    tests = [split.test_indices(i) for i in range(len(split.clients))]
    index = np.unique(np.concatenate(tests))
    return part_of(pool, index) if len(index) else None
