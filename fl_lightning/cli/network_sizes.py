"""A network's classes, channels and image size follow the data: gaps are filled in, and what cannot fit is refused.

This is done on the configuration, before anything is built, so that the run's config.yaml has plain numbers.
"""

from __future__ import annotations

import importlib
import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from fl_lightning.cli.compose import Command, merge, plain_yaml
from fl_lightning.cli.method_options import full_paths, names_of_ours
from fl_lightning.cli.parsing_errors import parameters
from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.errors import UserError
from fl_lightning.models import MLP, ImageClassifier
from fl_lightning.models.text import TextLearner

_AT = "model.learner.network"
_SIZES = ("num_classes", "in_channels", "input_size", "sizes")
_PUBLISHED = (3, 32, 32), 10  # what a packaged CNN is built for where the data do not tell


@dataclass(frozen=True)
class Facts:
    """What a data module's class says about its samples; None: nothing."""

    name: str
    shape: tuple[int, ...] | None = None
    classes: int | None = None
    texts: bool = False

    @property
    def size(self) -> str:
        """The shape as text, 1x28x28."""
        return "x".join(map(str, self.shape or ()))


def fit_network_to_data(command: Command) -> None:
    """Complete ``model.learner`` in ``command.config``, where it is an ``ImageClassifier`` around a packaged network.

    Raises:
        UserError: a given number, or the network itself, cannot work with the data.
    """
    model = command.config.get("model")
    chosen = full_paths(_with_options(command.config, command.options))
    if not isinstance(model, dict) or "learner" not in chosen["model"]:
        return
    facts, guessed = _facts(chosen.get("data")), list[str]()
    _check_texts(chosen["model"]["learner"], facts)
    target = _complete(chosen["model"]["learner"], facts, guessed)
    # options may name another class; the config has to parse, too
    learner = _complete(model.get("learner"), facts, [])
    if _class(target) is ImageClassifier:
        network = _arguments(target).get("network")
        if _is_ours(network):
            _check(target, facts, "num_classes" in _arguments(chosen["model"]["learner"]))
        if guessed:
            command.notes.append(
                f"{_AT}: {facts.name} does not say what its samples are, so it is built for {' and '.join(guessed)}; "
                "give its numbers, or num_classes and sample_shape as attributes of the data's class"
            )
        learner = merge(learner, {"class_path": target["class_path"]})
        _copy_sizes(target, learner)
        if isinstance(network, dict):
            inner = _arguments(learner)
            inner["network"] = merge(inner.get("network"), {"class_path": network["class_path"]})
            _copy_sizes(network, inner["network"])
    command.config["model"] = {**model, "learner": learner}


def _copy_sizes(source: dict[str, Any], target: dict[str, Any]) -> None:
    _arguments(target).update(
        {key: value for key, value in _arguments(source).items() if key in _SIZES}
    )


# --------------------------------------------------------------------------- what will be built


def _with_options(config: dict[str, Any], options: list[str]) -> dict[str, Any]:
    """The configuration with the options for data and learner in it, as far as they matter here."""
    tree = deepcopy({"model": config.get("model") or {}, "data": config.get("data")})
    for position, option in enumerate(options):
        flag, equals, text = option.partition("=")
        path = flag.removeprefix("--").split(".")
        if not flag.startswith("--") or not (path[0] == "data" or path[:2] == ["model", "learner"]):
            continue
        if not equals:
            text = options[position + 1] if position + 1 < len(options) else ""
        try:
            value = plain_yaml(text, option)
        except UserError:  # the parser will say what is wrong
            value = text
        tree = _put(tree, path, value)
    return tree


def _put(node: Any, path: list[str], value: Any) -> Any:
    """``node`` with ``value`` at ``path``, which may leave out ``init_args``."""
    if not path:
        names_a_class = isinstance(value, str) and (
            isinstance(node, dict) or value in names_of_ours()
        )
        return merge(node, {"class_path": value} if names_a_class else value)
    node = (
        {"class_path": node}
        if isinstance(node, str)
        else dict(node)
        if isinstance(node, dict)
        else {}
    )
    key, rest = path[0], path[1:]
    if key == "class_path":
        return merge(node, {key: value})
    if {"class_path", "init_args"} & set(node) and key not in ("init_args", "dict_kwargs"):
        return {**node, "init_args": _put(node.get("init_args") or {}, path, value)}
    return {**node, key: _put(node.get(key), rest, value)}


def _class(node: Any) -> Any:
    """The class that a node of the configuration names; None where it names none (the parser will say so)."""
    path = node.get("class_path") if isinstance(node, dict) else node
    module, _, name = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:  # the user's own module may raise anything
        return None


def _arguments(node: Any) -> dict[str, Any]:
    """A node's ``init_args``, added where it has none."""
    if not isinstance(node.get("init_args"), dict):
        node["init_args"] = {}
    found: dict[str, Any] = node["init_args"]
    return found


def _is_ours(network: Any) -> bool:
    return isinstance(network, dict) and getattr(_class(network), "__module__", "").startswith(
        "fl_lightning.models."
    )


def _facts(data: Any) -> Facts:
    cls = _class(data)
    if not (isinstance(cls, type) and issubclass(cls, FederatedDataModule)):
        return Facts("data")
    arguments = data.get("init_args") if isinstance(data, dict) else None
    classes = cls.num_classes
    shape = cls.shape_of_samples(**(arguments if isinstance(arguments, dict) else {}))
    return Facts(
        cls.__name__,
        shape,
        classes if isinstance(classes, int) else None,
        getattr(cls, "texts", False),
    )


# --------------------------------------------------------------------------- filling in


