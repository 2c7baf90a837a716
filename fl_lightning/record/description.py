"""A run's description: one line, and hyper-parameters for loggers."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from fl_lightning.errors import UserError
from fl_lightning.introspection.init_args import flat, stored
from fl_lightning.machine.lightning import rank_zero_warn
from fl_lightning.schedules import text_of
from fl_lightning.storage.checkpoint_io import is_plain

HyperParameters = dict[str, str | int | float | bool]
# Arguments of learners for the optimizer that they configure.
OF_OPTIMIZERS = ("lr", "learning_rate", "weight_decay", "momentum", "betas", "eps")
LONGEST_TEXT = 300
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
    if run.methods.owner("neighbours") is not None:
        optimizers = f"{optimizers.split(' · server ')[0]} · no server"
    parts = [title, run.loop.cohort.describe(), optimizers, str(run.plan or "")]
    return " · ".join(filter(None, parts))


def title_of(run: Any) -> str:
    names: str = run.methods.title()
    # Without another method, the average of clients' adapters is FedIT (Zhang et al., 2024).
    if names == "FedAvg" and run.model.layout.adapters:
        names = "FedIT"
    asynchronous = run.settings.asynchronous
    if asynchronous is None:
        return names
    own = "FedBuff" if asynchronous.mixing is None else "FedAsync"
    return own if names == "FedAvg" else f"{own} + {names}"


def versions() -> dict[str, str]:
    numbers = {package: version_of(package) or "not installed" for package in _PACKAGES}
    return {**numbers, "python": platform.python_version()}


def of_learner(learner: Any, described: Mapping[str, Any] | None = None) -> HyperParameters:
    """Return the learner's class, its arguments and its network's, and its numbers of parameters.

    Args:
        described: the learner as its config has it; None or empty: what the object knows counts.
    """
    entries = _flat("learner", described or learner)
    network = getattr(learner, "network", None)
    if network is not None:
        entries["learner/network"] = type(network).__name__
    for name, value in dict(learner.hparams).items():
        if value is not None and is_plain(value) and not isinstance(value, dict):
            entries.setdefault(f"learner/{name}", _value(value))
    parameters = dict(learner.named_parameters())
    trained = [each for each in parameters.values() if each.requires_grad]
    entries["learner/parameters"] = sum(map(torch.numel, trained))
    if len(trained) < len(parameters):
        every = sum(map(torch.numel, parameters.values()))
        entries["learner/frozen_parameters"] = every - int(entries["learner/parameters"])
    return entries


def _flat(place: str, value: Any) -> HyperParameters:
    """Return an object's class and arguments, with slashes between their names."""
    found = flat(place, value, lambda path: path.rpartition(".")[2])
    return {k.replace(".", "/"): _value(v) for k, v in found.items() if v not in (None, [])}


def settings(run: Any, trainer: Any) -> HyperParameters:
    """Return what decides the results of a run: learner, method, data, rounds and optimizers.

    Two runs with the same settings differ only in their seeds, and in what facts() returns.
    """
    entries = of_learner(run.model.learner, run.model.described)
    ranks = sorted({adapter.rank for adapter in run.model.layout.adapters})
    if ranks:
        entries["learner/lora_rank"] = ranks[0] if len(ranks) == 1 else repr(ranks)
    entries["method"] = title_of(run)
    for callback in run.methods.callbacks:
        kind = "method" if callback.is_method() else "callback"
        for name, value in stored(callback)[0].items():
            shown = value if is_plain(value) else text_of(value)
            if is_plain(value) or shown:
                entries[f"{kind}/{type(callback).__name__}/{name}"] = _value(shown)
    data = trainer.datamodule
    entries |= _flat("data", data)
    entries["data"] = type(data).__name__
    for name in ("num_clients", "batch_size"):
        entries[f"data/{name}"] = _value(getattr(data, name, None))
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
    for name in OF_OPTIMIZERS:
        # The optimizer's entry has the value that is used: `client_optimizer` replaces the
        # learner's own optimizer.
        same = entries.get(f"learner/{name}") == entries.get(f"client_optimizer/{name}")
        if run.settings.client_optimizer is not None or same:
            entries.pop(f"learner/{name}", None)
    entries["precision"] = str(trainer.precision)
    return entries


def facts(run: Any, trainer: Any) -> HyperParameters:
    """Return what became of the settings: the seed, the split, the engine and the versions."""
    entries: HyperParameters = {}
    for name, value in _card(trainer.datamodule).items():
        if name not in ("data", "batch size"):
            entries[f"data/{name.replace(' ', '_')}"] = value
    entries["seed"] = run.seed(trainer)
    for name, value in run.plan.card().items():
        entries[f"machine/{name.replace(' ', '_')}"] = _value(value)
    entries["machine/processes"] = trainer.world_size
    for package, number in versions().items():
        entries[f"versions/{package}"] = number
    return entries


def log_to(loggers: list[Any], entries: HyperParameters) -> None:
    for logger in loggers:
        # A logger is other people's code. Some refuse a value that has changed since the run began,
        # which is no reason to end the run.
        try:
            logger.log_hyperparams(as_names(entries) if _is(logger, "MLFlowLogger") else entries)
        except Exception as error:
            rank_zero_warn(
                f"{type(logger).__name__} did not take the hyper-parameters: {str(error)[:200]}"
            )


def as_names(entries: HyperParameters) -> HyperParameters:
    """Return the entries under names that MLflow's store takes.

    In a store of files, ``learner`` and ``learner/lr`` would be a file and a folder.

    >>> as_names({"learner": "Lit", "learner/lr": 0.1, "data/f(x)": 1})
    {'learner': 'Lit', 'learner.lr': 0.1, 'data.f_x_': 1}
    """
    return {re.sub(r"[^\w. :-]", "_", n.replace("/", ".")): v for n, v in entries.items()}


def _is(logger: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(logger).__mro__)


def _card(data: Any) -> dict[str, str]:
    card = getattr(data, "card", None)
    return {} if card is None else dict(card())


def _value(value: Any) -> str | int | float | bool:
    if isinstance(value, int | float | bool):
        return value
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


@cache  # this reads through all installed packages, and a run asks several times
def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
