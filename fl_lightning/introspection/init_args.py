"""The arguments with which an object was made, as a config writes them."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from fl_lightning.introspection.accepted import Checked

# A longer list is data, and not a setting.
LONGEST = 1000
Difference = tuple[str, Any, Any]  # place of a setting, its value then, its value now


class NotKnown(Exception):
    """A value cannot be written into a config: it is data, a lambda, or a class of a script."""


class Given(Checked):
    """Checks arguments of its subclasses' ``__init__``, and stores them for :func:`described`."""

    _made_with: tuple[dict[str, Any], list[str]]

    def __new__(cls, /, *arguments: Any, **named: Any) -> Any:
        made = super().__new__(cls)
        try:
            bound = inspect.signature(cls.__init__).bind(made, *arguments, **named)
        except TypeError:  # `__init__` will raise this error with a better message
            return made
        values = dict(list(bound.arguments.items())[1:])
        kinds = inspect.signature(cls.__init__).parameters
        unnamed = []
        for name in list(values):
            if kinds[name].kind is inspect.Parameter.VAR_KEYWORD:
                values |= values.pop(name)
            elif kinds[name].kind is inspect.Parameter.VAR_POSITIONAL:
                # A config names each argument, and positional ones have no names.
                unnamed += [f"*{name}"] if values.pop(name) else []
        known, unknown = _each(values)
        object.__setattr__(made, "_made_with", (known, [*unknown, *unnamed]))
        return made


