"""What a checkpoint tells ``load_from_checkpoint`` of the arguments that the command line gave the learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_lightning.lightning import NAMESPACE
from fl_lightning.storage.apart import is_plain


def learner_config(written: Mapping[str, Any], parsed: Any, learner: type) -> dict[str, Any]:
    """The learner's arguments as its class takes them, where that can be.

    A class that takes objects needs Lightning's ``_instantiator``, which imports what the checkpoint names. Arguments
    that are plain data do not, nor does a class that builds them itself (``builds_arguments``, see ImageClassifier).

    Args:
        written: ``model.learner`` of config.yaml.
        parsed: the same with values in their types.
        learner: the class.
    """
    arguments = {**written.get("init_args", {}), **written.get("dict_kwargs", {})}
    values = {**dict(parsed.get("init_args") or {}), **dict(parsed.get("dict_kwargs") or {})}
    itself = getattr(learner, "builds_arguments", ())
    objects = [
        k
        for k, v in arguments.items()
        if k not in itself and not (is_plain(values.get(k)) and values[k] == v)
    ]
    if not objects:
        return arguments
    return {
        "_instantiator": f"{NAMESPACE}.cli.instantiate_module",
        **({"_class_path": written["class_path"]} if "dict_kwargs" in written else {}),
        **arguments,
    }
