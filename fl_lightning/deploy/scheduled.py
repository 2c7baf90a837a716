"""The attributes of a learner that a server may set at a site: those that the run's code schedules.

Server and site find them alike, in the source of the same learner and the same callbacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import FunctionType
from typing import Any

from torch import nn

from fl_lightning.deploy.site_hooks import AT_SITES, OF_ROUNDS
from fl_lightning.introspection import hook_source
from fl_lightning.learner.attributes import of_framework, of_library
from fl_lightning.learner.modules import lightning_base, lightning_modules

# Hooks of the learner that the server runs between the steps of two rounds.
BETWEEN = (
    *OF_ROUNDS,
    "on_fit_start",
    "on_train_start",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "validation_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_save_checkpoint",
    "on_load_checkpoint",
)
NUMBERS = bool | int | float | None


class Scheduled:
    """The attributes that hooks of rounds and of validation assign by name.

    Args:
        learner: its own hooks count, and all methods that they call.
        callbacks: all of the config's. A name that a callback assigns only to itself does not
            count.
    """

    def __init__(self, learner: nn.Module, callbacks: Iterable[Any]) -> None:
        self.learner = learner
        parts = [*set(chain.from_iterable(map(_own_classes, learner.modules())))]
        waiting: list[tuple[FunctionType, Sequence[type]]] = []
        for part in lightning_modules(learner):
            for hook in BETWEEN:
                waiting += [(function, ()) for function in _functions(_own_classes(part), hook)]
        for callback in callbacks:
            kinds = _own_classes(callback)
            for name in set(chain.from_iterable(map(vars, kinds))) - {"__init__", *AT_SITES}:
                waiting += [(function, kinds) for function in _functions(kinds, name)]
            # for example those of Lightning's LambdaCallback
            given = [each for each in vars(callback).values() if isinstance(each, FunctionType)]
            waiting += [(function, ()) for function in given]
        self.names: set[str] = set()
        seen = set[tuple[FunctionType, bool]]()
        while waiting:
            function, own = waiting.pop()
            if (function, bool(own)) in seen:
                continue
            seen.add((function, bool(own)))
            self.names |= {
                name for name, of_self in hook_source.stores(function) if not (own and of_self)
            }
            for name in hook_source.uses(function):
                waiting += [(called, own) for called in _functions(own, name)]
                waiting += [(called, ()) for called in _functions(parts, name)]
            for called in hook_source.named(function):
                if not of_library(called):
                    waiting.append((called, ()))

    def may_set(self, full: str) -> bool:
        """Return whether a message may set the attribute of this name, such as ``"net.factor"``.

        It is a number or None, or not there yet, of a LightningModule or of a module of the user's
        own.
        """
        part, _, name = full.rpartition(".")
        module = dict(self.learner.named_modules()).get(part)
        if module is None or name not in self.names or of_framework(module, name):
            return False
        whole = lightning_base(module) is not None
        if of_library(type(module)) and not whole:
            return False
        # A property is not read, because it may compute anything.
        in_class = inspect.getattr_static(type(module), name, None)
        if not isinstance(in_class, NUMBERS):
            return False
        return isinstance(getattr(module, name, None), NUMBERS) and (whole or hasattr(module, name))


def _own_classes(each: object) -> list[type]:
    """Return the classes of an object that no library wrote."""
    return [kind for kind in type(each).__mro__ if not of_library(kind)]


def _functions(kinds: Iterable[type], name: str) -> Iterator[FunctionType]:
    """Return the functions of a method or property in these classes."""
    for kind in kinds:
        value = vars(kind).get(name)
        found = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for each in found:
            function = inspect.unwrap(getattr(each, "__func__", each)) if callable(each) else each
            if isinstance(function, FunctionType):
                yield function
