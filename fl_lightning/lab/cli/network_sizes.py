"""Set a network's classes, channels and image size from the data.

Gaps are filled in, and values that cannot fit are refused. The sizes are filled in before anything
is built, so the run's config.yaml has plain numbers.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.errors import UserError
from fl_lightning.lab.cli.compose import Command, class_of, merge, plain_yaml
from fl_lightning.lab.cli.method_options import full_paths, names_of_ours
from fl_lightning.lab.cli.parsing_errors import parameters
from fl_lightning.models import MLP, ImageClassifier
from fl_lightning.models.text import TextLearner

_AT = "model.learner.network"
_SIZES = ("num_classes", "in_channels", "input_size", "sizes")
# A packaged CNN is built for these sizes if the data do not give theirs.
_PUBLISHED_SHAPE = (3, 32, 32)
_PUBLISHED_CLASSES = 10


@dataclass(frozen=True)
class SampleFacts:
    """Facts about the samples that the class of a data module gives; None: unknown."""

    name: str
    shape: tuple[int, ...] | None = None
    classes: int | None = None
    texts: bool = False

    @property
    def size(self) -> str:
        """Return the shape as text, 1x28x28."""
        return "x".join(map(str, self.shape or ()))


def fit_network_to_data(command: Command) -> None:
    """Complete ``model.learner`` in ``command.config``.

    Only an ``ImageClassifier`` around a packaged network is completed.

    Raises:
        UserError: a given number, or the network itself, cannot work with the data.
    """
    model = command.config.get("model")
    chosen = full_paths(_with_options(command.config, command.options))
    if not isinstance(model, dict) or "learner" not in chosen["model"]:
        return
    facts = _facts(chosen.get("data"))
    learner = chosen["model"]["learner"]
    _check_texts(learner, facts)
    # An option may name another class, but the config has to parse as well.
    built = class_of(learner) is ImageClassifier
    if not built:
        learner = model.get("learner")
    if class_of(learner) is not ImageClassifier:
        return
    learner = {"class_path": learner} if isinstance(learner, str) else deepcopy(learner)
    arguments = _arguments(learner)
    learners = "num_classes" in arguments
    guessed: list[str] = []
    if isinstance(arguments.get("network"), str):
        arguments["network"] = {"class_path": arguments["network"]}
    classes = arguments.get("num_classes")
    if _is_ours(arguments.get("network")):
        classes = _complete(arguments["network"], classes, facts, guessed)
    classes = classes or facts.classes
    if arguments.get("num_classes") is None and classes is not None:
        arguments["num_classes"] = classes
    if built and _is_ours(arguments.get("network")):
        _check(learner, facts, learners)
    if built and guessed:
        command.notes.append(
            f"{_AT}: the network is built for {' and '.join(guessed)}. That is a guess, since "
            f"{facts.name} does not say what its samples are. If they are something else, set "
            "num_classes and the network's sizes there, or give the data's class the attributes "
            "num_classes and sample_shape"
        )
    command.config["model"] = {**model, "learner": merge(model.get("learner"), _sizes(learner))}
    if built:
        command.options = _without_gaps(command.options)


def _sizes(node: dict[str, Any]) -> dict[str, Any]:
    """Return only the classes and the sizes of a learner, or of its network."""
    arguments = _arguments(node)
    sizes = {key: arguments[key] for key in _SIZES if key in arguments}
    if isinstance(arguments.get("network"), dict):
        sizes["network"] = _sizes(arguments["network"])
    return {"class_path": node["class_path"], "init_args": sizes}


# --------------------------------------------------------------------------- what will be built


def _with_options(config: dict[str, Any], options: list[str]) -> dict[str, Any]:
    """Return the configuration merged with the options for data and learner that decide sizes."""
    tree = deepcopy({"model": config.get("model") or {}, "data": config.get("data")})
    for option, following in pairwise([*options, ""]):
        path, value = _read(option, following)
        if path[0] == "data" or path[:2] == ["model", "learner"]:
            tree = _put(tree, path, value)
    return tree


def _read(option: str, following: str) -> tuple[list[str], Any]:
    """Return the path and the value of ``option``; the value may be the argument ``following``
    it.
    """
    flag, equals, text = option.partition("=")
    if not flag.startswith("--"):
        return [""], None
    path = flag.removeprefix("--").split(".")
    try:
        return path, plain_yaml(text if equals else following, option)
    except UserError:
        # The parser will report the error.
        return path, text if equals else following


def _without_gaps(options: list[str]) -> list[str]:
    """Return the options without the learner's null sizes, which the config has filled in."""
    kept: list[str] = []
    skipped = False
    for option, following in pairwise([*options, ""]):
        path, value = _read(option, following)
        size = path[:2] == ["model", "learner"] and path[-1] in _SIZES
        gap = None in value if isinstance(value, list) else value is None
        if skipped:
            skipped = False
        elif size and gap and (option.partition("=")[2] or following):
            skipped = "=" not in option
        else:
            kept.append(option)
    return kept


