"""What a run is, as one flat dict of numbers and text: for loggers, and for the card."""

from __future__ import annotations

import inspect
import platform
import posixpath
import re
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fl_lightning.errors import UserError
from fl_lightning.lightning import rank_zero_only, rank_zero_warn
from fl_lightning.metrics import MODES, without_prefix
from fl_lightning.schedules import Schedule, decay_text
from fl_lightning.storage.apart import is_plain

Facts = dict[str, str | int | float | bool]
_PACKAGES = ("fl-lightning", "torch", "pytorch-lightning")


def versions() -> dict[str, str]:
    """Of what a result may depend on."""
    return {
        **{package: _version(package) for package in _PACKAGES},
        "python": platform.python_version(),
    }


def of_learner(learner: Any) -> Facts:
    """Class, hyper-parameters that are plain, and how many parameters are trained."""
    hparams = {f"learner/{k}": _value(v) for k, v in dict(learner.hparams).items() if is_plain(v)}
    trained = sum(p.numel() for p in learner.parameters() if p.requires_grad)
    network = getattr(learner, "network", None)
    named = {} if network is None else {"learner/network": type(network).__name__}
    return {"learner": type(learner).__name__, **named, **hparams, "learner/parameters": trained}


def of_run(run: Any, trainer: Any) -> Facts:
    """Learner, method, data, partition, seed, engine and versions of a run that is about to begin
    its rounds.
    """
    data = trainer.datamodule
    facts: Facts = {**of_learner(run.model.learner), "method": run.methods.title()}
    for callback in run.methods.callbacks:
        own = {k: v for k, v in vars(callback).items() if k in _parameters(callback)}
        kept = {k: v for k, v in own.items() if is_plain(v) or isinstance(v, Schedule)}
        facts.update({f"method/{type(callback).__name__}/{k}": _value(v) for k, v in kept.items()})
    facts["data"] = type(data).__name__
    facts.update({f"data/{k.replace(' ', '_')}": v for k, v in _card(data).items() if k != "data"})
    for name in ("num_clients", "batch_size"):
        facts[f"data/{name}"] = _value(getattr(data, name, None))
    facts["seed"] = run.seed(trainer)
    facts["rounds"] = _value(trainer.max_epochs)
    for name, value in vars(run.settings).items():
        if (
            name not in ("client_optimizer", "server_optimizer", "seed", "strict_resume")
            and value is not None
        ):
            facts[name] = _value(value)
    for name, optimizer in (("client", run.clients), ("server", run.server)):
        facts[f"{name}_optimizer"] = type(optimizer).__name__
        for key, value in optimizer.param_groups[0].items():
            if key not in ("params", "initial_lr") and is_plain(value) and value is not None:
                facts[f"{name}_optimizer/{key}"] = _value(value)
    facts.update(
        {f"machine/{name.replace(' ', '_')}": _value(v) for name, v in run.plan.facts().items()}
    )
    facts["machine/processes"] = trainer.world_size
    return {**facts, **{f"versions/{package}": number for package, number in versions().items()}}


def in_one_line(run: Any) -> str:
    """What a run does: methods, cohort, optimizers, engine.

    Raises:
        UserError: it has not begun.
    """
    if run.loop is None:
        raise UserError(
            "describe(): what runs is known once a run has begun: after trainer.fit, or in its "
            "callbacks."
        )
    rate = f"{run.clients.param_groups[0]['lr']:g}{decay_text(run.settings.lr_decay)}"
    if run.schedule is None:
        scheduled = ""
    else:
        scheduled = f", {run.schedule.name} by {run.schedule.unit.replace('_', ' ')}"
    clients = f"{type(run.clients).__name__} {rate}{scheduled}"
    server = f"server {type(run.server).__name__} {run.server_rates[0]:g}"
    return " · ".join(
        filter(
            None,
            [run.methods.title(), run.loop.cohort.describe(), clients, server, str(run.plan or "")],
        )
    )


