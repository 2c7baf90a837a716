"""``run.json`` describes a run and its state, for readers without the code that made it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace

from fl_lightning.errors import Diverged, UserError, optional
from fl_lightning.lab.cli.compose import as_list, class_name, parse_yaml
from fl_lightning.machine.lightning import Timer, pl
from fl_lightning.machine.processes import usable_cores
from fl_lightning.metrics import metrics_hash, read_modes, read_record, write_record
from fl_lightning.record.description import settings, version_of, versions
from fl_lightning.record.shown_metrics import shown_metrics

# Tracker's logger → the argument that takes the id of the run to continue.
_IDS = {"MLFlowLogger": "run_id", "WandbLogger": "id"}


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a config without its seed and its folder.

    >>> ours = {"model": {"a": 1}}
    >>> config_hash({"seed_everything": 0, **ours}) == config_hash({"seed_everything": 1, **ours})
    True
    """
    trainer = dict(config.get("trainer") or {})
    trainer.pop("default_root_dir", None)
    kept = {**config, "trainer": trainer}
    # In a run from Python both places hold the module's seed.
    model = config.get("model") or {}
    if model.get("seed") is not None and model["seed"] == config.get("seed_everything"):
        kept["model"] = {**model, "seed": None}
    for key in ("seed_everything", "ckpt_path"):
        kept.pop(key, None)
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def checkout() -> str | None:
    """Return the commit of the checkout that has this code; None: it is not in a checkout.

    The text ends in ``-dirty`` if files differ from the commit.
    """
    here = Path(__file__).resolve()
    described = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        # This fails if the code is not tracked by the checkout that it lies in, as in
        # site-packages.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, *described).strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def machine(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the machine on which a run trains.

    ``processor`` is its name, None if the system does not give it; ``cores`` is the number that the
    process may use, ``memory`` the machine's in bytes, ``threads`` the number for one operation,
    ``gpu`` the name of the one that this process uses.
    """
    device = trainer.strategy.root_device
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "processes": trainer.world_size,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str | None:
    # On systems other than Linux the platform module has the name.
    file = Path("/proc/cpuinfo")
    lines = file.read_text("utf-8", "replace") if file.is_file() else ""
    named = re.search(r"^model name\s*:\s*(.+)$", lines, re.MULTILINE)
    return " ".join(named[1].split()) if named else platform.processor() or None


class RunRecord(pl.Callback):
    """Writes ``run.json`` in the run's folder when training starts and when it ends, for whatever
    reason.

    ``status`` stays "running" if the process was killed. A resumed run keeps its arm and its
    claims.

    Args:
        config: text of config.yaml.
        command: as typed.
        arm: the name of this setting in a sweep.
        claims_hash: SHA-256 of a sweep's claims.yaml.
        axes: key of a sweep's grid → this run's value.
        unknown: keys that config.yaml lacks, for a run from Python; None: the run is from the
            command line.
        writer: the callback that unlocks the folder after an exception.
    """

    def __init__(
        self,
        config: str,
        command: Sequence[str],
        arm: str | None = None,
        claims_hash: str | None = None,
        axes: Mapping[str, str] | None = None,
        unknown: Sequence[str] | None = None,
        writer: pl.Callback | None = None,
    ) -> None:
        self.config = config
        self.unknown = unknown
        self.writer = writer
        self.command = list(command)
        self.given = {"arm": arm, "claims_hash": claims_hash, "axes": dict(axes or {})}
        # The folder is known, and this callback may write to it, once training starts.
        self._folder: Path | None = None
        self._kept: dict[str, Any] = {}
        self._names: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder = Path(trainer.default_root_dir)
        self._folder = folder
        earlier = read_record(folder)
        kept: dict[str, Any] = {key: value or earlier.get(key) for key, value in self.given.items()}
        # A run that starts again in a folder keeps nothing of the earlier run's record.
        earlier = earlier if trainer.current_epoch else {}
        data = getattr(trainer, "datamodule", None)
        on_test = getattr(data, "validates_on_test", None)
        # None if the data module does not say.
        validated_on = {None: None, True: "test", False: "validation"}[on_test]
        self._kept = {
            **kept,
            "axes": kept["axes"] or {},
            "seed": int(getattr(pl_module, "run_seed", 0)),
            "title": pl_module.describe().split(" · ")[0],  # type: ignore[operator]
            "settings": settings(pl_module.run, trainer),
            "partition_hash": getattr(data, "partition_hash", None),
            "validated_on": validated_on,
            "config_hash": config_hash(parse_yaml(self.config) or {}),
            "started": earlier.get("started") or _ended(folder, "")["ended"],
            "commit": checkout() if trainer.is_global_zero else None,
            "rounds": trainer.max_epochs,
            "command": self.command,
            **({} if self.unknown is None else {"unknown": list(self.unknown)}),
            "machine": machine(trainer),
            "versions": {**versions(), "numpy": version_of("numpy")},
        }
        trackers = earlier.get("trackers") or {}
        self._names = {"modes": read_modes(earlier.get("modes")), "shown": [], "trackers": trackers}
        self._take_names(trainer)
        self._write("running", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Write it now, so that a run that is killed also has its names.
        if self._folder is not None and self._take_names(trainer):
            self._write("running", trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._folder is None:
            return
        rounds = trainer.max_epochs
        all_done = rounds is not None and 0 <= rounds <= trainer.current_epoch
        asked = getattr(pl_module, "stop_requested", False) or _out_of_time(trainer)
        self._take_names(trainer)
        self._write("stopped" if asked and not all_done else "done", trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        status = "failed"
        if isinstance(exception, Diverged):
            status = "diverged"
        elif isinstance(exception, KeyboardInterrupt | SystemExit):
            status = "stopped"
        # Use the names of the last round: asking for metrics would involve the other processes,
        # which may be lost. A disk that failed may not take this either; its first error says more.
        with suppress(UserError):
            self._write(status, trainer)
        # All other callbacks have written. A notebook's process lives on, without teardown.
        if self.writer is not None:
            self.writer.teardown(trainer, pl_module, "fit")

    def _take_names(self, trainer: pl.Trainer) -> bool:
        """Record torchmetrics' directions, the metrics shown, the trackers' ids, and warnings.

        Return whether any of them is new.
        """
        module: Any = trainer.lightning_module
        before = self._names
        shown = [name for name in shown_metrics(trainer) if name in trainer.callback_metrics]
        self._names = {
            "modes": before["modes"] | module.logged.modes_of(trainer.callback_metrics),
            "shown": shown or before["shown"],
            "trackers": before["trackers"] | ids_of(trainer.loggers),
            "notes": list(module.notes),
        }
        return self._names != before

    def _write(self, status: str, trainer: pl.Trainer) -> None:
        if self._folder is not None and trainer.is_global_zero:
            record = {"status": status, **self._kept, **self._names}
            write_record(self._folder, record | _ended(self._folder, status))


def _ended(folder: Path, status: str) -> dict[str, Any]:
    if status == "running":
        return {"ended": None, "metrics_hash": None}
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"status": status, "ended": now, "metrics_hash": metrics_hash(folder)}


def end_killed(folder: Path, rounds: int) -> bool:
    """Mark a run as done that was killed after its last round, before it could write that.

    Args:
        rounds: number of rounds that are done.

    Returns:
        Whether it was such a run.
    """
    record = read_record(folder)
    if not was_killed(record) or not 0 < (record.get("rounds") or -1) <= rounds:
        return False
    write_record(folder, record | _ended(folder, "done"))
    return True


def was_killed(record: Mapping[str, Any]) -> bool:
    """Return whether a run.json belongs to a run that could not write how it ended."""
    # A run that ended by an error has the time of its end. If the process was killed, a sweep marks
    # the run as failed, without a time.
    return record.get("status") in ("running", "failed") and record.get("ended") is None


def _out_of_time(trainer: pl.Trainer) -> bool:
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # Lightning does not declare it
    remaining = [callback.time_remaining() for callback in callbacks if isinstance(callback, Timer)]
    return any(seconds is not None and seconds <= 0 for seconds in remaining)


def ids_of(loggers: Iterable[Any]) -> dict[str, str]:
    """Return class → id of the tracker's run, for each logger that has begun one."""
    # The `version` of one of Lightning's loggers is the id of its run, once there is a run.
    named = {type(logger).__name__: logger.version for logger in loggers}
    return {name: str(named[name]) for name in _IDS if named.get(name) is not None}


def completed(config: Namespace, ids: Mapping[str, str]) -> Namespace:
    """Return the config with ``ids`` in its loggers, and MLflow's local store if it names none
    itself.

    The returned config is a copy, because trackers do not change what a run is.
    """
    config = config.clone()
    for logger in as_list(config.trainer.logger):
        name = class_name(logger.class_path) if isinstance(logger, Namespace) else ""
        if name not in _IDS:
            continue
        optional(name.removesuffix("Logger").lower(), "trackers", f"trainer.logger: {name}")
        arguments = logger.init_args
        if name in ids and arguments.get("version") is None and arguments.get(_IDS[name]) is None:
            arguments[_IDS[name]] = ids[name]
        # New versions of MLflow refuse Lightning's default, a folder of files.
        if name == "MLFlowLogger" and arguments.get("save_dir") == "./mlruns":
            uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
            arguments["tracking_uri"] = arguments.get("tracking_uri") or uri
    return config
