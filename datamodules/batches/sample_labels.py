"""Labels of a data set: found without reading its samples, and compared with those of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

# A label of at least this size is not the number of a class: tables would have a column for each
# smaller number.
MOST_CLASSES = 10_000_000
# Number of samples whose labels are compared.
COMPARED = 32
# Names of the label in samples that are dictionaries.
NAMES = ("label", "labels", "target", "targets", "y")


def find_targets(dataset: Any) -> Any:
    """Return a data set's labels if it has them without reading its samples, else None.

    They are the labels after the data set's ``target_transform``.
    """
    if isinstance(dataset, Subset):
        own = vars(dataset).get("targets", vars(dataset).get("labels"))
        if _one_per_sample(own, len(dataset)):
            return own
        whole = find_targets(dataset.dataset)
        return None if whole is None else np.asarray(whole)[np.asarray(dataset.indices, np.int64)]
    if isinstance(dataset, ConcatDataset):
        targets = [find_targets(part) for part in dataset.datasets]
        if any(labels is None for labels in targets):
            return None
        return np.concatenate([np.asarray(labels) for labels in targets])
    if isinstance(dataset, TensorDataset):
        if len(dataset.tensors) > 1 and dataset.tensors[1].ndim == 1:
            return dataset.tensors[1]
        return None
    for name in ("targets", "labels"):
        labels = getattr(dataset, name, None)
        if _one_per_sample(labels, len(dataset)):
            labels = _transformed(labels, getattr(dataset, "target_transform", None))
            return labels if _one_per_sample(labels, len(dataset)) else None
    return None


def _transformed(labels: Any, transform: Any) -> Any:
    """Return the labels as the samples have them."""
    if transform is None:
        return labels
    try:
        return [transform(label) for label in np.asarray(labels).tolist()]
    except Exception:  # it may expect what the data set makes of its labels
        return None


def _one_per_sample(labels: Any, samples: int) -> bool:
    """Return whether ``labels`` is one number or word per sample, and not a list of tags, say."""
    try:
        return len(labels) == samples and np.asarray(labels).ndim == 1
    except (TypeError, ValueError):
        return False


def classes_in(labels: Any) -> NDArray[np.int64] | None:
    """Return labels ``(N,)`` as int64; None: they are not numbers of classes."""
    found = np.asarray(labels)
    if found.dtype.kind not in "iub" or found.ndim != 1:
        return None
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < MOST_CLASSES:
        return None
    return found.astype(np.int64, copy=False)


def why_no_classes(labels: Any) -> str:
    """Return what keeps labels from being numbers of classes, for an error."""
    if labels is None:
        return "the data set has no attribute targets or labels with one label per sample"
    found = np.asarray(labels)
    if found.ndim != 1:
        return f"the labels have the shape {found.shape}"
    if found.dtype.kind not in "iub":
        return f"the labels are {found.dtype}, such as {', '.join(map(repr, found[:1].tolist()))}"
    odd = found[(found < 0) | (found >= MOST_CLASSES)]
    return f"a label is {odd[0]}" if len(odd) else "the labels are unknown"


def some_of(samples: int) -> list[NDArray[np.int64]]:
    """Return the positions of the samples to compare, evenly spread, each in an array."""
    places = np.linspace(0, samples - 1, min(samples, COMPARED)).astype(np.int64)
    return list(places[:, None])


def label_that_differs(batch: Any, label: int) -> float | None:
    """Return the label in a batch of one sample, if it differs from ``label``.

    A batch without a recognised label does not differ.
    """
    found = list(_numbers(batch))
    return None if not found or label in found else found[0]


def _numbers(batch: Any) -> Iterator[float]:
    """Yield each number in a batch of one sample that may be its label."""
    parts: list[Any] = []
    if isinstance(batch, Mapping):
        parts = [batch[name] for name in NAMES if name in batch]
    elif isinstance(batch, tuple | list) and len(batch) > 1:
        parts = [*batch[1:]]
        if isinstance(batch[1], Mapping):
            yield from _numbers(batch[1])
    for part in parts:
        array = part.numpy(force=True) if isinstance(part, Tensor) else np.asarray(part)
        if array.size == 1 and array.dtype.kind in "iubf":
            yield float(array.item())
