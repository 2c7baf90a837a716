"""Labels of a data set: found without reading its samples, and compared with those of samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from fl_lightning.errors import UserError

# A label of at least this size is not the number of a class: tables would have a column for each
# smaller number.
MOST_CLASSES = 10_000_000
# Number of samples whose labels are compared.
COMPARED = 32


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
    """Return the label in a batch ``(x, …, y, …)`` of one sample, if it differs from ``label``.

    A batch without a recognised label does not differ.
    """
    parts = batch[1:] if isinstance(batch, tuple | list) else ()
    arrays = [np.asarray(p.numpy(force=True) if isinstance(p, Tensor) else p) for p in parts]
    found = [float(a.item()) for a in arrays if a.size == 1 and a.dtype.kind in "iubf"]
    return None if not found or label in found else found[0]


DEPTH = 20  # wrappers around wrappers


def check_classes(named: Iterable[tuple[str, Any]]) -> tuple[str, ...]:
    """Refuse data sets in which a label means different classes.

    Args:
        named: each data set with its name in an error.

    Returns:
        The names of the classes, in the order of their labels; empty if they are unknown.

    Raises:
        UserError: two data sets have different class names; the error has both.
    """
    first = ""
    known: tuple[str, ...] = ()
    for place, dataset in named:
        for classes in classes_of(dataset):
            shared = min(len(classes), len(known))
            if classes[:shared] != known[:shared]:
                raise UserError(
                    f"{place} has the classes {listed(classes)}, and {first} has {listed(known)}, "
                    f"so one label would mean different classes. Give all data sets the "
                    "same classes in the same order: ImageFolder reads them from the names of its "
                    "folders, so make an empty folder for a class without images (ImageFolder(…, "
                    "allow_empty=True)), or give FromFolders the folder of all clients' folders. "
                    "If a wrapper of yours gives the samples other labels, give it an attribute "
                    "classes with their names."
                )
            # Two lists of labels agree if one is the beginning of the other.
            if len(classes) > len(known):
                first = place
                known = classes
    return known


def classes_of(dataset: Any, depth: int = 0) -> Iterator[tuple[str, ...]]:
    """Yield the class names of a data set, or of those that it wraps; nothing if unknown.

    If a data set changes its labels by ``target_transform``, their names are unknown.
    """
    if depth > DEPTH or getattr(dataset, "target_transform", None) is not None:
        return
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, list | tuple):
        if classes and all(isinstance(name, str) for name in classes):
            yield tuple(classes)
        return
    parts = getattr(dataset, "datasets", None)
    if not isinstance(parts, list | tuple):
        parts = [getattr(dataset, "dataset", None)]
    for part in parts:
        if part is not None:
            yield from classes_of(part, depth + 1)


def listed(names: tuple[str, ...]) -> str:
    """Return the first names, in order, as text.

    >>> listed(("cat", "dog"))
    "'cat', 'dog'"
    """
    more = f", … ({len(names)} in all)" if len(names) > 6 else ""
    return ", ".join(map(repr, names[:6])) + more
