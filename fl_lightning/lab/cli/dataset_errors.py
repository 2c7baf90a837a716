"""Errors in data sets that a config names by class: which data set, and why."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset

from fl_lightning.errors import suggest
from fl_lightning.lab.cli.compose import class_of

# Arguments of FromDatasets.
OPTIONS = ("train", "val", "test", "clients", "test_clients")


def fault_of_datasets(option: str, config: Mapping[str, Any]) -> str:
    """Return an error about the first value at ``option`` that is not a data set; empty if there is
    none.

    Args:
        option: such as ``data.clients``.
        config: the merged config.
    """
    group, _, name = option.partition(".")
    arguments = (config.get(group) or {}) if group == "data" else {}
    node = arguments.get("init_args", {}).get(name) if isinstance(arguments, Mapping) else None
    if name not in OPTIONS:
        return ""
    for place, one in _each(option, node):
        path = one if isinstance(one, str) else one["class_path"]
        made = class_of(one)
        if made is None:
            continue
        if not _gives_a_dataset(made):
            return f"{place}: {_what(made, path)}"
        given = {} if isinstance(one, str) else one.get("init_args") or {}
        if unknown := _unknown(made, given):
            accepted = list(inspect.signature(made).parameters)
            return (
                f"{place}.{unknown}: {path} has no such argument.{suggest(unknown, accepted)} "
                f"Accepted: {', '.join(accepted) or 'none'}."
            )
    return ""


def _each(option: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield each data set of an argument, with its place."""
    if isinstance(node, list):
        yield from ((f"{option}[{i}]", one) for i, one in enumerate(node) if _names(one))
    elif isinstance(node, Mapping) and "class_path" not in node:
        yield from ((f"{option}.{name}", one) for name, one in node.items() if _names(one))
    elif _names(node) and not option.endswith("clients"):
        yield option, node


def _names(one: Any) -> bool:
    return isinstance(one, str) or (isinstance(one, Mapping) and "class_path" in one)


def _gives_a_dataset(made: Any) -> bool:
    if inspect.isclass(made):
        return issubclass(made, Dataset)
    try:
        said = typing.get_type_hints(made).get("return")
    except Exception:  # annotations may name a class that does not exist
        return True
    said = typing.get_origin(said) or said
    return inspect.isclass(said) and issubclass(said, Dataset)


def _what(made: Any, path: str) -> str:
    if inspect.isclass(made):
        return (
            f"{path} is not a subclass of torch.utils.data.Dataset. Derive it from Dataset, or "
            "give a function that returns one: def make(…) -> Dataset."
        )
    name = path.rpartition(".")[2]
    return (
        f"{path} does not say that it returns a Dataset. Write def {name}(…) -> Dataset, with "
        "Dataset of torch.utils.data."
    )


def _unknown(made: Any, given: Any) -> str:
    """Return the first argument that a class or function does not take."""
    try:
        parameters = inspect.signature(made).parameters
    except (TypeError, ValueError):
        return ""
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return ""
    return next((name for name in given if name not in parameters), "")
