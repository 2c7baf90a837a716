"""A learner's weights from a file: read, and compared with the learner's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.learner.layout import all_finite
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO
from fl_lightning.storage.schema import number_type


def check_weights(learner: Any, weights: Any, given: str = "ckpt_path") -> None:
    """Refuse weights of another model than the learner, and damaged ones.

    Raises:
        UserError: it names the first weight that is missing, unknown, of another shape or type, or
            not finite.
    """
    own = learner.state_dict()
    difference = _differs(own, weights, learner.strict_loading)
    if difference:
        raise UserError(
            f"{given}: the checkpoint is of another model than {type(learner).__name__}: "
            f"{difference}. Use the learner (class and sizes) that the run was started with; its "
            "config.yaml has it."
        )
    for name, _ in learner.named_parameters():
        if name in weights and all_finite(own[name]) and not all_finite(weights[name]):
            raise UserError(
                f"{given}: the checkpoint is damaged: the weights {name} hold values that are "
                "not finite, which no run saves. Take another checkpoint (such as "
                "checkpoints/best.ckpt of the same run), or start anew."
            )


def _differs(own: dict[str, Tensor], weights: Any, strict: bool) -> str:
    """Return the first difference of weights from the learner's own, in name, shape or type.

    The text is empty if nothing differs.
    """
    if not isinstance(weights, dict):
        return f"its state_dict is a {type(weights).__name__}"
    for name, tensor in weights.items():
        if name not in own:
            if strict:
                return f"it has {name}, which the learner has not"
        elif not isinstance(tensor, Tensor) or not isinstance(own[name], Tensor):
            if type(tensor) is not type(own[name]):
                there = type(tensor).__name__
                return f"{name} is a {there} there and a {type(own[name]).__name__} here"
        elif own[name].shape != tensor.shape:
            return f"{name} has shape {tuple(tensor.shape)} there and {tuple(own[name].shape)} here"
        elif number_type(own[name]) != number_type(tensor):
            return f"{name} holds {tensor.dtype} there and {own[name].dtype} here"
    missing = [name for name in own if name not in weights]
    return f"it lacks {missing[0]}" if strict and missing else ""


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the learner's weights by name from a checkpoint or an exported file.

    Raises:
        UserError: the file is missing, damaged, or has no weights.
    """
    if not isinstance(path, str | Path):
        raise UserError(
            f"init_from={path!r} is not accepted; give the path of a checkpoint or of an exported "
            "file."
        )
    if Path(path).is_dir():
        raise UserError(
            f"init_from={str(path)!r} is a folder; give a file, such as a run's "
            "checkpoints/best.ckpt."
        )
    try:
        loaded = AtomicCheckpointIO().load_checkpoint(path)
    except UserError as error:
        raise UserError(f"init_from={str(path)!r}: {error}") from error
    weights = loaded.get("state_dict", loaded)
    if not isinstance(weights, dict) or not all(isinstance(v, Tensor) for v in weights.values()):
        raise UserError(
            f"init_from={str(path)!r} holds no weights; accepted are a checkpoint or an exported "
            "file."
        )
    return weights
