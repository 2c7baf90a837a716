"""What a learner reaches through its Trainer in a step: the run's loggers, callbacks and data.

The Trainer belongs to the run and not to a copy of the learner. So a trial step and a measurement
must not write there, and a worker process that writes there would lose it.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import nn

from fl_lightning.engines.attributes import Contents, Facts, facts_of
from fl_lightning.engines.view import View
from fl_lightning.lightning import DummyLogger, is_foreign

# A list or a dict of more bytes is compared by its length, and is not copied.
SMALL_BYTES = 2**16
IN_PLACE = (list, dict, set, deque)
MISSING = object()
NO_EXPERIMENT = DummyLogger().experiment


class SilentLogger(View):
    """A logger that shows the attributes of another one, and writes nothing.

    Args:
        wrote: called whenever the other one would have written.
    """

    def __init__(self, of: Any, wrote: Callable[[], None]) -> None:
        super().__init__(of)
        vars(self)["_wrote"] = wrote

    def __getattr__(self, name: str) -> Any:
        value = NO_EXPERIMENT if name == "experiment" else super().__getattr__(name)
        wrote = vars(self)["_wrote"]
        if name == "experiment":
            wrote()
        elif callable(value):
            return lambda *arguments, **options: wrote()
        return value


class Lent:
    """The objects of the run that a learner reached, as they were before, and what it changed.

    Args:
        learner: the learner, or its copy, whose steps may change them.
    """

    def __init__(self, learner: nn.Module) -> None:
        self._contents = Contents(learner, versions=True, most=SMALL_BYTES)
        self._before: dict[int, tuple[Any, dict[str, Any], dict[str, Facts]]] = {}
        self._assigned: dict[str, tuple[Any, Any]] = {}
        self._wrote_logs = False

    def write_logs(self) -> None:
        self._wrote_logs = True

    def assign(self, each: Any, name: str) -> None:
        """The learner assigns to an attribute of this object."""
        self._assigned.setdefault(name, (each, getattr(each, name, MISSING)))

    def reach(self, *objects: Any) -> None:
        """The learner may change the attributes of these from now on."""
        for each in objects:
            if id(each) in self._before:
                continue
            facts = facts_of([each], self._contents, {})
            own = dict(vars(each))
            for name, value in own.items():
                # One that is too large to be compared has its identity there.
                if type(value) in IN_PLACE and type(facts[_full(each, name)][2]) is not int:
                    own[name] = copy.deepcopy(value)
            self._before[id(each)] = each, own, facts

    def changed(self) -> str:
        """The first place that was written; empty if there is none."""
        if self._wrote_logs:
            return "the run's loggers"
        for name, (each, before) in self._assigned.items():
            if getattr(each, name, MISSING) is not before:
                return _full(each, name)
        for each, _, facts in self._before.values():
            for name in self._names(each, facts):
                return _full(each, name)
        return ""

    def undo(self) -> None:
        """Give the objects the attributes that they had."""
        for name, (each, before) in self._assigned.items():
            if before is MISSING:
                delattr(each, name)
            else:
                setattr(each, name, before)
        for each, own, facts in self._before.values():
            for name in self._names(each, facts):
                if name in own:
                    vars(each)[name] = own[name]
                else:
                    del vars(each)[name]

    def _names(self, each: Any, before: dict[str, Facts]) -> list[str]:
        """The attributes that changed. A data module's private ones are its own caches."""
        after = facts_of([each], self._contents, before)
        full = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        names = [name.partition(".")[2] for name in full]
        return [name for name in names if is_callback(each) or not name.startswith("_")]


def is_callback(each: Any) -> bool:
    return hasattr(each, "on_train_batch_start") and hasattr(each, "state_key")


def _full(each: Any, name: str) -> str:
    return f"{type(each).__name__}.{name}"


def users(callbacks: list[Any]) -> list[Any]:
    """The callbacks whose class is a user's."""
    return [each for each in callbacks if is_foreign(type(each))]
