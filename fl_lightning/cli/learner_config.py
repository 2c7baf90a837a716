"""The learner's arguments on the command line, as a checkpoint tells ``load_from_checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_lightning.lightning import NAMESPACE
from fl_lightning.storage.apart import is_plain


def learner_config(written: Mapping[str, Any], parsed: Any, learner: type) -> dict[str, Any]:
    """The learner's arguments as its class takes them, where that can be.

    A class that takes objects needs Lightning's ``_instantiator``, which imports what the
    checkpoint names. Arguments that are plain data do not, nor does a class that builds them
    itself (``builds_arguments``, see ImageClassifier).

    Args:
        written: ``model.learner`` of config.yaml.
        parsed: the same with values in their types.
        learner: the class.
    """
    arguments = {**written.get("init_args", {}), **written.get("dict_kwargs", {})}
    values = {**dict(parsed.get("init_args") or {}), **dict(parsed.get("dict_kwargs") or {})}
    built_by_class = getattr(learner, "builds_arguments", ())

    def is_object(name: str) -> bool:
        value = values.get(name)
        return name not in built_by_class and not (is_plain(value) and value == arguments[name])

    if not any(map(is_object, arguments)):
        return arguments
    config = {"_instantiator": f"{NAMESPACE}.cli.instantiate_module"}
    # If arguments were given in dict_kwargs, the instantiator needs the class itself.
    if "dict_kwargs" in written:
        config["_class_path"] = written["class_path"]
    return {**config, **arguments}
