"""Names of classes that data sets bring along: one label means one class in all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from fl_lightning.errors import UserError

DEPTH = 20  # wrappers around wrappers


def check_classes(named: Iterable[tuple[str, Any]]) -> None:
    """Refuse data sets in which a label means different classes.

    Args:
        named: what each data set is called in an error, and the data set.

    Raises:
        UserError: the names of two differ, with both.
    """
    first = ""
    known: tuple[str, ...] = ()
    for place, dataset in named:
        for classes in classes_of(dataset):
            shared = min(len(classes), len(known))
            if classes[:shared] != known[:shared]:
                raise UserError(
                    f"{place} has the classes {listed(classes)}, and {first} has {listed(known)}, "
                    "so one label would mean different classes. Give all data sets the same "
                    "classes in the same order: ImageFolder reads them from the names of its "
                    "folders, so make an empty folder for a class without images "
                    "(ImageFolder(…, allow_empty=True)). If a wrapper of yours gives the samples "
                    "other labels, give it an attribute classes with their names."
                )
            # Labels agree where one has only the first of the other's classes.
            if len(classes) > len(known):
                first = place
                known = classes


def classes_of(dataset: Any, depth: int = 0) -> Iterator[tuple[str, ...]]:
    """The names of classes of a data set, or of those that it wraps; none where they are unknown.

    A data set that changes its labels by ``target_transform`` has no names of them.
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
    """The first names, in order.

    >>> listed(("cat", "dog"))
    "'cat', 'dog'"
    """
    more = f", … ({len(names)} in all)" if len(names) > 6 else ""
    return ", ".join(map(repr, names[:6])) + more
