"""Objects of the run that a learner reaches through its Trainer: loggers, callbacks and data.

The Trainer belongs to the run and not to a copy of the learner. So a trial step and a measurement
must not write there, and a worker process that writes there would lose it.
"""

from __future__ import annotations

import copy
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from numbers import Number
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.introspection.attribute_view import View
from fl_lightning.learner.attributes import PLAIN, Contents, Facts, facts_of, own_attributes
from fl_lightning.machine.lightning import is_foreign

# A list or a dict of more bytes is compared by its length, and is not copied.
SMALL_BYTES = 2**16
IN_PLACE = (list, dict, set, deque)
MISSING = object()


class Nothing:
    """The result of a call that writes nothing. Its attributes and calls return it again."""

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Nothing:
        return self

    def __getitem__(self, key: Any) -> Nothing:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def __str__(self) -> str:
        return ""

    def __fspath__(self) -> str:
        return tempfile.gettempdir()


class Silent(View):
    """A logger, or an object in it, that shows what it holds and writes nothing.

    Args:
        wrote: called whenever the object itself may have been written.
    """

    def __init__(self, of: Any, wrote: Callable[[], None]) -> None:
        super().__init__(of)
        vars(self)["_wrote"] = wrote

    def __getattr__(self, name: str) -> Any:
        return self._shown(super().__getattr__(name))

    def __setattr__(self, name: str, value: Any) -> None:
        self._wrote()

    def __getitem__(self, key: Any) -> Any:
        return self._shown(self._of[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._wrote()

    def __call__(self, *arguments: Any, **options: Any) -> Nothing:
        self._wrote()
        return Nothing()

    def _shown(self, value: Any) -> Any:
        if isinstance(value, (*PLAIN, Number, PathLike, Tensor, np.ndarray)):
            return value
        if not isinstance(value, IN_PLACE):
            return Silent(value, self._wrote)
        self._wrote()
        return copy.deepcopy(value)


class Lent:
    """The objects of the run that a learner reached, as they were before, and what it changed.

    Args:
        learner: the learner, or its copy, whose steps may change them.
    """

    def __init__(self, learner: nn.Module) -> None:
        self._contents = Contents(learner, versions=True, most=SMALL_BYTES)
        # Each object's attributes, copies of those that can change in place, and their facts.
        self._before: dict[int, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Facts]]] = {}
        self._assigned: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._wrote_logs = False

    def write_logs(self) -> None:
        self._wrote_logs = True

    def assign(self, each: Any, name: str) -> None:
        """The learner assigns to an attribute of this object."""
        self._assigned.setdefault((id(each), name), (each, getattr(each, name, MISSING)))

    def reach(self, *objects: Any) -> None:
        """The learner may change the attributes of these from now on."""
        for each in objects:
            if id(each) in self._before:
                continue
            facts = facts_of([each], self._contents, {})
            own = own_attributes(each)
            copies: dict[str, Any] = {}
            # Objects that are compared by identity are shared with the copies.
            shared = {id(one): one for one in self._contents.kept if not isinstance(one, Tensor)}
            for name, value in own.items():
                small = value.nbytes <= SMALL_BYTES if isinstance(value, Tensor) else True
                # One that is too large to be compared has its identity there.
                if small and type(facts[_full(each, name)][2]) is not int:
                    with suppress(Exception):  # for example a lock
                        copies[name] = copy.deepcopy(value, dict(shared))
            self._before[id(each)] = each, own, copies, facts

    def changed(self) -> str:
        """Return the first place that was written; empty if nothing was."""
        if self._wrote_logs:
            return "the run's loggers"
        for (_, name), (each, before) in self._assigned.items():
            if getattr(each, name, MISSING) is not before:
                return _full(each, name)
        for each, _, _, facts in self._before.values():
            for name in self._names(each, facts):
                return _full(each, name)
        return ""

    def undo(self) -> None:
        """Give the objects the attributes that they had."""
        for (_, name), (each, before) in self._assigned.items():
            if before is not MISSING:
                setattr(each, name, before)
            elif hasattr(each, name):
                delattr(each, name)
        for each, own, copies, facts in self._before.values():
            for name in self._names(each, facts):
                if name not in own:
                    object.__delattr__(each, name)
                    continue
                object.__setattr__(each, name, own[name])
                if name in copies:
                    _refill(own[name], copies[name])

    def _names(self, each: Any, before: dict[str, Facts]) -> list[str]:
        """The attributes that changed. A data module's private ones are its own caches."""
        after = facts_of([each], self._contents, before)
        full = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        names = [name.partition(".")[2] for name in full]
        return [name for name in names if is_callback(each) or not name.startswith("_")]


def _refill(value: Any, before: Any) -> None:
    """Give a value the content of its earlier copy; others may refer to the same value."""
    if value is before:
        return
    if isinstance(value, (list, deque)):
        value.clear()
        value.extend(before)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(before)
    elif isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(before)
    elif isinstance(value, np.ndarray):
        value[...] = before
    elif hasattr(value, "__dict__"):
        vars(value).clear()
        vars(value).update(vars(before))


def is_callback(each: Any) -> bool:
    return hasattr(each, "on_train_batch_start") and hasattr(each, "state_key")


def _full(each: Any, name: str) -> str:
    return f"{type(each).__name__}.{name}"


def users(callbacks: list[Any]) -> list[Any]:
    """The callbacks whose class is a user's."""
    return [each for each in callbacks if is_foreign(type(each))]
