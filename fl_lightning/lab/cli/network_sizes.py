"""Set a network's classes, channels and image size from the data.

Null is filled in, and numbers that cannot fit are refused, before anything is built. So the run's
config.yaml has plain numbers, which ``load`` and a resumed run need no data to read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.errors import UserError
from fl_lightning.lab.cli.classes import class_of, named, parameters
from fl_lightning.lab.cli.compose import Command
from fl_lightning.models import MLP, ImageClassifier
from fl_lightning.models.text import TextLearner

_AT = "model.learner.network"
_UNITS = {"inputs": "inputs", "in_channels": "channels", "input_size": "pixels a side"}
# A packaged network is built for these samples if the data do not give theirs.
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
    """Complete ``model.learner`` in ``command.config``, if it is around a packaged network.

    Raises:
        UserError: in an ``ImageClassifier``, a given number, or the network itself, cannot work
            with the data. Other learners may change samples before the network gets them.
    """
    learner = _node(command.config["model"].get("learner"))
    facts = _facts(_node(command.config.get("data")))
    cls = class_of(learner)
    if isinstance(cls, type) and issubclass(cls, TextLearner) and facts.shape is not None:
        raise UserError(
            f"model.learner: {cls.__name__} takes texts, but a sample of {facts.name} "
            f"({facts.size}) is not a text. Use data of texts (-c data/text, -c data/multinli), or "
            "another learner."
        )
    takes = parameters(cls) if callable(cls) else []
    if "network" not in takes:
        return
    arguments = learner["init_args"]
    network = _node(arguments.get("network"))
    classes = _number(arguments.get("num_classes"))
    if getattr(class_of(network), "__module__", "").startswith("fl_lightning.models."):
        arguments["network"] = network
        classes, guessed = _complete(network, classes, facts, cls is ImageClassifier)
        # Of data that are not found the parser tells.
        if guessed and facts.name:
            command.notes.append(
                f"{_AT}: the network is built for {' and '.join(guessed)}. That is a guess, since "
                f"{facts.name} does not say what its samples are. If they are something else, set "
                "num_classes and the network's sizes there, or give the data's class the "
                "attributes num_classes and sample_shape"
            )
    classes = classes or facts.classes
    if "num_classes" in takes and classes is not None:
        arguments["num_classes"] = classes
    command.config["model"] = {**command.config["model"], "learner": learner}


def _node(given: Any) -> dict[str, Any]:
    """Return a node of the config with ``class_path`` and its own ``init_args``."""
    node = given if isinstance(given, dict) else {"class_path": given}
    arguments = node.get("init_args")
    return {**node, "init_args": dict(arguments) if isinstance(arguments, dict) else {}}


def _number(given: Any) -> Any:
    """Return the integer that an option's text holds; other values as they are."""
    if isinstance(given, str) and given.removeprefix("-").isdecimal():
        return int(given)
    return given


def _facts(data: dict[str, Any]) -> SampleFacts:
    cls = named(data, FederatedDataModule)
    if not (isinstance(cls, type) and issubclass(cls, FederatedDataModule)):
        return SampleFacts("")
    arguments = {name: _number(value) for name, value in data["init_args"].items()}
    shape = cls.shape_of_samples(**arguments)
    classes = cls.classes_of_samples(**arguments)
    # If the config names a table's classes, their number is known before the table is read.
    if isinstance(arguments.get("classes"), list):
        classes = len(arguments["classes"])
    return SampleFacts(cls.__name__, shape, classes, getattr(cls, "texts", False))


