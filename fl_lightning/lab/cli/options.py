"""Options over the configs: each is set in the config that the parser then reads."""

from __future__ import annotations

import re
import types
import typing
from contextlib import suppress
from typing import Any, Union

from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.cli.classes import (
    full_paths,
    hint_of,
    listed,
    method_class,
    named,
    names_of_ours,
    parameters,
)
from fl_lightning.lab.cli.compose import (
    Command,
    as_loggers,
    class_name,
    merge,
    plain_yaml,
    same_class,
)
from fl_lightning.lab.cli.run_folder import RunEvents
from fl_lightning.machine.federated_strategy import FederatedStrategy
from fl_lightning.machine.lightning import pl
from fl_lightning.module import FederatedModule

_IN_A_NODE = ("class_path", "init_args", "dict_kwargs")
_IS_NODE = {"class_path", "init_args"}


def apply_options(command: Command) -> None:
    """Set each option of the command line in ``command.config``, and check the methods.

    Afterwards the classes of ours have their whole paths, and ``method`` is a list of
    ``{class_path, init_args}``.
    """
    config = full_paths(command.config)
    config["trainer"] = _completed(config.get("trainer") or {})
    config["model"] = config.get("model") or {}
    methods = _items(config.get("method"))
    for option, text in command.options:
        head, _, rest = option.partition(".")
        if head in ("method", "method+"):
            methods = _with_method(command, methods, rest, text, head == "method+")
            continue
        if option == "trainer.logger+" and config["trainer"].get("logger") in (None, True):
            # Another logger stands beside TensorBoard's, which true and null stand for.
            config["trainer"]["logger"] = [True]
        config = _put(config, option.split("."), _value(option, text))
    config["trainer"] = _completed(config["trainer"])
    config["method"] = [_checked(item) for item in methods]
    config = full_paths(config)
    for section, made in (("trainer", pl.Trainer), ("model", FederatedModule)):
        config[section] = _arguments(config[section], made)
    if "data" in config:
        config["data"] = _typed(config["data"], None)
    command.config = config


def _value(option: str, text: str) -> Any:
    """Return an option's value: lists, mappings and null; what other text means, its type says."""
    if text == "null":
        return None
    if text[:1] not in ("[", "{") and option != "trainer.logger":
        return text
    value = plain_yaml(text, f"--{option}")
    spaced = re.sub(r"([{,]\s*\w+):(?=[^\s/])", r"\1: ", text)
    if isinstance(value, dict) and spaced != text:
        raise UserError(f"{option}: {text!r} lacks a blank after each colon. Give {spaced!r}.")
    return value


def _typed(value: Any, hint: Any) -> Any:
    """Return a value with the numbers that its texts write, in arguments of classes whose type
    takes numbers as well as texts. jsonargparse would leave such a text as it is.
    """
    if isinstance(value, list):
        return [_typed(item, hint) for item in value]
    if isinstance(value, dict) and "class_path" in value:
        made = named(value)
        arguments = value.get("init_args")
        if made is None or not isinstance(arguments, dict):
            return value
        return {**value, "init_args": _arguments(arguments, made)}
    if isinstance(value, str):
        kinds = {typing.get_args(each)[0] if _annotated(each) else each for each in _union(hint)}
        if str not in kinds:
            return value
        with suppress(UserError):  # a number that YAML does not take is a text
            number = plain_yaml(value, "")
            numbers = kinds | ({int, float} if kinds & {int, float} else set())
            return number if type(number) in numbers else value
    return value


def _arguments(given: Any, made: Any) -> Any:
    if not isinstance(given, dict):
        return given
    return {name: _typed(value, hint_of(made, name)) for name, value in given.items()}


