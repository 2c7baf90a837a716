"""A resumed run continues its runs in the trackers; ``run.json`` has their ids.

If a tracker cannot be used, the run reports that before training.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from fl_lightning.errors import UserError
from fl_lightning.lab.cli.compose import class_name
from fl_lightning.metrics import read_record

# Logger → the argument that takes the id of the run to continue.
_IDS = {"MLFlowLogger": "run_id", "WandbLogger": "id"}
_PACKAGES = {"MLFlowLogger": "mlflow", "WandbLogger": "wandb"}


def ids_of(loggers: Iterable[Any]) -> dict[str, str]:
    """Return class → id of the tracker's run, for each logger that has begun one."""
    found = {}
    for logger in loggers:
        name = type(logger).__name__
        # The `version` of one of Lightning's loggers is the id of its run, once there is a run.
        if name in _IDS and logger.version is not None:
            found[name] = str(logger.version)
    return found


def trackers(folder: Path) -> dict[str, str]:
    """Return the ids that the run in ``folder`` stored."""
    noted = read_record(folder).get("trackers")
    return dict(noted) if isinstance(noted, dict) else {}


def completed(config: Namespace, ids: dict[str, str]) -> Namespace:
    """Return the config with ``ids`` in its loggers, and MLflow's local store if it names none
    itself.

    The returned config is a copy, because trackers do not change what a run is.
    """
    config = config.clone()
    for name, logger in _tracking(config):
        arguments = logger.init_args
        if name in ids and arguments.get("version") is None and arguments.get(_IDS[name]) is None:
            arguments[_IDS[name]] = ids[name]
        # New versions of MLflow refuse Lightning's default, a folder of files.
        if name == "MLFlowLogger" and arguments.get("save_dir") == "./mlruns":
            uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
            arguments["tracking_uri"] = arguments.get("tracking_uri") or uri
    return config


def check_installed(config: Namespace) -> None:
    """Refuse a tracker whose package is not installed."""
    for name, _ in _tracking(config):
        package = _PACKAGES[name]
        if find_spec(package) is None:
            raise UserError(
                f"trainer.logger: {name} needs the package {package}, which is not installed: pip "
                f"install {package}, or 'fl-lightning[trackers]' for every tracker, or leave it "
                "out: -c logger/csv."
            )


def check_goes_on(loggers: Any, ids: dict[str, str], folder: Path) -> None:
    """Refuse to continue a run that MLflow's store does not have any more.

    Weights & Biases asks its server when it sends the logs.
    """
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        own = ids.get("MLFlowLogger")
        if type(logger).__name__ != "MLFlowLogger" or own is None or logger._run_id != own:
            continue
        # Each tracker raises its own errors if it cannot be reached or does not have the run.
        try:
            stage = logger.experiment.get_run(own).info.lifecycle_stage
            reason = "" if stage == "active" else f"it is {stage}"
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
        if reason:
            raise UserError(
                f"MLFlowLogger: {folder} continued MLflow's run {own}, but that run cannot be "
                f"opened in {logger._tracking_uri} ({reason.rstrip('.')}). Restore that store, or "
                "set MLFLOW_TRACKING_URI to its address, or go on without MLflow: -c logger/csv."
            )


def _tracking(config: Namespace) -> Iterator[tuple[str, Namespace]]:
    """Return class and config of the loggers whose trackers have their own runs."""
    loggers = config.trainer.logger
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        name = class_name(logger.class_path) if isinstance(logger, Namespace) else ""
        if name in _IDS:
            yield name, logger
