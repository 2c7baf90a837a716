"""Names of classes in data sets: one label means one class in all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset

from fl_lightning.datamodules.batches.sample_labels import find_targets
from fl_lightning.errors import UserError, suggest

DEPTH = 20  # wrappers around wrappers


def check_classes(named: Iterable[tuple[str, Any]], option: str = "") -> tuple[str, ...]:
    """Refuse data sets in which a label means different classes.

    Args:
        named: each data set with its name in an error.
        option: the argument that numbers the classes by name, if there is one.

    Returns:
        The names of the classes, in the order of their labels; empty if they are unknown.

    Raises:
        UserError: two data sets have different class names; the error has both.
    """
    first = ""
    known: tuple[str, ...] = ()
    named = list(named)
    for place, dataset in named:
        for classes in classes_of(dataset):
            shared = min(len(classes), len(known))
            if classes[:shared] != known[:shared]:
                raise UserError(
                    f"{place} has the classes {listed(classes)}, and {first} has {listed(known)}, "
                    f"so one label would mean different classes. {_by_name(named, option)}Or give "
                    "all data sets the same classes in the same order: ImageFolder reads them from "
                    "the names of its folders, so make an empty folder for a class without images "
                    "(ImageFolder(…, allow_empty=True)). If a wrapper of yours gives the samples "
                    "other labels, give it an attribute classes with their names."
                )
            # Two lists of labels agree if one is the beginning of the other.
            if len(classes) > len(known):
                first = place
                known = classes
    return known


def _by_name(named: Sequence[tuple[str, Any]], option: str) -> str:
    """Return the option that maps the labels by name, with all names as code."""
    if not option:
        return ""
    names: set[str] = set()
    for _, dataset in named:
        for classes in classes_of(dataset):
            names |= set(classes)
    code = f"{option}={sorted(names)!r}" if len(names) <= 20 else f"{option}=[…] with all names"
    return f"Give {code} to number the labels of every data set by these names. "


def relabelled(place: str, dataset: Any, classes: Sequence[str]) -> Any:
    """Return a data set whose labels are the places of its classes' names in ``classes``.

    Args:
        place: the name of the data set in an error.

    Raises:
        UserError: the data set does not name its classes, or one of them is not in ``classes``.
    """
    if isinstance(dataset, ConcatDataset):
        return ConcatDataset([relabelled(place, part, classes) for part in dataset.datasets])
    found = list(dict.fromkeys(classes_of(dataset)))
    if not found and len(dataset) == 0:
        return dataset
    if len(found) != 1:
        what = "has several lists of names of classes" if found else "does not name its classes"
        raise UserError(
            f"{place} {what}, and classes={listed(tuple(classes))} numbers labels by name. Give "
            "the data set an attribute classes, the list of its classes' names in the order of its "
            "labels, or leave classes out if all data sets number their classes in the same order."
        )
    (names,) = found
    if tuple(names) == tuple(classes):
        return dataset
    places = {name: number for number, name in enumerate(classes)}
    unknown = [name for name in names if name not in places]
    if unknown:
        raise UserError(
            f"{place} has the class {unknown[0]!r}, which is not in classes: "
            f"{listed(tuple(classes))}.{suggest(unknown[0], list(classes))} Add it to classes, or "
            "leave its samples out of the data set."
        )
    return Relabelled(place, dataset, np.array([places[name] for name in names]), tuple(classes))


class Relabelled(Dataset[Any]):
    """A data set of pairs ``(x, label)`` with other labels.

    Args:
        labels: the new label of each old one ``(C,)``.
        classes: the names of the new labels.
    """

    def __init__(
        self, place: str, dataset: Any, labels: NDArray[np.int64], classes: tuple[str, ...]
    ) -> None:
        self.place = place
        self.dataset = dataset
        self.labels_of = labels
        self.classes = classes
        old = find_targets(dataset)
        self.targets = None if old is None else labels[np.asarray(old)]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Any:
        sample = self.dataset[i]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise UserError(
                f"{self.place}: the option classes numbers the labels by their names. For this "
                f"each sample must be a pair (x, label), but sample {i}, of type "
                f"{type(sample).__name__}, is not. Number the labels in the data set itself."
            )
        return sample[0], int(self.labels_of[int(sample[1])])


def classes_of(dataset: Any, depth: int = 0) -> Iterator[tuple[str, ...]]:
    """Return the names of classes of a data set, or of the one that it wraps; empty if they are
    unknown.

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
