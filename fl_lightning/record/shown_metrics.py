"""The metrics that a run shows, and the better direction of each."""

from __future__ import annotations

from typing import Any

from fl_lightning.metrics import MODES, without_prefix


def shown_metrics(trainer: Any) -> list[str]:
    """Return the metrics that a run shows, the most important first.

    These metrics are the accuracy, those that callbacks monitor, and those that the learner logs
    with ``prog_bar=True``. If clients have their own parts or models, and PerClientEvaluation has
    measured these, its values replace the validated ones, because no client uses w with the mean of
    personal parts.
    """
    module = trainer.lightning_module
    callbacks = trainer.callbacks
    logged = getattr(module, "logged", None)
    names = ["val/acc", *_monitored(trainer)]
    names += [] if logged is None else logged.shown_of(trainer.callback_metrics)
    if any(hasattr(callback, "of_own_models") for callback in callbacks) and _personal(module):
        for j, name in enumerate(names):
            own = f"clients/{without_prefix(name)}"
            if own != f"clients/{name}" and own in trainer.callback_metrics:
                names[j] = own
    return list(dict.fromkeys(names))


def compared_metrics(trainer: Any) -> list[str]:
    """Return the metrics by which runs are compared, known before the first round.

    These are accuracy, losses, the metrics that callbacks monitor, those that a packaged learner
    was given by name, and the clients' own ones if PerClientEvaluation measures them.
    """
    named = getattr(getattr(trainer.lightning_module, "learner", None), "val_metrics", ())
    of_learner = (f"val/{name}" for name in named)
    names = dict.fromkeys(["val/acc", *_monitored(trainer), *of_learner, "val/loss", "train/loss"])
    of_clients = []
    if any(hasattr(callback, "of_own_models") for callback in trainer.callbacks):
        for name in names:
            if (bare := without_prefix(name)) != name and not name.startswith("train"):
                of_clients += [f"clients/{bare}{of}" for of in ("", "_weighted", "_worst10")]
    return list(dict.fromkeys([*names, *of_clients]))


def metric_modes(trainer: Any) -> dict[str, str]:
    """``"max"`` or ``"min"``, the better direction, by metric, from torchmetrics and callbacks."""
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
    modes: dict[str, Any] = {}
    for callback in trainer.callbacks:
        metric = getattr(callback, "monitor", None)
        if isinstance(metric, str):
            modes[metric] = getattr(callback, "mode", None)
    return modes


def _personal(module: Any) -> bool:
    run = getattr(module, "run", None)
    if run is None or run.loop is None:
        return False
    return run.methods.owner("personal") is not None or (
        run.loop.parts is not None and None in run.loop.parts.periods
    )