def _each(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values that a config can hold, and the names of the others."""
    texts: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in values.items():
        try:
            texts[name] = described(value)
        except (NotKnown, RecursionError):  # a list may contain itself
            unknown.append(name)
    return texts, unknown


def described(value: Any) -> Any:
    """Return a value for a config: plain data, a path of a class, or ``class_path`` and arguments.

    Raises:
        NotKnown: the object, or a part of it, has no such form.
    """
    if isinstance(value, Enum):
        return str(value.value) if isinstance(value, str) else value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple) and len(value) <= LONGEST:
        return [described(item) for item in value]
    if isinstance(value, Mapping) and len(value) <= LONGEST:
        return {str(key): described(item) for key, item in value.items()}
    if isinstance(value, type) or inspect.isfunction(value):
        return path_of(value)
    if isinstance(value, partial) and isinstance(value.func, type) and not value.args:
        return {"class_path": path_of(value.func), "init_args": described(value.keywords)}
    config, unknown = described_object(value)
    if unknown:
        raise NotKnown
    return config


def path_of(named: Any) -> str:
    """Return the path from which a class or a function is imported.

    Raises:
        NotKnown: it cannot be imported, because it belongs to a script or a function.
    """
    module, name = named.__module__, named.__qualname__
    if module in ("__main__", "builtins") or "<" in name:
        raise NotKnown
    return f"{module}.{name}"


def described_object(value: Any) -> tuple[dict[str, Any], list[str]]:
    """Return ``class_path`` and ``init_args`` of an object, and the names of arguments that it
    lacks.

    The arguments are those that it stored (:class:`Given`), that it saved as hyper-parameters, or
    that it has as attributes of the same name.

    Raises:
        NotKnown: its class cannot be imported by another program.
    """
    path = path_of(type(value))
    values, lacking = getattr(value, "__dict__", {}).get("_made_with") or stored(value)
    known, unknown = _each(values)
    return {"class_path": path, "init_args": known}, [*unknown, *lacking]


def stored(value: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of an object's class that it has as hyper-parameters or attributes of
    the same name, and the names of the others.

    Raises:
        NotKnown: Python does not know the class's arguments.
    """
    kept: dict[str, Any] = {}
    lacking: list[str] = []
    hyper_parameters = getattr(value, "hparams", None)
    saved = dict(hyper_parameters) if isinstance(hyper_parameters, Mapping) else {}
    try:
        parameters = inspect.signature(type(value)).parameters
    except (TypeError, ValueError):  # for example a tensor's class, which is written in C
        raise NotKnown from None
    own = {**getattr(value, "_modules", {}), **getattr(value, "__dict__", {}), **saved}
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        # If an argument has the name of a method, it is stored with an underscore appended.
        found = [each for each in (name, f"{name}_") if each in own]
        if found:
            kept[name] = own[found[0]]
        else:
            lacking.append(name)
    return kept, lacking


def settings_of(place: str, value: Any) -> dict[str, str]:
    """Return a described object, or arguments by name, as texts by their place in a config.

    Runs are compared by these texts. What has no form in a config is left out, and a long text is a
    checksum.

    >>> settings_of("data", {"class_path": "x.Y", "init_args": {"b": [1]}, "c": object()})
    {'data': 'x.Y', 'data.b': '[1]'}
    """
    texts = {}
    for name, each in flat(place, value, _whole_path).items():
        text = each if isinstance(each, str) else repr(each)
        if len(text) > 200:
            text = f"{text[:20]}… {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        texts[name] = text
    return texts


def differences(
    then: Mapping[str, Any], now: Mapping[str, Any], absent: Any = None
) -> list[Difference]:
    """Return where two records of settings differ; a place that one lacks has ``absent`` there.

    >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None})
    [('b', 2, 3)]
    """
    every = [(name, then.get(name, absent), now.get(name, absent)) for name in {**then, **now}]
    return [each for each in every if each[1] != each[2]]


def flat(place: str, value: Any, called: Callable[[str], str] = str) -> dict[str, Any]:
    """Return single values by their place, of an object, of its description or of a config.

    An object is its class and its known arguments. A list of objects also has a place for each.
    What has no form in a config is left out.

    Args:
        called: gives the text of a class from its path.

    >>> flat("", {"a": {"class_path": "x.Y", "init_args": {"b": 1}}, "c": [{"class_path": "Z"}]})
    {'a': 'x.Y', 'a.b': 1, 'c': ['Z'], 'c.Z': 'Z'}
    """
    if isinstance(value, Mapping) and "class_path" in value:
        own = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
        return {place: called(str(value["class_path"])), **_each_flat(place, own, called)}
    if isinstance(value, Mapping) and value:
        return _each_flat(place, value, called)
    if isinstance(value, list | tuple) and any(_is_object(item) for item in value):
        items = {}
        for k, item in enumerate(value):
            name = str(item["class_path"]).rpartition(".")[2] if _is_object(item) else str(k)
            items[f"{name} {k}" if name in items else name] = item
        return {place: list(items), **_each_flat(place, items, called)}
    try:
        config = described(value)
    except (NotKnown, RecursionError):
        return _partly(place, value, called)
    return flat(place, config, called) if _is_object(config) else {place: config}


def _each_flat(
    place: str, values: Mapping[str, Any], called: Callable[[str], str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(f"{place}.{name}" if place else str(name), value, called)
    return found


def _partly(place: str, value: Any, called: Callable[[str], str]) -> dict[str, Any]:
    """Return the class of a module or a data module of which not all arguments are known, and the
    known ones.

    Nothing is returned of other objects: they are data.
    """
    if not hasattr(value, "forward") and not hasattr(value, "train_dataloader"):
        return {}
    path = f"{type(value).__module__}.{type(value).__qualname__}"
    own, _ = getattr(value, "__dict__", {}).get("_made_with") or stored(value)
    return {place: called(path), **_each_flat(place, own, called)}


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping) and "class_path" in value


def _whole_path(path: str) -> str:
    """Return the place where a class is defined, if its module has been imported."""
    module, _, name = str(path).rpartition(".")
    cls = getattr(sys.modules.get(module), name, None)
    return path if cls is None else f"{cls.__module__}.{cls.__qualname__}"


def made(config: Any) -> Any:
    """Return the object that :func:`described` has described."""
    if isinstance(config, list):
        return [made(item) for item in config]
    if not isinstance(config, dict) or "class_path" not in config:
        return config
    arguments = {key: made(value) for key, value in (config.get("init_args") or {}).items()}
    return resolve_name(str(config["class_path"]))(**arguments)
