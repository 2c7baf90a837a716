"""Set a network's classes, channels and image size from the data.

Null is filled in, and a network that cannot take the samples is refused, before anything is built.
So the run's config.yaml has plain numbers, which ``load`` and a resumed run need no data to read.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NoReturn

import torch

from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.errors import UserError
from fl_lightning.lab.cli.classes import class_of, named, parameters
from fl_lightning.lab.cli.compose import Command, as_node
from fl_lightning.models import MLP, Classifier
from fl_lightning.models.text import TextLearner

_SIZES = ("num_classes", "inputs", "in_channels", "input_size")


def fit_network_to_data(command: Command) -> None:
    """Complete ``model.learner`` in ``command.config``, if it is around a packaged network.

    Raises:
        UserError: in a ``Classifier``, the network cannot work with the data. Other learners
            may change samples before the network gets them.
    """
    learner = as_node(command.config["model"].get("learner"))
    data = as_node(command.config.get("data"))
    cls = class_of(learner)
    source = named(data, FederatedDataModule)
    shape: tuple[int, ...] | None = None
    classes = None if source else 10  # the parser then reports that no data are given
    if isinstance(source, type) and issubclass(source, FederatedDataModule):
        given = data["init_args"]
        shape = source.shape_of_samples(**given)
        # If the config names a table's classes, their number is known before the table is read.
        listed = given.get("classes")
        classes = len(listed) if isinstance(listed, list) else source.classes_of_samples(**given)
    if isinstance(cls, type) and issubclass(cls, TextLearner) and shape is not None:
        _refuse("", cls, source, "texts", f"has the shape {shape}")
    takes = parameters(cls) if callable(cls) else []
    arguments = learner["init_args"]
    if "network" not in takes:
        if "num_classes" in takes and issubclass(cls, TextLearner) and classes is not None:
            arguments.setdefault("num_classes", classes)
            command.config["model"] = {**command.config["model"], "learner": learner}
        return
    network = as_node(arguments.get("network"))
    made = class_of(network)
    if getattr(made, "__module__", "").startswith("fl_lightning.models."):
        arguments["network"] = network
        inner = network["init_args"]
        outputs = arguments.get("num_classes")
        tokens = getattr(made, "takes_tokens", False)
        if cls is Classifier and getattr(source, "texts", False) and not tokens:
            _refuse(".network", made, source, "numbers", "is a text")
        outputs = _complete(made, inner, shape, outputs, classes)
        if cls is Classifier and shape is not None:
            _try(made, inner, shape, source)
        classes = outputs or classes
    if "num_classes" in takes and classes is not None:
        arguments["num_classes"] = classes
    command.config["model"] = {**command.config["model"], "learner": learner}


def _refuse(place: str, cls: Any, source: Any, takes: str, has: str) -> NoReturn:
    raise UserError(
        f"model.learner{place}: {cls.__name__} takes {takes}, but a sample of "
        f"{source.__name__} {has}. Use other data, or another network: MLP (-c model/mlp) for any "
        "numbers, CausalLanguageModel (-c model/tiny_opt) for texts."
    )


def _complete(
    cls: Any, arguments: dict[str, Any], shape: tuple[int, ...] | None, outputs: Any, classes: Any
) -> Any:
    """Fill in a network's sizes, as far as they are known, and return the number of classes.

    Args:
        outputs: the learner's number of classes, which precedes the network's, and this the data's.
        classes: the data's.
    """
    known: dict[str, Any] = {}
    if shape is not None:
        known = {"inputs": math.prod(shape), "in_channels": shape[0], "input_size": shape[-1]}
    sizes = arguments.get("sizes", [None, 200, 200, None]) if cls is MLP else None
    if isinstance(sizes, list) and len(sizes) > 1:
        known["num_classes"] = outputs or sizes[-1] or classes
        first = known.get("inputs") if sizes[0] is None else sizes[0]
        last = known["num_classes"] if sizes[-1] is None else sizes[-1]
        arguments["sizes"] = [first, *sizes[1:-1], last]
        return known["num_classes"]
    known["num_classes"] = outputs or arguments.get("num_classes") or classes
    for name in set(_SIZES) & set(parameters(cls)):
        if arguments.get(name) is None and known.get(name) is not None:
            arguments[name] = known[name]
        elif arguments.get(name) is None:
            arguments.pop(name, None)
    return known["num_classes"]


def _try(cls: Any, arguments: dict[str, Any], shape: tuple[int, ...], source: Any) -> None:
    """Refuse a network that cannot compute the outputs of one sample; no memory is used."""
    # Shapes do not need the weights, which would be read from a file.
    given = {name: each for name, each in arguments.items() if name != "pretrained"}
    kind = torch.long if getattr(cls, "takes_tokens", False) else torch.float
    with torch.device("meta"), torch.no_grad(), suppress(TypeError):
        # A TypeError is about an argument, which the parser reports.
        try:
            cls(**given).eval()(torch.zeros(2, *shape, dtype=kind))
        except (RuntimeError, ValueError, IndexError) as error:
            reason = " ".join(str(error).split())[:150]
            raise UserError(
                f"model.learner.network: {cls.__name__} with these sizes cannot take a sample of "
                f"{source.__name__}, whose shape is {shape} ({reason}). Leave the sizes out, or "
                "give null for the data's; or use another network, such as MLP (-c model/mlp)."
            ) from None
