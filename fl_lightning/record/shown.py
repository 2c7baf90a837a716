"""Which metrics a run is shown by, and which way each is better."""

from __future__ import annotations

from typing import Any

from fl_lightning.metrics import MODES, without_prefix


def shown_metrics(trainer: Any) -> list[str]:
    """The metrics by which a run is shown, the most important first.

    They are the accuracy, what callbacks monitor, and what the learner logs with
    ``prog_bar=True``. Where clients have parts or models of their own, and PerClientEvaluation
    measures these, its values stand in place of what is validated: w with the mean of personal
    parts serves nobody.
    """
    module = trainer.lightning_module
    callbacks = trainer.callbacks
    logged = getattr(module, "logged", None)
    names = ["val/acc", *_monitored(trainer)]
    names += [] if logged is None else logged.shown_of(trainer.callback_metrics)
    if any(hasattr(callback, "of_own_models") for callback in callbacks) and _personal(module):
        for j, name in enumerate(names):
            if without_prefix(name) != name:
                names[j] = f"clients/{without_prefix(name)}"
    return list(dict.fromkeys(names))


def metric_modes(trainer: Any) -> dict[str, str]:
    """``"max"`` or ``"min"``, whichever is better, by metric: as torchmetrics and callbacks say."""
    logged = getattr(trainer.lightning_module, "logged", None)
    modes: dict[str, str] = {}
    if logged is not None:
        modes.update(logged.modes_of(trainer.callback_metrics))
    # You gave a monitoring callback its mode, so that mode takes precedence.
    for name, mode in _monitored(trainer).items():
        if mode in MODES:
            modes[name] = mode
    return modes


def _monitored(trainer: Any) -> dict[str, Any]:
    """The metrics that callbacks monitor, each with its mode."""
    modes: dict[str, Any] = {}
    for callback in trainer.callbacks:
        metric = getattr(callback, "monitor", None)
        if isinstance(metric, str):
            modes[metric] = getattr(callback, "mode", None)
    return modes


def _personal(module: Any) -> bool:
    """Tell whether clients end with parts or models of their own."""
    run = getattr(module, "run", None)
    if run is None or run.loop is None:
        return False
    return run.methods.owner("personal") is not None or (
        run.loop.parts is not None and None in run.loop.parts.periods
    )