def _complete(
    network: dict[str, Any], classes: Any, facts: SampleFacts, checked: bool
) -> tuple[Any, list[str]]:
    """Fill in a network's sizes; return the number of classes, and what had to be guessed.

    Args:
        classes: the learner's own number, which precedes the network's, and this the data's.
        checked: whether numbers that are not the data's are refused.
    """
    cls = class_of(network)
    arguments = network["init_args"]
    if checked:
        _check_kind(cls, facts)
    sizes = arguments.get("sizes", [None, 200, 200, None]) if cls is MLP else None
    if isinstance(sizes, list) and len(sizes) > 1:
        numbers = {"inputs": sizes[0], "num_classes": sizes[-1]}
    else:
        names = [name for name in ("num_classes", *_UNITS) if name in parameters(cls)]
        numbers = {name: _number(arguments.get(name)) for name in names}
    if checked:
        _check_numbers(numbers, classes, facts, sizes)
    known = [each for each in (classes, numbers.get("num_classes"), facts.classes) if each]
    shape = facts.shape or ((28, 28) if cls is MLP else _PUBLISHED_SHAPE)
    of_data = {"num_classes": [*known, _PUBLISHED_CLASSES][0], **_of_shape(shape)}
    gaps = [name for name, number in numbers.items() if number is None]
    # A network that predicts tokens has as many outputs as tokens, unless classes are known.
    if not known and getattr(cls, "takes_tokens", False) and not checked:
        gaps = [name for name in gaps if name != "num_classes"]
    numbers |= {name: of_data[name] for name in gaps}
    if sizes is not None and "inputs" in numbers:
        arguments["sizes"] = [numbers["inputs"], *sizes[1:-1], numbers["num_classes"]]
    else:
        arguments.update(numbers)
    guessed = [] if known or "num_classes" not in gaps else [f"{_PUBLISHED_CLASSES} classes"]
    if facts.shape is None and set(gaps) - {"num_classes"}:
        guessed.append(f"samples of {'x'.join(map(str, shape))}")
    return of_data["num_classes"], guessed


def _of_shape(shape: tuple[int, ...]) -> dict[str, int]:
    return {"inputs": math.prod(shape), "in_channels": shape[0], "input_size": shape[-1]}


# --------------------------------------------------------------------------- refusing


def _check_numbers(
    numbers: dict[str, Any], classes: Any, facts: SampleFacts, sizes: list[Any] | None
) -> None:
    """Refuse numbers that are not the data's, and two numbers of classes that differ."""

    def option(name: str) -> str:
        return f"{_AT}.sizes {sizes}" if sizes is not None else f"{_AT}.{name}"

    outputs = numbers.get("num_classes")
    for where, count in (("model.learner.num_classes", classes), (option("num_classes"), outputs)):
        if isinstance(count, int) and count < (facts.classes or 0):
            raise UserError(
                f"{where}: {count} classes, but {facts.name} has {facts.classes} classes. Give at "
                f"least {facts.classes}, or null for the data's."
            )
    if type(outputs) is type(classes) is int and outputs != classes:
        raise UserError(
            f"model.learner.num_classes is {classes}, but {option('num_classes')} gives the "
            f"network {outputs} outputs: they have to be the same. Leave one of them out."
        )
    wanted = _of_shape(facts.shape) if facts.shape else {}
    for name, unit in _UNITS.items():
        if type(numbers.get(name)) is int and numbers[name] != wanted.get(name, numbers[name]):
            raise UserError(
                f"{option(name)}: {numbers[name]} {unit}, but a sample of {facts.name} "
                f"({facts.size}) has {wanted[name]}. Give {wanted[name]}, or null for the data's."
            )


def _check_kind(cls: Any, facts: SampleFacts) -> None:
    """Refuse samples of a kind or size that the network cannot take."""
    tokens = getattr(cls, "takes_tokens", False)
    if facts.texts and not tokens:
        raise UserError(
            f"{_AT}: {cls.__name__} takes numbers, but a sample of {facts.name} is "
            "a text. Use a learner of texts, CausalLanguageModel (-c model/tiny_opt) or "
            "TextClassifier, or a network of your own."
        )
    if facts.shape is None or cls is MLP or (tokens and len(facts.shape) == 1):
        return
    takes = ""
    side = facts.shape[-1]
    least = getattr(cls, "smallest_input", side)
    most = getattr(cls, "largest_input", side)
    if tokens:
        takes = "texts"
    elif len(facts.shape) != 3:
        takes = "images (channels, height, width)"
    elif not least <= side <= most:
        limit = f"at least {least}x{least}" if side < least else f"up to {most}x{most}"
        takes = f"images of {limit} pixels"
    if takes:
        raise UserError(
            f"{_AT}: {cls.__name__} takes {takes}, but a sample of {facts.name} has "
            f"{facts.size}. Use MLP (-c model/mlp), or another network."
        )