def _union(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else ()


def _annotated(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Annotated


def _put(node: Any, keys: list[str], value: Any) -> Any:
    """Return a node of the config with ``value`` at ``keys``, which may leave out ``init_args``."""
    key, *rest = keys
    if isinstance(node, list):
        # As in --trainer.callbacks+ Timer --trainer.callbacks.duration 1: of the last one.
        return [*node[:-1], _put(node[-1] if node else None, keys, value)]
    if isinstance(node, str):
        node = {"class_path": names_of_ours().get(node, node)}
    elif not isinstance(node, dict):
        # The class may follow.
        node = {"init_args": {}}
    if _IS_NODE & set(node) and key not in _IN_A_NODE:
        return {**node, "init_args": _put(node.get("init_args") or {}, keys, value)}
    if rest:
        return {**node, key: _put(node.get(key), rest, value)}
    if key == "class_path":
        return _with_class(node, value)
    before = node.get(key)
    if key.endswith("+"):
        return merge(node, {key: value})
    if isinstance(value, dict) and (_IS_NODE & set(value) or key in ("model", "trainer")):
        value = merge(before, value)
    elif isinstance(value, str) and isinstance(before, dict) and _IS_NODE & set(before):
        value = _with_class(before, value)
    return {**node, key: value}


def _with_class(node: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a node of the class at ``path``, with those of its arguments that this class takes."""
    path = names_of_ours().get(path, path)
    arguments = node.get("init_args") or {}
    if not same_class(path, node.get("class_path")):
        cls = named(path)
        accepted = parameters(cls) if isinstance(cls, type) else []
        arguments = {name: value for name, value in arguments.items() if name in accepted}
    return {"class_path": path, "init_args": arguments}


# --------------------------------------------------------------------------- the Trainer


def _completed(trainer: Any) -> Any:
    """Return the Trainer's loggers, and its strategy by its class if it has options."""
    if not isinstance(trainer, dict):
        return trainer
    completed = dict(trainer)
    if "logger" in trainer:
        events = f"{RunEvents.__module__}.{RunEvents.__qualname__}"
        completed["logger"] = as_loggers(trainer["logger"], events)
    strategy = trainer.get("strategy")
    if isinstance(strategy, dict) and strategy.get("class_path") == FederatedStrategy.strategy_name:
        path = f"{FederatedStrategy.__module__}.{FederatedStrategy.__qualname__}"
        completed["strategy"] = {**strategy, "class_path": path}
    return completed


# --------------------------------------------------------------------------- methods


def _with_method(
    command: Command, items: list[dict[str, Any]], key: str, text: str, added: bool
) -> list[dict[str, Any]]:
    """Return the methods after one option: ``--method``, ``--method+`` or ``--method.beta``."""
    option = f"--method{'+' if added else ''}{f'.{key}' if key else ''}"
    value = plain_yaml(text, option)
    if key:
        _set(items, key, value)
        return items
    # The methods that run are no longer those of the configs.
    command.names = [name for name in command.names if not name.startswith("method/")]
    return [*items, *_items(value)] if added else _items(value)


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


def _checked(item: dict[str, Any]) -> dict[str, Any]:
    """Return a method with its whole class path; refuse arguments that its class does not have."""
    cls = method_class(item)
    for name in item["init_args"]:
        if name not in parameters(cls):
            raise UserError(
                f"method.{name}: {cls.__name__} has no such argument."
                f"{suggest(name, parameters(cls))} "
                f"Accepted: {listed(parameters(cls)) or 'none'}."
            )
    return {**item, "class_path": f"{cls.__module__}.{cls.__qualname__}"}


def _set(items: list[dict[str, Any]], key: str, value: Any) -> None:
    """Set ``key``, such as beta, in the one method that has it.

    If several methods have it, it has to be given as ``Class.beta``.
    """
    keys = key.split(".")
    accepted: dict[str, str] = {}
    for item in items:
        accepted |= dict.fromkeys(parameters(method_class(item)), class_name(item))
    owners = [item for item in items if class_name(item) == keys[0]]
    if owners and len(keys) > 1:
        keys = keys[1:]
    else:
        owners = [item for item in items if keys[0] in parameters(method_class(item))]
    if not owners:
        methods = ", ".join(map(class_name, items)) or "no method is given"
        options = listed(f"--method.{option}" for option in accepted)
        raise UserError(
            f"--method.{key} {value}: no method of this run has the option {keys[0]!r} ({methods})."
            f"{suggest(keys[0], accepted)} "
            f"Accepted: {options or 'nothing; FedAvg has no settings'}."
        )
    if len(owners) > 1:
        names = list(map(class_name, owners))
        raise UserError(
            f"--method.{key} {value}: {' and '.join(names)} both have the option {keys[0]!r}. Name "
            f"the one that you mean: {', '.join(f'--method.{each}.{key}' for each in names)}."
        )
    arguments = owners[0]["init_args"]
    arguments.update(_put(arguments, keys, value))
