"""Classes by their names in configs, and what their arguments are."""

from __future__ import annotations

import difflib
import importlib
import inspect
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import torch

import fl_lightning.callbacks
import fl_lightning.datamodules
import fl_lightning.models
import fl_lightning.optim
import fl_lightning.schedules
from fl_lightning.callback import FederatedCallback
from fl_lightning.errors import UserError, suggest
from fl_lightning.introspection.accepted import declared
from fl_lightning.lab.cli.compose import as_node, class_name, packaged
from fl_lightning.lab.cli.plugins import classes
from fl_lightning.machine.federated_strategy import FederatedStrategy

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
    names["federated"] = f"{FederatedStrategy.__module__}.{FederatedStrategy.__name__}"
    for module in modules:
        # Some names are imported only when they are read, so `vars` would not list them.
        for name in dir(module):
            value = getattr(module, name)
            if isinstance(value, type) and value.__module__.startswith("fl_lightning."):
                names[name] = f"{module.__name__}.{name}"
    return names


# Libraries whose networks are written as timm:resnet18, and our classes for them.
_LIBRARIES = {"timm": "fl_lightning.models.Timm", "torchvision": "fl_lightning.models.Torchvision"}


def whole_path(name: str) -> str:
    """Return the class path of a bare or deprecated name of ours; any other name as it is."""
    module, _, bare = name.rpartition(".")
    if module in ("", "fl_lightning.models") and bare in fl_lightning.models.DEPRECATED:
        name = getattr(fl_lightning.models, bare).__name__  # warns
    return names_of_ours().get(name, name)


def full_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Complete ``class_path: MLP`` or ``network: MLP`` to ours, even if torchvision has an MLP.

    ``network: timm:resnet18`` becomes a :class:`~fl_lightning.models.Timm` with this name.
    """

    def whole(key: Any, value: Any) -> Any:
        path = value.get("class_path") if isinstance(value, dict) else value
        library, colon, name = path.partition(":") if isinstance(path, str) else ("", "", "")
        if key == "network" and colon and library in _LIBRARIES:
            given = {**as_node(value)["init_args"], "name": name}
            value = {"class_path": _LIBRARIES[library], "init_args": given}
        if key in ("class_path", "learner", "network") and isinstance(value, str):
            return whole_path(value)
        if isinstance(value, list):
            return [whole(None, item) for item in value]
        if isinstance(value, dict):
            return {inner: whole(inner, item) for inner, item in value.items()}
        return value

    return {key: whole(None, value) for key, value in config.items()}


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
    return class_of(whole_path(name)) or subclasses(base).get(name)


def parameters(made: Any) -> list[str]:
    """Return the names of what ``made(...)`` accepts, through ``**kwargs`` to its base classes."""
    if not isinstance(made, type):
        return [parameter.name for parameter in _signature(made)]
    names: dict[str, None] = {}
    for _, accepted in _inits(made):
        kinds = {p.kind for p in accepted}
        names |= {p.name: None for p in accepted if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return list(names)


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
    (_, first) = next(_inits(made), (None, [])) if isinstance(made, type) else (None, [])
    # An optimizer gets its parameters from the run.
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [p for p in first if p.kind in kinds and p.name != "params"]
    return [p.name for p in given if p.default is p.empty]


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
    return list(chain(*map(classes_in, inner)))


def subclasses(base: type) -> dict[str, type]:
    """Return every imported public subclass of ``base`` by its bare name.

    Of several classes with one name, this package's counts.
    """
    if base is object:
        return {}
    by_name: dict[str, type] = {}
    waiting: list[type] = list(base.__subclasses__())
    for cls in waiting:
        waiting += cls.__subclasses__()
        ours = cls.__module__.startswith("fl_lightning.")
        if not cls.__name__.startswith("_") and (ours or cls.__name__ not in by_name):
            by_name[cls.__name__] = cls
    return by_name


def choices(base: type) -> list[str]:
    """Return the names to offer where a ``base`` is wanted."""
    # Torch has hundreds of networks, so only those of this package are offered.
    networks = issubclass(base, torch.nn.Module)
    return sorted(
        name
        for name, cls in subclasses(base).items()
        if cls.__module__ not in _INTERNAL
        and (not networks or cls.__module__.startswith("fl_lightning.models"))
    )


def listed(names: Iterable[str]) -> str:
    """Return the names in one line, as many as a paragraph can take."""
    line = ", ".join(names)
    return line if len(line) <= 300 else line[:300].rsplit(", ", 1)[0] + ", …"


def method_class(item: Any) -> type[FederatedCallback]:
    """Return the class that a method names.

    Raises:
        UserError: it cannot be found; the error lists accepted names.
    """
    cls = named(item, FederatedCallback)
    if isinstance(cls, type) and issubclass(cls, FederatedCallback):
        return cls
    path = str(item.get("class_path") if isinstance(item, dict) else item)
    other = f"method: {path!r} is not a FederatedCallback."
    raise UserError(other if cls is not None else no_class(path, FederatedCallback, "method"))


def no_class(name: str, base: type, path: str) -> str:
    """Return the paragraph for the name of a class that cannot be found."""
    offered = choices(base)
    hint = suggest(class_name(name), offered)
    if path == "method":
        configs = [config[7:] for config in packaged() if config.startswith("method/")]
        cutoff = 0.95 if hint else 0.6
        for near in difflib.get_close_matches(class_name(name).lower(), configs, 1, cutoff):
            hint = f" The config is -c method/{near}."
    if "." not in name:
        accepted = f" Accepted: {listed(offered)}, or a path such as my_module.MyClass."
        return f"{path}: there is no class {name!r}.{hint}{accepted if offered else ''}"
    try:
        module = importlib.import_module(name.rpartition(".")[0])
        reason = f"the module has no class {class_name(name)}"
        hint = suggest(class_name(name), vars(module)) or hint
    except Exception as error:
        # The user's own module may raise anything.
        reason = " ".join(str(error).split())[:200]
    return f"{path}: {name!r} cannot be used: {reason}.{hint}"
