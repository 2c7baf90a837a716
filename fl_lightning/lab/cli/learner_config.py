"""The learner's arguments on the command line, in the form that ``load_from_checkpoint`` reads
from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_lightning.machine.lightning import NAMESPACE
from fl_lightning.storage.pickled_objects import is_plain


def learner_config(written: Mapping[str, Any], parsed: Any, learner: type) -> dict[str, Any]:
    """Return the learner's arguments in the form that its class takes, if possible.

    A class that takes objects needs Lightning's ``_instantiator``, which imports the classes that
    the checkpoint names. If the arguments are plain data, or the class builds the
    objects itself (``builds_arguments``, see ImageClassifier), no ``_instantiator`` is needed.

    Args:
        written: ``model.learner`` of config.yaml.
        parsed: the same, with typed values.
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