def shown(trainer: Any) -> list[str]:
    """The metrics by which a run is shown, the first first: accuracy, what is monitored, what the
    learner shows.

    That is what it logs with ``prog_bar=True``. Where clients have parts or models of their own,
    and PerClientEvaluation measures these, its values stand in place of what is validated: w with
    the mean of personal parts serves nobody.
    """
    module = trainer.lightning_module
    callbacks = trainer.callbacks
    logged = getattr(module, "logged", None)
    names = ["val/acc", *_monitored(trainer)]
    names += [] if logged is None else logged.shown_of(trainer.callback_metrics)
    if any(hasattr(callback, "of_own_models") for callback in callbacks) and _personal(module):
        names = [
            name if (bare := without_prefix(name)) == name else f"clients/{bare}" for name in names
        ]
    return list(dict.fromkeys(names))


def modes(trainer: Any) -> dict[str, str]:
    """Which way is better in metrics, as torchmetrics and callbacks that monitor say: ``"max"`` or
    ``"min"``.
    """
    logged = getattr(trainer.lightning_module, "logged", None)
    given = _monitored(trainer)
    told = {} if logged is None else logged.modes_of(trainer.callback_metrics)
    return told | {name: mode for name, mode in given.items() if mode in MODES}


def _monitored(trainer: Any) -> dict[str, Any]:
    """What callbacks monitor, and the mode by which each does."""
    callbacks = [
        callback
        for callback in trainer.callbacks
        if isinstance(getattr(callback, "monitor", None), str)
    ]
    return {callback.monitor: getattr(callback, "mode", None) for callback in callbacks}


def _personal(module: Any) -> bool:
    """Whether clients end with parts or models of their own."""
    run = getattr(module, "run", None)
    if run is None or run.loop is None:
        return False
    return run.methods.owner("personal") is not None or (
        run.loop.parts is not None and None in run.loop.parts.periods
    )


def log_to(loggers: list[Any], facts: Facts) -> None:
    """Give them to every logger as hyper-parameters."""
    for logger in loggers:
        try:
            logger.log_hyperparams(as_paths(facts) if _is(logger, "MLFlowLogger") else facts)
            if _is(logger, "TensorBoardLogger"):
                _write_hparams(logger)
        except (
            Exception
        ) as error:  # others' code: some refuse a value that changed since a resumed run began
            rank_zero_warn(
                f"{type(logger).__name__} did not take the hyper-parameters: {str(error)[:200]}"
            )


def as_paths(facts: Facts) -> Facts:
    """The same under names that a store of files takes, such as MLflow's, where each is a path of
    its own.

    >>> as_paths({"learner": "Lit", "learner/lr": 0.1, "data/f(x)": 1})
    {'learner.class': 'Lit', 'learner/lr': 0.1, 'data/f_x_': 1}
    """
    folders = {
        "/".join(name.split("/")[:depth])
        for name in facts
        for depth in range(1, name.count("/") + 1)
    }
    paths: Facts = {}
    for name, value in facts.items():
        path = posixpath.normpath(re.sub(r"[^/\w. :-]", "_", name)).lstrip("/.")
        path += ".class" if name in folders else ""
        while path in paths:  # two names alike but for what a path cannot hold
            path += "_"
        paths[path] = value
    return paths


@rank_zero_only
def _write_hparams(logger: Any) -> None:
    """TensorBoard's hparams.yaml anew: Lightning writes it once, before a run has said what it is."""
    with suppress(OSError):
        (Path(logger.log_dir) / logger.NAME_HPARAMS_FILE).unlink()
    logger.save()


def _is(logger: Any, name: str) -> bool:
    """Of either Lightning, which may not be installed whole."""
    return any(kind.__name__ == name for kind in type(logger).__mro__)


def _card(data: Any) -> dict[str, str]:
    card = getattr(data, "card", None)
    return {} if card is None else dict(card())


def _parameters(of: Any) -> set[str]:
    return set(inspect.signature(type(of)).parameters)


def _value(value: Any) -> str | int | float | bool:
    return value if isinstance(value, str | int | float | bool) else repr(value)


@cache  # it reads through all that is installed
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"