def _put(node: Any, path: list[str], value: Any) -> Any:
    """Return ``node`` with ``value`` at ``path``, which may leave out ``init_args``."""
    if not path:
        names_a_class = False
        if isinstance(value, str):
            names_a_class = isinstance(node, dict) or value in names_of_ours()
        return merge(node, {"class_path": value} if names_a_class else value)
    if isinstance(node, str):
        node = {"class_path": node}
    elif not isinstance(node, dict):
        node = {}
    key, *rest = path
    if key == "class_path":
        return merge(node, {key: value})
    # You may give a class's argument without writing its init_args.
    if {"class_path", "init_args"} & set(node) and key not in ("init_args", "dict_kwargs"):
        return {**node, "init_args": _put(node.get("init_args") or {}, path, value)}
    return {**node, key: _put(node.get(key), rest, value)}


def _arguments(node: Any) -> dict[str, Any]:
    """Return a node's ``init_args``, which are added if it has none."""
    if not isinstance(node.get("init_args"), dict):
        node["init_args"] = {}
    arguments: dict[str, Any] = node["init_args"]
    return arguments


def _is_ours(network: Any) -> bool:
    if not isinstance(network, dict):
        return False
    return getattr(class_of(network), "__module__", "").startswith("fl_lightning.models.")


def _facts(data: Any) -> SampleFacts:
    cls = class_of(data)
    if not (isinstance(cls, type) and issubclass(cls, FederatedDataModule)):
        return SampleFacts("data")
    arguments = _arguments(deepcopy(data)) if isinstance(data, dict) else {}
    shape = cls.shape_of_samples(**arguments)
    classes = cls.classes_of_samples(**arguments)
    # If the config names a table's classes, their number is known before the table is read.
    if isinstance(arguments.get("classes"), list):
        classes = len(arguments["classes"])
    return SampleFacts(cls.__name__, shape, classes, getattr(cls, "texts", False))


def _complete(node: Any, classes: Any, facts: SampleFacts, guessed: list[str]) -> Any:
    """Fill in a network's sizes, and return the number of classes; ``classes`` is the learner's.

    Sizes that were guessed are added to ``guessed``.
    """
    cls = class_of(node)
    arguments = _arguments(node)
    outputs = arguments.get("num_classes")
    ends = None
    if cls is MLP:
        ends = _ends(cls, arguments.setdefault("sizes", [None, 200, 200, None]))
        outputs = ends[-1] if ends else 0
    # The learner's number takes precedence, then the network's, and then the data's.
    known = [number for number in (classes, outputs, facts.classes) if number is not None]
    if not known:
        guessed.append(f"{_PUBLISHED_CLASSES} classes")
    classes = [*known, _PUBLISHED_CLASSES][0]
    shape = facts.shape or ((28, 28) if cls is MLP else _PUBLISHED_SHAPE)
    wanted = {"in_channels": shape[0], "input_size": shape[-1], "num_classes": classes}
    missing = [name for name in wanted if name in parameters(cls) and arguments.get(name) is None]
    arguments.update({name: wanted[name] for name in missing})
    open_input = ends is not None and ends[0] is None
    if facts.shape is None and (open_input or set(missing) - {"num_classes"}):
        guessed.append(f"samples of {'x'.join(map(str, shape))}")
    if ends is not None:
        first = math.prod(shape) if open_input else ends[0]
        arguments["sizes"] = [first, *ends[1:-1], ends[-1] or classes]
    return classes


def _ends(cls: Any, sizes: Any) -> list[Any] | None:
    """Return the sizes of an MLP, if they are a list with a first and a last one."""
    return sizes if cls is MLP and isinstance(sizes, list) and len(sizes) > 1 else None


# --------------------------------------------------------------------------- refusing


