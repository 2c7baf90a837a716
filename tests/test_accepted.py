"""What arguments accept is declared in signatures, and constructors hold to it."""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import pytest

import fl_lightning
from fl_lightning.callback import FederatedCallback
from fl_lightning.callbacks import RobustAggregation
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import (
    Above,
    AtLeast,
    AtMost,
    Below,
    FiniteFloat,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    check,
    declared,
    fits,
    words_of,
)
from fl_lightning.models import MLP, Classifier
from fl_lightning.schedules import Cosine, Schedule

NAN = math.nan


class Named(Protocol):
    name: str


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (PositiveInt, [1, np.int64(3)], [0, 1.0, True, "1", None, NAN]),
        (PositiveFloat, [1, 0.5, np.float32(0.5)], [0, -1.0, math.inf, NAN, True, "1"]),
        (UnitInterval, [0, 1, 0.5], [-0.1, 1.1, NAN]),
        (FiniteFloat, [-3, 0.0], [math.inf, -math.inf, NAN, False]),
        (Annotated[float, Above(0), AtMost(math.inf)], [math.inf, 2], [0, NAN]),
        (Annotated[float, AtLeast(0), Below(0.5)], [0, 0.4], [0.5]),
        (PositiveInt | Literal["all"] | None, [3, "all", None], ["any", 0]),
        (NonNegativeFloat | Schedule, [0, Cosine(3)], [-1, "Cosine"]),
        (bool, [True, False], [0, 1, "false", None, np.True_]),
        (bool | Literal["auto"], [True, "auto"], [1, "on"]),
        (Literal["a", True], ["a", True], [1, "b", ["a"]]),
        (tuple[PositiveInt, UnitInterval], [(1, 0.5), [2, 0]], [(0, 0.5), (1,), 1, "12"]),
        (list[PositiveInt], [[1, 2], (), np.array([1])], [[0], 1, "12"]),
        (Sequence[UnitInterval] | None, [(0.5,), None], [(2,)]),
        (Mapping[str, Literal["a"]] | Literal["b"], [{"x": "a"}, "b"], [{"x": "b"}, "c"]),
        (list[PositiveInt] | Callable[[Any], Any] | bool, [[1], len, True], ["x", [0]]),
        (Sequence[Any] | bool, [[object()], True], [3]),
        (tuple[PositiveInt, ...] | None, [(1, 2, 3), (), None], [(1, 0), 1]),
        (bool | Named, [True, object()], []),
    ],
)
def test_what_a_type_accepts(hint: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not fits(value, hint)] == []
    assert [value for value in wrong if fits(value, hint)] == []


def test_words() -> None:
    assert words_of(Literal["a", "b", "c"] | PositiveInt) == "'a', 'b' or 'c', or an integer from 1"
    assert words_of(tuple[UnitInterval, UnitInterval]) == "2 values, each a number from 0 up to 1"
    assert words_of(Annotated[int | float, AtLeast(1)]) == "a number from 1"
    assert words_of(list[PositiveInt]) == "a list, each an integer from 1"
    assert words_of(dict[str, FiniteFloat]) == "a mapping to a finite number"
    with pytest.raises(UserError, match=r"x='alll' is not accepted.* Did you mean 'all'\?"):
        check("x", "alll", Literal["all"] | PositiveInt)


class Mine(FederatedCallback):
    def __init__(
        self,
        k: PositiveInt = 1,
        loose: bool = None,  # type: ignore[assignment]  # noqa: RUF013  # as users write
        own: int = 0,
    ) -> None:
        super().__init__()
        self.k = k


class Below1(Mine):
    def __init__(self, size: float) -> None:
        super().__init__(k=int(size))


def test_a_method_of_ones_own_is_held_to_its_signature() -> None:
    Mine(loose=None, own=-1)  # type: ignore[arg-type]  # a default is never refused
    for make, name in ((lambda: Mine(0), "Mine"), (lambda: Below1(0.5), "Below1")):
        with pytest.raises(UserError, match=f"{name}: k=0 is not accepted"):
            make()
    with pytest.raises(UserError, match=r"mixing=0\.5 is not accepted"):
        RobustAggregation(rule="krum", byzantine=1, mixing=0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Mine.__init__\(\) got an unexpected keyword"):
        Mine(wrong=1)  # type: ignore[call-arg]
    assert list(inspect.signature(Mine).parameters) == ["k", "loose", "own"]


def test_a_subclass_of_a_learner_keeps_its_hyper_parameters() -> None:
    class Own(Classifier):
        def __init__(self, network: MLP, extra: int) -> None:
            super().__init__(network, 2, lr=0.5)

    rest = dict.fromkeys(("weight_decay", "momentum", "label_smoothing"), 0.0) | {"metrics": ()}
    expected = {"num_classes": 2, "lr": 0.5, "extra": 7, **rest}
    assert dict(Own(MLP([2, 2]), 7).hparams) == expected
    with pytest.raises(UserError, match="Classifier: lr=nan is not accepted"):
        Classifier(MLP([2, 2]), 2, lr=NAN)


def classes_that_declare() -> list[type]:
    found = set[type]()
    for module in pkgutil.walk_packages(fl_lightning.__path__, "fl_lightning."):
        if module.name.startswith(("fl_lightning.deploy.flower", "fl_lightning.__main__")):
            continue
        for cls in vars(importlib.import_module(module.name)).values():
            own = inspect.isclass(cls) and cls.__module__.startswith("fl_lightning.")
            init = vars(cls).get("__init__") if own else None
            hints = declared(init) if inspect.isfunction(init) else {}
            if "Annotated" in str(hints):
                found.add(cls)
    return sorted(found, key=lambda cls: f"{cls.__module__}.{cls.__name__}")


def test_every_class_that_declares_refuses() -> None:
    """A class that is neither a callback nor a data module needs ``@checked``."""
    lenient = []
    for cls in classes_that_declare():
        hints = declared(cls.__init__)
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        given = {p.name: object() for p in parameters if p.default is p.empty and p.kind < 4}
        given[next(name for name in hints if "Annotated" in str(hints[name]))] = object()
        made: Any = cls
        if inspect.isabstract(cls):
            made = type("Concrete", (cls,), dict.fromkeys(cls.__abstractmethods__))
        try:
            made(**{k: v for k, v in given.items() if not k.startswith(("arg", "kwarg", "fixed"))})
        except Exception as error:
            if "is not accepted; it has to be" in str(error):
                continue
        lenient.append(cls.__qualname__)
    assert lenient == []
    assert len(classes_that_declare()) > 60
