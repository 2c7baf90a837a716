"""Options over the configs: each is set in the config that the parser then reads."""

from __future__ import annotations

import types
import typing
from contextlib import suppress
from itertools import chain
from typing import Any, Union

from fl_lightning.errors import UserError, suggest
from fl_lightning.lab.cli.classes import (
    full_paths,
    hint_of,
    listed,
    method_class,
    named,
    parameters,
    whole_path,
)
from fl_lightning.lab.cli.compose import (
    OF_METHODS,
    Command,
    as_list,
    as_loggers,
    as_node,
    class_name,
    merge,
    plain_yaml,
    same_class,
)
from fl_lightning.lab.cli.run_folder import RunEvents
from fl_lightning.machine.lightning import pl
from fl_lightning.module import FederatedModule

_IN_A_NODE = ("class_path", "init_args", "dict_kwargs")
_IS_NODE = {"class_path", "init_args"}


def apply_options(command: Command) -> None:
    """Set each option of the command line in ``command.config``, and check the methods.

    Afterwards the classes of ours have their whole paths, and ``method`` is a list of
    ``{class_path, init_args}``.
    """
    config = dict(command.config)
    config["trainer"] = config.get("trainer") or {}
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
    trainer = config["trainer"]
    if isinstance(trainer, dict) and "logger" in trainer:
        events = f"{RunEvents.__module__}.{RunEvents.__qualname__}"
        config["trainer"] = {**trainer, "logger": as_loggers(trainer["logger"], events)}
    for item in methods:
        cls = method_class(item)
        item["class_path"] = f"{cls.__module__}.{cls.__qualname__}"
    config["method"] = methods
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
    return plain_yaml(text, f"--{option}")


def _typed(value: Any, hint: Any) -> Any:
    """Return a value with the numbers that its texts write, in arguments of classes whose type
    takes numbers. If it takes texts as well, jsonargparse would leave such a text as it is.
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
        several = typing.get_origin(hint) in (Union, types.UnionType)
        hints = typing.get_args(hint) if several else [hint]
        # Of Annotated[int, …], int.
        kinds = {getattr(each, "__origin__", each) for each in hints}
        with suppress(UserError):  # a number that YAML does not take is a text
            number = plain_yaml(value, "")
            if type(number) in (int, float) and kinds & {int, float}:
                return number
    return value


def _arguments(given: Any, made: Any) -> Any:
    if not isinstance(given, dict):
        return given
    return {name: _typed(value, hint_of(made, name)) for name, value in given.items()}


def _put(node: Any, keys: list[str], value: Any) -> Any:
    """Return a node of the config with ``value`` at ``keys``, which may leave out ``init_args``."""
    key, *rest = keys
    if isinstance(node, list):
        # As in --trainer.callbacks+=Timer --trainer.callbacks.duration 1: of the last one.
        return [*node[:-1], _put(node[-1] if node else None, keys, value)]
    if isinstance(node, str):
        node = {"class_path": whole_path(node)}
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
    path = whole_path(path)
    arguments = node.get("init_args") or {}
    if not same_class(path, node.get("class_path")):
        cls = named(path)
        accepted = parameters(cls) if isinstance(cls, type) else []
        arguments = {name: value for name, value in arguments.items() if name in accepted}
    return {"class_path": path, "init_args": arguments}


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
    command.names = [name for name in command.names if not name.startswith(OF_METHODS)]
    return [*items, *_items(value)] if added else _items(value)


def _items(value: Any) -> list[dict[str, Any]]:
    """Return the methods that a list names, or a single one, each with its ``init_args``."""
    return [as_node(item) for item in as_list(value or None)]


def _set(items: list[dict[str, Any]], key: str, value: Any) -> None:
    """Set ``key``, such as beta, in the one method that has it.

    If several methods have it, it has to be given as ``Class.beta``.
    """
    keys = key.split(".")
    accepted = {class_name(item): parameters(method_class(item)) for item in items}
    owners = [item for item in items if class_name(item) == keys[0]]
    if owners and len(keys) > 1:
        keys = keys[1:]
    else:
        owners = [item for item in items if keys[0] in accepted[class_name(item)]]
    if not owners:
        names = list(chain(*accepted.values()))
        options = listed(f"--method.{name}" for name in names)
        raise UserError(
            f"--method.{key} {value}: no method of this run has the option {keys[0]!r} "
            f"({', '.join(accepted) or 'no method is given'}).{suggest(keys[0], names)} "
            f"Accepted: {options or 'nothing; FedAvg has no settings'}."
        )
    if len(owners) > 1:
        names = [f"--method.{class_name(item)}.{key}" for item in owners]
        raise UserError(
            f"--method.{key} {value}: several methods have the option {keys[0]!r}. Name the one "
            f"that you mean: {' or '.join(names)}."
        )
    arguments = owners[0]["init_args"]
    arguments.update(_put(arguments, keys, value))
