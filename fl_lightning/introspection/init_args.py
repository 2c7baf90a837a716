"""The arguments with which an object was made, as a config writes them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from fl_lightning.accepted import Checked

# A longer list is data, and not a setting.
LONGEST = 1000


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
    known: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in values.items():
        try:
            known[name] = described(value)
        except (NotKnown, RecursionError):  # a list may contain itself
            unknown.append(name)
    return known, unknown


def described(value: Any) -> Any:
    """Return a value for a config: plain data, a path of a class, or ``class_path`` and arguments.

    Raises:
        NotKnown: the object, or a part of it, has no such form.
    """
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
    config: dict[str, Any] = {"class_path": path_of(type(value))}
    noted = vars(value).get("_made_with") if hasattr(value, "__dict__") else None
    if noted is not None:
        known, unknown = noted
        return {**config, "init_args": known}, unknown
    kept: dict[str, Any] = {}
    lacking: list[str] = []
    hyper_parameters = getattr(value, "hparams", None)
    saved = dict(hyper_parameters) if isinstance(hyper_parameters, Mapping) else {}
    try:
        parameters = inspect.signature(type(value)).parameters
    except (TypeError, ValueError):  # for example a tensor's class, which is written in C
        raise NotKnown from None
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if name in saved:
            kept[name] = saved[name]
            continue
        # If an argument has the name of a method, it is stored with an underscore appended.
        found = [own for own in (name, f"{name}_") if own in getattr(value, "__dict__", {})]
        module = getattr(value, "_modules", {}).get(name)
        if found:
            kept[name] = getattr(value, found[0])
        elif module is not None:
            kept[name] = module
        else:
            lacking.append(name)
    known, unknown = _each(kept)
    return {**config, "init_args": known}, [*unknown, *lacking]


def made(config: Any) -> Any:
    """Return the object that :func:`described` has described."""
    if isinstance(config, list):
        return [made(item) for item in config]
    if not isinstance(config, dict) or "class_path" not in config:
        return config
    module, _, name = str(config["class_path"]).rpartition(".")
    arguments = {key: made(value) for key, value in (config.get("init_args") or {}).items()}
    return getattr(import_module(module), name)(**arguments)
