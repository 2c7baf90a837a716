"""The model that Lightning validates: the one that a method evaluates, or averages of
WeightAveraging.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fl_lightning.round.global_model import GlobalModel


def evaluated(model: GlobalModel, trainer: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the weights ``(D,)`` and buffers that Lightning validates, exports and saves in a
    checkpoint.

    Lightning's ``WeightAveraging`` keeps averages separately, and replaces the model by them for
    each validation. This function replaces the model by these averages in the same way, and then
    restores the model.

    Args:
        trainer: Trainer with the run's callbacks; None if there are no callbacks.
    """
    module = getattr(trainer, "lightning_module", None)
    callbacks = [] if module is None else list(filter(averages_weights, trainer.callbacks))
    for callback in callbacks:
        callback.on_validation_epoch_start(trainer, module)
    try:
        vector = model.evaluated.detach()
        return vector.clone() if callbacks else vector, model.buffers()
    finally:
        for callback in reversed(callbacks):
            callback.on_validation_epoch_end(trainer, module)


def averaging_notes(callbacks: Sequence[Any], again: bool) -> list[str]:
    """Return the notes about Lightning's callbacks that average weights.

    ``again``: this is another fit by the same Trainer, for which such a callback begins anew.
    """
    notes = []
    if any(has_base(callback, "StochasticWeightAveraging") for callback in callbacks):
        notes.append(
            "StochasticWeightAveraging puts its average in place after the last round. So what is "
            "validated and measured (val/…, clients/…, global/…, hessian/…) and the checkpoints of "
            "rounds, which test and export read, are of the server's model, and not of the "
            "average. Measure the average after the fit, with trainer.validate(module, data), and "
            "save it, with module.export(path). WeightAveraging's averages are validated and saved"
        )
    for callback in callbacks if again else ():
        if any(has_base(callback, f"{kind}WeightAveraging") for kind in ("", "Stochastic")):
            notes.append(
                f"{type(callback).__name__} begins its averages anew in another fit by the same "
                "Trainer. To go on with them, resume from a checkpoint with a new Trainer"
            )
    return notes


def averages_weights(callback: Any) -> bool:
    """Return whether a callback is a ``WeightAveraging``, of either Lightning package, with
    averages.
    """
    has_averages = getattr(callback, "_average_model", None) is not None
    return has_averages and has_base(callback, "WeightAveraging")


def has_base(callback: Any, name: str) -> bool:
    """Return whether a callback has a class of this name, of either Lightning package."""
    return any(kind.__name__ == name for kind in type(callback).__mro__)