def _complete(learner: Any, facts: Facts, guessed: list[str]) -> Any:
    """The learner with its classes, channels and sizes filled in, if it is one of ours; adds guesses to ``guessed``."""
    if _class(learner) is not ImageClassifier:
        return learner
    learner = {"class_path": learner} if isinstance(learner, str) else deepcopy(learner)
    given = _arguments(learner)
    if isinstance(given.get("network"), str):
        given["network"] = {"class_path": given["network"]}
    classes = given.get("num_classes")
    if _is_ours(network := given.get("network")):
        inner, cls = _arguments(network), _class(network)
        sizes = inner.setdefault("sizes", [None, 200, 200, None]) if cls is MLP else None
        ends = sizes if isinstance(sizes, list) and len(sizes) > 1 else [0, 0]
        outputs = ends[-1] if cls is MLP else inner.get("num_classes")
        classes = next((c for c in (classes, outputs, facts.classes) if c is not None), None)
        if classes is None:
            classes = _PUBLISHED[1]
            guessed.append(f"{classes} classes")
        shape = facts.shape or ((28, 28) if cls is MLP else _PUBLISHED[0])
        wanted = {"in_channels": shape[0], "input_size": shape[-1], "num_classes": classes}
        missing = [name for name in wanted if name in parameters(cls) and inner.get(name) is None]
        inner.update({name: wanted[name] for name in missing})
        if facts.shape is None and (ends[0] is None or set(missing) - {"num_classes"}):
            guessed.append(f"samples of {'x'.join(map(str, shape))}")
        if ends is sizes:
            inner["sizes"] = [
                math.prod(shape) if ends[0] is None else ends[0],
                *ends[1:-1],
                ends[-1] or classes,
            ]
    if given.get("num_classes") is None and (classes := classes or facts.classes) is not None:
        given["num_classes"] = classes
    return learner


# --------------------------------------------------------------------------- refusing


def _check_texts(learner: Any, facts: Facts) -> None:
    """Refuse our networks for images on texts, and our learners of texts on what is none."""
    cls = _class(learner)
    if cls is ImageClassifier and facts.texts:
        network = _arguments(learner).get("network") if isinstance(learner, dict) else None
        node = {"class_path": network} if isinstance(network, str) else network
        if _is_ours(node):
            raise UserError(
                f"{_AT}: {_class(node).__name__} takes numbers, but a sample of {facts.name} is a text. Use a learner "
                "of texts, CausalLanguageModel (-c model/tiny_opt) or TextClassifier, or a network of your own."
            )
    if isinstance(cls, type) and issubclass(cls, TextLearner) and facts.shape is not None:
        raise UserError(
            f"model.learner: {cls.__name__} takes texts, but a sample of {facts.name} ({facts.size}) is none. Use data "
            "of texts (-c data/text, -c data/multinli), or another learner."
        )


def _check(learner: dict[str, Any], facts: Facts, learners: bool) -> None:
    """Refuse what cannot work; ``learners``: whether the number of classes was given to the learner."""
    given, node = _arguments(learner), _arguments(learner)["network"]
    network, cls = _arguments(node), _class(node)
    sizes = network.get("sizes")
    ends = sizes if cls is MLP and isinstance(sizes, list) and len(sizes) > 1 else None
    option, outputs = (
        (f"{_AT}.sizes", ends[-1]) if ends else (f"{_AT}.num_classes", network.get("num_classes"))
    )
    counts = [(option, outputs), ("model.learner.num_classes", given.get("num_classes"))]
    for where, count in reversed(counts) if learners else counts:
        if isinstance(count, int) and count < (facts.classes or 0):
            what = (
                f"{sizes} ends in {count} outputs" if ends and where == option else f"it is {count}"
            )
            raise UserError(
                f"{where}: {what}, but {facts.name} has {facts.classes} classes. Give at least {facts.classes}, or "
                f"{'null for what the data have' if ends else 'leave it out'}."
            )
    if _whole(outputs) and _whole(given.get("num_classes")) and outputs != given["num_classes"]:
        raise UserError(
            f"model.learner.num_classes is {given['num_classes']}, but {option} gives the network {outputs} outputs: "
            "they have to be the same. Leave one of them out."
        )
    if facts.shape is None:
        return
    if ends:
        if _whole(ends[0]) and ends[0] != math.prod(facts.shape):
            raise UserError(
                f"{_AT}.sizes: {sizes} takes {ends[0]} inputs, but a sample of {facts.name} ({facts.size}) has "
                f"{math.prod(facts.shape)} numbers. Begin with {math.prod(facts.shape)}, or with null for the data's."
            )
        return
    if len(facts.shape) != 3:
        raise UserError(
            f"{_AT}: {cls.__name__} takes images (channels, height, width), but a sample of {facts.name} has shape "
            f"{facts.size}. Use MLP (-c model/mlp), or a network of your own."
        )
    channels, side = facts.shape[0], facts.shape[-1]
    least, most = getattr(cls, "smallest_input", side), getattr(cls, "largest_input", side)
    if not least <= side <= most:
        limit = f"at least {least}x{least}" if side < least else f"up to {most}x{most}"
        raise UserError(
            f"{_AT}: {cls.__name__} takes images of {limit} pixels, but those of {facts.name} have {facts.size}. Use "
            "MLP (-c model/mlp), or another network."
        )
    for name, value, has in (
        ("in_channels", channels, "channels"),
        ("input_size", side, "pixels a side"),
    ):
        if _whole(network.get(name)) and network[name] != value:
            raise UserError(
                f"{_AT}.{name} is {network[name]}, but a sample of {facts.name} ({facts.size}) has {value} {has}. "
                f"Give {value}, or leave it out."
            )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
