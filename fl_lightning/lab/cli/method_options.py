"""Apply ``--method…`` to the list of methods, and complete short class names."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import fl_lightning.callbacks
import fl_lightning.datamodules
import fl_lightning.models
import fl_lightning.optim
import fl_lightning.schedules
from fl_lightning.callback import FederatedCallback
from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.cli.compose import Command, class_name, packaged, plain_yaml
from fl_lightning.lab.cli.parsing_errors import listed, parameters, subclasses
from fl_lightning.lab.cli.plugins import classes


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


def full_options(options: list[str]) -> list[str]:
    """Complete the learner's options as :func:`full_paths` does: ``--model.learner MLP``."""
    ours = names_of_ours()
    full = list(options)
    for position, option in enumerate(options):
        flag, equals, value = option.partition("=")
        if flag.startswith("--model.learner") and equals and value in ours:
            full[position] = f"{flag}={ours[value]}"
        elif position and options[position - 1].startswith("--model.learner") and option in ours:
            full[position] = ours[option]
    return full


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


def apply_method_options(command: Command) -> None:
    """Turn ``command.config["method"]`` into a checked list, with the options applied.

    The items of the list have ``class_path`` and ``init_args``.
    """
    items = _items(command.config.get("method"))
    for key, text in command.method_options:
        if key in ("", "+"):
            new = _items(plain_yaml(text, f"--method{key}"))
            items = items + new if key else new
            # The methods that run are no longer those of the configs.
            command.names = [name for name in command.names if not name.startswith("method/")]
        else:
            _set(items, key, plain_yaml(text, f"--method.{key}"))
    for item in items:
        cls = method_class(item)
        item["class_path"] = f"{cls.__module__}.{cls.__qualname__}"
        for name in item["init_args"]:
            if name not in parameters(cls):
                raise UserError(
                    f"method.{name}: {cls.__name__} has no such argument."
                    f"{suggest(name, parameters(cls))} "
                    f"Accepted: {listed(parameters(cls)) or 'none'}."
                )
    command.config["method"] = items
    command.method_options = []


def _items(value: Any) -> list[dict[str, Any]]:
    """Return the methods that a list names, or a single one."""
    if not isinstance(value, list):
        value = [value] if value else []
    return [_whole(item) for item in value]


def _whole(item: Any) -> dict[str, Any]:
    if not isinstance(item, dict | str):
        raise UserError(
            f"method: {str(item)[:60]!r} names no class. "
            "Give text, such as ProximalTerm, or class_path."
        )
    if isinstance(item, str):
        item = {"class_path": item}
    return {**item, "init_args": dict(item.get("init_args") or {})}


def _set(items: list[dict[str, Any]], key: str, value: Any) -> None:
    """Set ``key``, such as beta, in the one method that has it.

    If several methods have it, it has to be given as ``Class.beta``.
    """
    name, _, rest = key.partition(".")
    accepted: dict[str, str] = {}
    for item in items:
        accepted |= dict.fromkeys(parameters(method_class(item)), class_name(item))
    owners = [item for item in items if class_name(item) == name]
    if owners and rest:
        name, _, rest = rest.partition(".")
    else:
        owners = [item for item in items if name in parameters(method_class(item))]
    if not owners:
        methods = ", ".join(map(class_name, items)) or "no method is given"
        options = listed(f"--method.{option}" for option in accepted)
        raise UserError(
            f"--method.{key} {value}: no method of this run has the option {name!r} ({methods})."
            f"{suggest(name, accepted)} Accepted: {options or 'nothing; FedAvg has no settings'}."
        )
    if len(owners) > 1:
        names = list(map(class_name, owners))
        raise UserError(
            f"--method.{key} {value}: {' and '.join(names)} both have the option {name!r}. Name "
            f"the one that you mean: {', '.join(f'--method.{each}.{key}' for each in names)}."
        )
    arguments = owners[0]["init_args"]
    if rest:
        # As in --method.beta Exponential --method.beta.gamma 0.9.
        inner = arguments.get(name)
        if not isinstance(inner, dict):
            inner = {"class_path": inner}
        arguments[name] = {**inner, "init_args": {**(inner.get("init_args") or {}), rest: value}}
    else:
        arguments[name] = value
