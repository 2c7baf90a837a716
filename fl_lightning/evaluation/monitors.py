"""Callbacks of Lightning that monitor a measurement, which exists only in some rounds.

EarlyStopping and ModelCheckpoint look at a validation metric only after a validation. In the same
way they look at ``clients/acc`` or ``global/train_loss`` only in rounds that were measured.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fl_lightning.evaluation.measurement import Measurement
from fl_lightning.introspection.attribute_view import View

HOOKS = ("on_train_epoch_end", "on_train_end")
# Whether Lightning's callbacks look at the end of an epoch; if not, after a validation.
AT_THE_END = ("_check_on_train_epoch_end", "_save_on_train_epoch_end")


def follow(trainer: Any) -> None:
    """Let callbacks that monitor a measurement run after it, and only if it took place."""
    callbacks: list[Any] = vars(trainer)["callbacks"]
    measurements = [each for each in callbacks if isinstance(each, Measurement)]
    moved = []
    for callback in callbacks:
        measurement = _monitored(callback, measurements)
        if measurement is not None:
            _watch(callback, measurement)
            moved.append(callback)
    if moved:
        # Checkpoints stay last.
        others = [each for each in callbacks if each not in moved]
        saving = [each for each in others if _saves(each)]
        before = [each for each in others if each not in saving]
        moved.sort(key=_saves)
        callbacks[:] = [*before, *moved, *saving]


def put_back(trainer: Any) -> None:
    """Undo :func:`follow`, except for the order."""
    for callback in vars(trainer)["callbacks"]:
        for hook in HOOKS:
            if isinstance(vars(callback).get(hook), partial):
                del vars(callback)[hook]


def _saves(callback: Any) -> bool:
    return hasattr(callback, "best_model_path")


def _monitored(callback: Any, measurements: list[Measurement]) -> Measurement | None:
    """Return the measurement that logs the metric that a callback of Lightning monitors."""
    monitor = getattr(callback, "monitor", None)
    kinds = {kind.__name__ for kind in type(callback).__mro__}
    if not isinstance(monitor, str) or not kinds & {"EarlyStopping", "ModelCheckpoint"}:
        return None
    logging = [each for each in measurements if monitor.startswith(each.prefixes)]
    return logging[0] if logging else None


def _watch(callback: Any, measurement: Measurement) -> None:
    # A measurement follows the validation, so the callback looks at the end of the round.
    (option,) = [name for name in AT_THE_END if hasattr(callback, name)]
    setattr(callback, option, True)
    own = vars(callback)
    own[HOOKS[0]] = partial(_at_the_end, callback, option, measurement)
    own[HOOKS[1]] = partial(_after_the_last, callback, measurement)


def _at_the_end(
    callback: Any, option: str, measurement: Measurement, trainer: Any, pl_module: Any
) -> None:
    # A subclass's own hook is called in each round; Lightning's looks only if the option is set.
    setattr(callback, option, measurement.has_measured(trainer.current_epoch))
    try:
        type(callback).on_train_epoch_end(callback, trainer, pl_module)
    finally:
        setattr(callback, option, True)


def _after_the_last(callback: Any, measurement: Measurement, trainer: Any, pl_module: Any) -> None:
    # After an early stop the last round is measured only now, when Lightning counts one more.
    t = trainer.current_epoch - 1
    if measurement.measured_late and measurement.has_measured(t) and _saves(callback):
        in_round = View(trainer, current_epoch=lambda: t)
        type(callback).on_train_epoch_end(callback, in_round, pl_module)
    type(callback).on_train_end(callback, trainer, pl_module)
