"""Attributes that a step writes before it reads them: they change, but nothing goes on from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn

from fl_lightning.engines.choice.trial import Trial
from fl_lightning.engines.replay.attributes import Attributes
from fl_lightning.errors import UserError
from fl_lightning.learner import lightning_modules

Place = tuple[nn.Module, str]
BETWEEN = (  # beginnings of names of hooks that run on the global model
    *("on_train_epoch_", "on_train_start", "on_train_end", "on_fit_", "on_save_checkpoint"),
    *("on_validation_", "on_test_", "on_predict_", "validation_", "test_", "predict_"),
)


class Accesses:
    """Which of some attributes were read in a step that had not written them before."""

    def __init__(self) -> None:
        self.written, self.read_first = set[tuple[int, str]](), set[tuple[int, str]]()

    def read(self, module: nn.Module, name: str) -> None:
        if (id(module), name) not in self.written:
            self.read_first.add((id(module), name))


def kept_among(trial: Trial, attributes: Attributes, client: int, steps: int) -> str:
    """The first attribute that these steps change and that is no cache; empty: there is none."""
    trial.run(client, steps)  # the first step alone may find there already what it writes
    names = attributes.all_changed()
    caches = caches_among(trial, names, client, steps) if names else set()
    return next((name for name in names if name not in caches), "")


def caches_among(trial: Trial, changed: Iterable[str], client: int, steps: int) -> set[str]:
    """Those of ``changed`` attributes (``"path.name"``) that every tried step writes first, and no hook reads."""
    modules = dict(trial.copy.learner.named_modules())
    places = {
        full: (modules.get(full.rpartition(".")[0]), full.rpartition(".")[2]) for full in changed
    }
    found = {full: (m, n) for full, (m, n) in places.items() if m is not None and n in vars(m)}
    found = {
        full: place
        for full, place in found.items()
        if not read_between_rounds(trial.copy.learner, place[1])
    }
    try:
        with watched(trial, list(found.values())) as accesses:
            trial.run(client, steps)
    except UserError:
        raise
    except Exception:  # a class that cannot be watched; what fails without, too, training will meet
        return set()
    return {full for full, (m, n) in found.items() if (id(m), n) not in accesses.read_first}


@contextmanager
def watched(trial: Trial, places: list[Place]) -> Iterator[Accesses]:
    """Within, accesses to these attributes are noted, step by step."""
    accesses, classes, copy = Accesses(), list[tuple[nn.Module, type]](), trial.copy
    before: dict[nn.Module, set[str]] = {}
    for module, name in places:
        before.setdefault(module, set()).add(name)
    gradients = copy._gradients

    def in_a_new_step(*arguments: Any) -> Any:
        accesses.written.clear()
        return gradients(*arguments)

    try:
        for module, names in before.items():
            classes.append((module, type(module)))
            module.__class__ = watching(type(module), names, accesses)
        vars(copy)["_gradients"] = in_a_new_step
        yield accesses
    finally:
        vars(copy).pop("_gradients", None)
        for module, kind in classes:
            module.__class__ = kind


class Unannounced(nn.Module):
    """Before a class of the user's: its ``__init_subclass__``, which may keep a register, is not called."""

    def __init_subclass__(cls, **given: Any) -> None: ...


def watching(kind: Any, names: set[str], accesses: Accesses) -> type:
    """The class of a module, which tells who reads and writes these attributes."""

    def getattribute(self: Any, name: str) -> Any:
        if name in names:
            accesses.read(self, name)
        return kind.__getattribute__(self, name)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        if name in names:
            accesses.written.add((id(self), name))
        kind.__setattr__(self, name, value)

    body = {
        "__getattribute__": getattribute,
        "__setattr__": set_attribute,
        "__module__": kind.__module__,
    }
    made: type = type.__new__(
        type(kind), kind.__name__, (Unannounced, kind), {**body, "__slots__": ()}
    )
    return made


def read_between_rounds(learner: Any, name: str) -> bool:
    """Whether a hook that runs on the global model, and not in a step, speaks of an attribute of this name."""
    kinds = {kind for part in lightning_modules(learner) for kind in type(part).__mro__}
    functions = (f for kind in kinds for f in vars(kind).values() if isinstance(f, FunctionType))
    between = (f for f in functions if f.__name__.startswith(BETWEEN))
    return any(name in f.__code__.co_names for f in between)
