"""Classes by their names in configs, and what their arguments are."""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch

import fl_lightning.callbacks
import fl_lightning.datamodules
import fl_lightning.models
import fl_lightning.optim
import fl_lightning.schedules
from fl_lightning.accepted import declared
from fl_lightning.callback import FederatedCallback
from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.cli.compose import class_name, packaged
from fl_lightning.lab.cli.plugins import classes

# Callbacks of every run, and base classes: nobody names them in a config.
_INTERNAL = (
    "fl_lightning.callback",
    "fl_lightning.lab.cli.run_folder",
    "fl_lightning.lab.cli.signals",
    "fl_lightning.evaluation.measurement",
)


@cache
def names_of_ours() -> dict[str, str]:
    """Return bare name → class path, for the classes that this package and plugins export."""
    modules = (
        fl_lightning.callbacks,
        fl_lightning.datamodules,
        fl_lightning.models,
        fl_lightning.optim,
        fl_lightning.schedules,
    )
    names = dict(classes())
    for module in modules:
        # Some names are imported only when they are read, so `vars` would not list them.
        for name in dir(module):
            value = getattr(module, name)
            if isinstance(value, type) and value.__module__.startswith("fl_lightning."):
                names[name] = f"{module.__name__}.{name}"
    return names


def full_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Complete ``class_path: MLP`` or ``network: MLP`` to ours, even if torchvision has an MLP
    too.
    """
    ours = names_of_ours()

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(item) for item in node]
        if isinstance(node, dict):
            return {key: completed(key, value) for key, value in node.items()}
        return node

    def completed(key: Any, value: Any) -> Any:
        if key in ("class_path", "learner", "network") and isinstance(value, str):
            return ours.get(value, value)
        return walk(value)

    return {key: walk(value) for key, value in config.items()}


def class_of(node: Any) -> Any:
    """Return the class or function whose full path a node of a config has, or None."""
    path = node.get("class_path") if isinstance(node, dict) else node
    module, _, name = str(path).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception:
        # The user's own module may raise anything.
        return None
    return found if callable(found) else None


def named(node: Any, base: type = object) -> Any:
    """Return the class or function that a node names by its path or by its bare name, or None."""
    name = class_name(node)
    path = node.get("class_path") if isinstance(node, dict) else node
    if "." in str(path):
        return class_of(node)
    return class_of(names_of_ours().get(name)) or subclasses(base).get(name)


def parameters(made: Any) -> list[str]:
    """Return the names of what ``made(...)`` accepts, through ``**kwargs`` to its base classes."""
    if not isinstance(made, type):
        return [parameter.name for parameter in _signature(made)]
    names: list[str] = []
    for _, accepted in _inits(made):
        names += [p.name for p in accepted if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        if all(p.kind != p.VAR_KEYWORD for p in accepted):
            break
    return list(dict.fromkeys(names))


def _inits(cls: type) -> Iterator[tuple[Any, list[inspect.Parameter]]]:
    """Yield the constructors of a class and of its bases, each with its parameters."""
    for base in cls.__mro__:
        if "__init__" in vars(base):
            init = vars(base)["__init__"]
            yield init, _signature(init)[1:]


def _signature(function: Any) -> list[inspect.Parameter]:
    """Return the parameters of a function, or none if Python does not know them."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []


def needed(made: Any) -> list[str]:
    """Return the arguments without which ``made(...)`` cannot be called by a config."""
    found = [accepted for _, accepted in _inits(made)] if isinstance(made, type) else []
    first = found[0] if found else []
    # An optimizer gets its parameters from the run.
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        p.name for p in first if p.default is p.empty and p.kind in kinds and p.name != "params"
    ]


def hint_of(made: Any, name: str) -> Any:
    """Return the type of an argument, or None if it has none that can be read."""
    functions = [init for init, _ in _inits(made)] if isinstance(made, type) else [made]
    for function in functions:
        if name not in ("return", *(parameter.name for parameter in _signature(function))):
            continue
        try:
            return typing.get_type_hints(function, include_extras=True).get(name)
        except Exception:  # for example a name that only a type checker imports
            return declared(function).get(name)
    return None


