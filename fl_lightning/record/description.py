"""A run's description: one line, hyper-parameters, and the metrics of its rounds for loggers."""

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
from fl_lightning.machine.lightning import rank_zero_only, rank_zero_warn
from fl_lightning.schedules import Schedule
from fl_lightning.storage.pickled_objects import is_plain

HyperParameters = dict[str, str | int | float | bool]
_PACKAGES = ("fl-lightning", "torch", "pytorch-lightning")


def line(run: Any) -> str:
    """Return methods, cohort, optimizers and engine in one line.

    Raises:
        UserError: the run has not begun.
    """
    if run.loop is None:
        raise UserError(
            "describe(): the run's description is known only after a run has begun. Call it after "
            "trainer.fit, or in a callback."
        )
    learner = type(run.model.learner)
    title = title_of(run)
    if not learner.__module__.startswith("fl_lightning."):
        title += f" ({learner.__name__})"
    optimizers = run.optimizers.describe(run.settings)
    parts = [title, run.loop.cohort.describe(), optimizers, str(run.plan or "")]
    return " · ".join(filter(None, parts))


def title_of(run: Any) -> str:
    """Return the methods' names, and that of asynchrony."""
    names: str = run.methods.title()
    asynchronous = run.settings.asynchronous
    if asynchronous is None:
        return names
    own = "FedBuff" if asynchronous.mixing is None else "FedAsync"
    return own if names == "FedAvg" else f"{own} + {names}"


def versions() -> dict[str, str]:
    """Return the versions of packages on which a result may depend."""
    numbers = {package: version_of(package) or "not installed" for package in _PACKAGES}
    return {**numbers, "python": platform.python_version()}


def of_learner(learner: Any) -> HyperParameters:
    """Return the learner's class, its plain hyper-parameters, and the number of trained
    parameters.
    """
    entries: HyperParameters = {"learner": type(learner).__name__}
    network = getattr(learner, "network", None)
    if network is not None:
        entries["learner/network"] = type(network).__name__
    for name, value in dict(learner.hparams).items():
        if is_plain(value):
            entries[f"learner/{name}"] = _value(value)
    entries["learner/parameters"] = sum(p.numel() for p in learner.parameters() if p.requires_grad)
    return entries


def of_run(run: Any, trainer: Any) -> HyperParameters:
    """Return learner, method, data, partition, seed, engine and versions of a run, before its
    rounds.
    """
    data = trainer.datamodule
    entries: HyperParameters = {**of_learner(run.model.learner), "method": title_of(run)}
    for callback in run.methods.callbacks:
        arguments = _parameters(callback)
        for name, value in vars(callback).items():
            if name in arguments and (is_plain(value) or isinstance(value, Schedule)):
                entries[f"method/{type(callback).__name__}/{name}"] = _value(value)
    entries["data"] = type(data).__name__
    entries.update(
        {f"data/{k.replace(' ', '_')}": v for k, v in _card(data).items() if k != "data"}
    )
    for name in ("num_clients", "batch_size"):
        entries[f"data/{name}"] = _value(getattr(data, name, None))
    entries["seed"] = run.seed(trainer)
    entries["rounds"] = _value(trainer.max_epochs)
    # Optimizers and the seed have their own entries, with the values that the run made of these
    # settings.
    elsewhere = ("client_optimizer", "server_optimizer", "seed", "strict_resume")
    for name, value in vars(run.settings).items():
        if name not in elsewhere and value is not None:
            entries[name] = _value(value)
    optimizers = {"client": run.optimizers.clients, "server": run.optimizers.server}
    for name, optimizer in optimizers.items():
        entries[f"{name}_optimizer"] = type(optimizer).__name__
        for key, value in optimizer.param_groups[0].items():
            if key not in ("params", "initial_lr") and is_plain(value) and value is not None:
                entries[f"{name}_optimizer/{key}"] = _value(value)
    for name, value in run.plan.card().items():
        entries[f"machine/{name.replace(' ', '_')}"] = _value(value)
    entries["machine/precision"] = str(trainer.precision)
    entries["machine/processes"] = trainer.world_size
    for package, number in versions().items():
        entries[f"versions/{package}"] = number
    return entries


def log_to(loggers: list[Any], entries: HyperParameters) -> None:
    """Give the entries to every logger as hyper-parameters."""
    for logger in loggers:
        # A logger is other people's code. Some refuse a value that has changed since the run began,
        # which is no reason to end the run.
        try:
            logger.log_hyperparams(as_paths(entries) if _is(logger, "MLFlowLogger") else entries)
            if _is(logger, "TensorBoardLogger"):
                _write_hparams(logger)
        except Exception as error:
            rank_zero_warn(
                f"{type(logger).__name__} did not take the hyper-parameters: {str(error)[:200]}"
            )


def as_paths(entries: HyperParameters) -> HyperParameters:
    """Return the entries under names that are valid paths of files, as MLflow's store needs them.

    >>> as_paths({"learner": "Lit", "learner/lr": 0.1, "data/f(x)": 1})
    {'learner.class': 'Lit', 'learner/lr': 0.1, 'data/f_x_': 1}
    """
    folders: set[str] = set()
    for name in entries:
        folder = name.rpartition("/")[0]
        while folder:
            folders.add(folder)
            folder = folder.rpartition("/")[0]
    paths: HyperParameters = {}
    for name, value in entries.items():
        path = posixpath.normpath(re.sub(r"[^/\w. :-]", "_", name)).lstrip("/.")
        # A name with other names below it would be a folder and a file at the same time.
        if name in folders:
            path += ".class"
        # Two names may differ only in characters that a path cannot hold.
        while path in paths:
            path += "_"
        paths[path] = value
    return paths


@rank_zero_only
def _write_hparams(logger: Any) -> None:
    """Write TensorBoard's hparams.yaml again."""
    # Lightning writes this file once, before the run's settings are known, and never again.
    with suppress(OSError):
        (Path(logger.log_dir) / logger.NAME_HPARAMS_FILE).unlink()
    logger.save()


def _is(logger: Any, name: str) -> bool:
    """Return by name whether a logger is of this class, in either Lightning package."""
    return any(kind.__name__ == name for kind in type(logger).__mro__)


def _card(data: Any) -> dict[str, str]:
    card = getattr(data, "card", None)
    return {} if card is None else dict(card())


def _parameters(of: Any) -> set[str]:
    return set(inspect.signature(type(of)).parameters)


def _value(value: Any) -> str | int | float | bool:
    return value if isinstance(value, str | int | float | bool) else repr(value)


@cache  # this reads through all installed packages, and a run asks several times
def version_of(package: str) -> str | None:
    """Return the version of a package; None: it is not installed, as a checkout need not be."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
