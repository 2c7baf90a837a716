"""What an argument accepts, declared in the signature: ``rank: Annotated[int, AtLeast(1)] = 2``.

The constructor refuses all else, and ``--help`` and the parser's errors print the same words.
"""

from __future__ import annotations

import inspect
import math
import operator
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from fl_lightning.errors import UserError, suggest

Class = TypeVar("Class", bound=type)


@dataclass(frozen=True)
class Bound:
    """A bound of a number."""

    value: float


class Above(Bound):
    """Greater than ``value``."""


class AtLeast(Bound):
    """``value`` or greater."""


class AtMost(Bound):
    """``value`` or less; without ``AtMost(math.inf)`` a number has to be finite."""


class Below(Bound):
    """Less than ``value``."""


_FINITE = Above(-math.inf)
HOLDS = {Above: operator.gt, AtLeast: operator.ge, AtMost: operator.le, Below: operator.lt}
WORDS = {Above: "above {:g}", AtLeast: "from {:g}", AtMost: "up to {:g}", Below: "to below {:g}"}

PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, Above(0)]
NonNegativeFloat = Annotated[float, AtLeast(0)]
UnitInterval = Annotated[float, AtLeast(0), AtMost(1)]
FiniteFloat = Annotated[float, _FINITE]
BelowOne = Annotated[float, AtLeast(0), Below(1)]


def within(value: Any, bounds: Sequence[Bound]) -> bool:
    """Tell whether a number keeps all bounds, and is finite if they do not name infinity."""
    finite = AtMost(math.inf) in bounds or abs(value) < math.inf
    return finite and all(HOLDS[type(bound)](value, bound.value) for bound in bounds)


def fits(value: Any, hint: Any) -> bool:
    """Tell whether a value is one of those that a type declares; of other types all are."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, alternative) for alternative in inner)
    if origin is Annotated:
        bounds = [mark for mark in inner[1:] if isinstance(mark, Bound)]
        return fits(value, inner[0]) and (not bounds or within(value, bounds))
    if origin is Literal:
        return any(isinstance(value, type(word)) and value == word for word in inner)
    if hint in (int, float):
        number = Integral if hint is int else Real
        return isinstance(value, number) and not isinstance(value, bool)
    if hint is None or hint is types.NoneType:
        return value is None
    if origin in (tuple, list, Sequence, dict, Mapping) and inner:
        return _fits_inside(value, origin, inner)
    kind = origin or hint
    try:
        return isinstance(value, kind) if inspect.isclass(kind) and kind is not Any else True
    except TypeError:  # for example a Protocol
        return True


def _fits_inside(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    """Tell whether a container is one of ``origin``, and its items fit if their type says more."""
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and _fit_each(value.values(), inner[1])
    # A NumPy array is a collection, but no Sequence.
    if not isinstance(value, Collection) or isinstance(value, str | Mapping):
        return False
    if origin is tuple and inner[-1] is not ...:
        return len(value) == len(inner) and all(map(fits, value, inner))
    return _fit_each(value, inner[0])


def _fit_each(items: Collection[Any], hint: Any) -> bool:
    # There may be a million items, so they are only read if their type says more than Python's.
    return not declares(hint) or all(fits(item, hint) for item in items)


def declares(hint: Any) -> bool:
    """Tell whether a type says more than Python's: bounds, words, or true and false."""
    if get_origin(hint) is Annotated:
        return any(isinstance(mark, Bound) for mark in get_args(hint)[1:])
    return hint is bool or get_origin(hint) is Literal or any(map(declares, _alternatives(hint)))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """What a union or a container is of."""
    containers = (Union, types.UnionType, tuple, list, Sequence, dict, Mapping)
    return get_args(hint) if get_origin(hint) in containers else ()


def words_of(hint: Any) -> str:
    """A type in words.

    >>> words_of(Annotated[float, AtLeast(0), Below(0.5)] | None)
    'a number from 0 to below 0.5, or null'
    """
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin in (Union, types.UnionType):
        words = dict.fromkeys(map(words_of, inner))
        if PLAIN["float"] in words:
            words.pop(PLAIN["int"], None)
        return ", or ".join(words)
    if origin is Annotated:
        bounds = [WORDS[type(mark)].format(mark.value) for mark in inner[1:] if mark != _FINITE]
        return " ".join([words_of(inner[0]), *bounds]) if bounds else "a finite number"
    if origin is Literal:
        *first, last = map(repr, inner)
        return f"{', '.join(first)} or {last}" if first else last
    if origin is tuple:
        return f"{len(inner)} values, each {' and '.join(dict.fromkeys(map(words_of, inner)))}"
    if origin in (list, Sequence):
        return f"a list, each {words_of(inner[0])}"
    if origin in (dict, Mapping):
        return f"a mapping to {words_of(inner[1])}"
    name = getattr(hint, "__name__", str(hint))
    return PLAIN.get(name, name)


PLAIN = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "NoneType": "null",
    "Schedule": "a schedule",
    "Any": "anything",
    "Callable": "a function",
    "list": "a list",
    "dict": "a mapping",
    "Sequence": "a list",
}


def check(option: str, value: object, hint: Any) -> None:
    """Refuse a value that a type does not accept.

    >>> check("trim", 0.7, Annotated[float, AtLeast(0), Below(0.5)])
    Traceback (most recent call last):
    fl_lightning.errors.UserError: trim=0.7 is not accepted; it has to be a number from 0 to \
below 0.5.
    """
    if not fits(value, hint):
        raise UserError(
            f"{option}={value!r} is not accepted; it has to be {suggested(value, hint)}"
        )


def suggested(value: object, hint: Any) -> str:
    """A type in words, and the word of it that is near to ``value``."""
    words = list(_literals(hint))
    return f"{words_of(hint)}.{suggest(value, words) if isinstance(value, str) else ''}"


def _literals(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    for alternative in _alternatives(hint):
        yield from _literals(alternative)


@cache
def declared(function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a function that declare what they accept → their types."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = parameter.annotation
        if isinstance(hint, str):
            try:
                hint = eval(hint, inspect.unwrap(function).__globals__)
            except Exception:  # for example a name that only a type checker imports
                continue
        if declares(hint):
            found[name] = hint
    return found


def check_arguments(init: Callable[..., None], given: Mapping[str, Any]) -> None:
    """Refuse arguments that the signature of ``init`` does not accept.

    Args:
        given: the arguments by name, and the object as ``self``.
    """
    for name, hint in declared(init).items():
        default = inspect.signature(init).parameters[name].default
        # The type may lack the default, as in `flag: bool = None`.
        if given.get(name, default) is not default:
            check(f"{type(given['self']).__name__}: {name}", given[name], hint)


def checked(cls: Class) -> Class:
    """Have a class's own ``__init__`` refuse arguments that its signature does not accept."""
    init = vars(cls).get("__init__")
    if not (inspect.isfunction(init) and declared(init)):
        return cls
    signature = inspect.signature(init)

    @wraps(init)
    def checking(self: Any, /, *arguments: Any, **named: Any) -> None:
        try:
            given = signature.bind(self, *arguments, **named).arguments
        except TypeError:  # `__init__` will raise this error with a better message
            given = {}
        check_arguments(init, {**given, "self": self})
        init(self, *arguments, **named)

    cls.__init__ = checking  # type: ignore[misc]
    return cls


class Checked:
    """Base class of classes that are :func:`checked`, each with its own ``__init__``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        checked(cls)
