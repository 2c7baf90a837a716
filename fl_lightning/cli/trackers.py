"""A run that is resumed goes on in its trackers' runs: their ids are kept in ``run.json``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from fl_lightning.cli.compose import class_name
from fl_lightning.metrics import read_record

# Logger → its argument that takes the id of a run to go on with.
_IDS = {"MLFlowLogger": "run_id", "WandbLogger": "id"}


def ids_of(loggers: Iterable[Any]) -> dict[str, str]:
    """Class → id of the tracker's run, of those loggers that have begun one."""
    found = {}
    for logger in loggers:
        name = type(logger).__name__
        # Lightning's loggers say by their version which run is theirs, once there is one.
        if name in _IDS and logger.version is not None:
            found[name] = str(logger.version)
    return found


def trackers(folder: Path) -> dict[str, str]:
    """The ids that the run in ``folder`` noted."""
    noted = read_record(folder).get("trackers")
    return dict(noted) if isinstance(noted, dict) else {}


def completed(config: Namespace, ids: dict[str, str]) -> Namespace:
    """The config with ``ids`` in its loggers, and MLflow's local store, where it gives none itself.

    It is a copy: what a run is does not change with the trackers that follow it.
    """
    config = config.clone()
    loggers = config.trainer.logger
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        name = class_name(logger.class_path) if isinstance(logger, Namespace) else ""
        if name not in _IDS:
            continue
        arguments = logger.init_args
        if name in ids and arguments.get("version") is None and arguments.get(_IDS[name]) is None:
            arguments[_IDS[name]] = ids[name]
        # Lightning's default, a folder of files, is refused by MLflow of late.
        if name == "MLFlowLogger" and arguments.get("save_dir") == "./mlruns":
            uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
            arguments["tracking_uri"] = arguments.get("tracking_uri") or uri
    return config