def _check_texts(learner: Any, facts: SampleFacts) -> None:
    """Refuse our networks for images if samples are texts, and our learners of texts for other
    data.
    """
    cls = class_of(learner)
    if cls is ImageClassifier and facts.texts:
        network = _arguments(learner).get("network") if isinstance(learner, dict) else None
        node = {"class_path": network} if isinstance(network, str) else network
        if _is_ours(node) and not getattr(class_of(node), "takes_tokens", False):
            raise UserError(
                f"{_AT}: {class_of(node).__name__} takes numbers, but a sample of {facts.name} is "
                "a text. Use a learner of texts, CausalLanguageModel (-c model/tiny_opt) or "
                "TextClassifier, or a network of your own."
            )
    if isinstance(cls, type) and issubclass(cls, TextLearner) and facts.shape is not None:
        raise UserError(
            f"model.learner: {cls.__name__} takes texts, but a sample of {facts.name} "
            f"({facts.size}) is not a text. Use data of texts (-c data/text, -c data/multinli), or "
            "another learner."
        )


def _check(learner: dict[str, Any], facts: SampleFacts, learners: bool) -> None:
    """Refuse values that cannot work.

    ``learners``: whether the user gave ``num_classes`` to the learner; else it was filled in.
    """
    arguments = _arguments(learner)
    cls = class_of(arguments["network"])
    network = _arguments(arguments["network"])
    ends = _ends(cls, network.get("sizes"))
    _check_classes(arguments.get("num_classes"), network, ends, facts, learners)
    if facts.shape is None:
        return
    if not ends:
        _check_images(cls, network, facts)
    elif type(ends[0]) is int and ends[0] != math.prod(facts.shape):
        inputs = math.prod(facts.shape)
        raise UserError(
            f"{_AT}.sizes: {ends} takes {ends[0]} inputs, but a sample of {facts.name} "
            f"({facts.size}) has {inputs} numbers. Begin with {inputs}, or with null for the "
            "data's."
        )


def _check_classes(
    classes: Any,
    network: dict[str, Any],
    ends: list[Any] | None,
    facts: SampleFacts,
    learners: bool,
) -> None:
    """Refuse fewer outputs than the data have classes, and two numbers that differ."""
    option = f"{_AT}.num_classes"
    outputs = network.get("num_classes")
    way_out = "leave it out"
    if ends:
        option = f"{_AT}.sizes"
        outputs = ends[-1]
        way_out = "null for what the data have"
    counts = [(option, outputs), ("model.learner.num_classes", classes)]
    # The error names the option that you gave first, and not a value that was filled in.
    for where, count in reversed(counts) if learners else counts:
        if isinstance(count, int) and count < (facts.classes or 0):
            problem = f"it is {count}"
            if ends and where == option:
                problem = f"{ends} ends in {count} outputs"
            raise UserError(
                f"{where}: {problem}, but {facts.name} has {facts.classes} classes. Give at least "
                f"{facts.classes}, or {way_out}."
            )
    if type(outputs) is type(classes) is int and outputs != classes:
        raise UserError(
            f"model.learner.num_classes is {classes}, but {option} gives the network {outputs} "
            "outputs: they have to be the same. Leave one of them out."
        )


def _check_images(cls: Any, network: dict[str, Any], facts: SampleFacts) -> None:
    """Refuse samples that are not images, or images that the network cannot take."""
    assert facts.shape is not None
    if getattr(cls, "takes_tokens", False):
        if len(facts.shape) != 1:
            raise UserError(
                f"{_AT}: {cls.__name__} takes texts, but a sample of {facts.name} ({facts.size}) "
                "is not a text. Use MLP (-c model/mlp), or another network."
            )
        return
    if len(facts.shape) != 3:
        raise UserError(
            f"{_AT}: {cls.__name__} takes images (channels, height, width), but a sample of "
            f"{facts.name} has shape {facts.size}. Use MLP (-c model/mlp), or a network of your "
            "own."
        )
    channels, _, side = facts.shape
    least = getattr(cls, "smallest_input", side)
    most = getattr(cls, "largest_input", side)
    if not least <= side <= most:
        limit = f"at least {least}x{least}" if side < least else f"up to {most}x{most}"
        raise UserError(
            f"{_AT}: {cls.__name__} takes images of {limit} pixels, but those of {facts.name} have "
            f"{facts.size}. Use MLP (-c model/mlp), or another network."
        )
    sizes = (("in_channels", channels, "channels"), ("input_size", side, "pixels a side"))
    for name, value, unit in sizes:
        if type(network.get(name)) is int and network[name] != value:
            raise UserError(
                f"{_AT}.{name} is {network[name]}, but a sample of {facts.name} ({facts.size}) has "
                f"{value} {unit}. Give {value}, or leave it out."
            )