def classes_in(hint: Any) -> list[type]:
    """Return the classes in a type that are named by a class path.

    >>> from collections.abc import Callable
    >>> from torch.optim import SGD
    >>> classes_in(Callable[[list[int]], SGD] | dict[str, int] | None)
    [<class 'torch.optim.sgd.SGD'>]
    """
    if isinstance(hint, type) and not typing.get_args(hint):
        plain = hint.__module__ in ("builtins", "pathlib", "datetime", "os")
        return [] if plain or hint is torch.Tensor else [hint]
    inner = typing.get_args(hint)
    if inner and isinstance(inner[0], list):
        inner = inner[1:]  # those before it are the arguments of a function
    found: list[type] = []
    for each in inner:
        found += classes_in(each)
    return found


def subclasses(base: type) -> dict[str, type]:
    """Return every imported public subclass of ``base`` by its bare name.

    Of several classes with one name, this package's counts.
    """
    if base is object:
        return {}
    by_name: dict[str, type] = {}
    waiting: list[type] = list(base.__subclasses__())
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        ours = cls.__module__.startswith("fl_lightning.")
        if not cls.__name__.startswith("_") and (ours or cls.__name__ not in by_name):
            by_name[cls.__name__] = cls
    return by_name


def choices(base: type) -> list[str]:
    """Return the names to offer where a ``base`` is wanted."""
    names = []
    for name, cls in subclasses(base).items():
        # Torch has hundreds of networks, so only those of this package are offered.
        module = cls.__module__
        hidden = issubclass(base, torch.nn.Module) and not module.startswith("fl_lightning.models")
        if not hidden and module not in _INTERNAL:
            names.append(name)
    return sorted(names)


def listed(names: Iterable[str]) -> str:
    """Return the names in one line, as many as a paragraph can take."""
    line = ", ".join(names)
    return line if len(line) <= 300 else line[:300].rsplit(", ", 1)[0] + ", …"


def method_class(item: Any) -> type[FederatedCallback]:
    """Return the class that a method names.

    Raises:
        UserError: it cannot be found; the error lists accepted names.
    """
    path = item.get("class_path") if isinstance(item, dict) else item
    # This imports plugins, so that their methods are known too.
    names_of_ours()
    known = subclasses(FederatedCallback)
    # A callback that only measures or simulates is not a method, although the list accepts it.
    methods = [c for c in known.values() if issubclass(c, FederatedCallback) and c.is_method()]
    names = listed(sorted(c.__name__ for c in methods))
    accepted = f"Accepted: {names}, or my_module.MyClass of a file my_module.py here."
    if not isinstance(path, str):
        raise UserError(f"method: {item!r} names no class. {accepted}")
    if "." in path:
        module, _, name = path.rpartition(".")
        own: Any = None
        try:
            own = importlib.import_module(module)
            cls = getattr(own, name)
        except (ImportError, AttributeError) as error:
            hint = suggest(name, known if own is None else [*vars(own), *known])
            raise UserError(
                f"method: {path!r} cannot be imported: {error}.{hint} {accepted}"
            ) from None
    else:
        cls = known.get(path)
    if not (isinstance(cls, type) and issubclass(cls, FederatedCallback)):
        problem = "is not a FederatedCallback" if cls is not None else "no such method"
        configs = [name[7:] for name in packaged() if name.startswith("method/")]
        if path.lower() in configs:
            problem = f"no class of this name; it is a config: -c method/{path.lower()}"
        hint = suggest(path, known)
        if not hint and path.lower() not in configs:
            hint = suggest(path.lower(), configs).replace("'", "-c method/", 1).replace("'", "")
        raise UserError(f"method: {path!r}: {problem}.{hint} {accepted}")
    return cls
