"""``run.json`` describes a run and its state, for readers without the code that made it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fl_lightning.errors import Diverged, UserError
from fl_lightning.lab.cli.compose import parse_yaml
from fl_lightning.lab.cli.trackers import ids_of, trackers
from fl_lightning.machine.lightning import Timer, pl
from fl_lightning.machine.processes import usable_cores
from fl_lightning.metrics import metrics_hash, read_modes, read_record, write_record
from fl_lightning.record.description import version_of
from fl_lightning.record.shown_metrics import shown_metrics

_PACKAGES = ("fl-lightning", "torch", "pytorch-lightning", "numpy")


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
        "memory": _memory(),
        "threads": torch.get_num_threads(),
        "processes": trainer.world_size,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        # On systems other than Linux the platform module has the name.
        return platform.processor() or None
    named = re.search(r"^model name\s*:\s*(.+)$", lines, re.MULTILINE)
    return " ".join(named[1].split()) if named else None


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


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
    """

    def __init__(
        self,
        config: str,
        command: Sequence[str],
        arm: str | None = None,
        claims_hash: str | None = None,
        axes: Mapping[str, str] | None = None,
        unknown: Sequence[str] | None = None,
    ) -> None:
        self.config = config
        self.unknown = unknown
        self.command = list(command)
        self.given = {"arm": arm, "claims_hash": claims_hash, "axes": dict(axes or {})}
        # The folder is known, and this callback may write to it, once training starts.
        self._folder: Path | None = None
        self._kept: dict[str, Any] = {}
        self._modes: dict[str, str] = {}
        self._shown: list[str] = []
        self._trackers: dict[str, str] = {}
        self._notes: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder = Path(trainer.default_root_dir)
        self._folder = folder
        earlier = read_record(folder)
        self._kept = {key: value or earlier.get(key) for key, value in self.given.items()}
        self._kept["axes"] = self._kept["axes"] or {}
        self._kept["config_hash"] = config_hash(parse_yaml(self.config) or {})
        # A run that starts again in a folder keeps nothing of the earlier run's record.
        earlier = earlier if trainer.current_epoch else {}
        self._kept["started"] = earlier.get("started") or _now()
        self._modes = read_modes(earlier.get("modes"))
        self._trackers = trackers(folder) if earlier else {}
        self._kept["commit"] = checkout() if trainer.is_global_zero else None
        self._kept["machine"] = machine(trainer)
        on_test = getattr(getattr(trainer, "datamodule", None), "validates_on_test", None)
        # None if the data module does not say.
        self._kept["validated_on"] = None
        if on_test is not None:
            self._kept["validated_on"] = "test" if on_test else "validation"
        self._take_names(trainer)
        self._write("running", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Write it now, so that a run that is killed also has its names.
        if self._folder is not None and self._take_names(trainer):
            self._write("running", trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
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

    def _take_names(self, trainer: pl.Trainer) -> bool:
        """Record torchmetrics' directions, the metrics shown, the trackers' ids, and warnings.

        Return whether any of them is new.
        """
        before = (dict(self._modes), self._shown, self._trackers, self._notes)
        self._notes = list(getattr(trainer.lightning_module, "notes", []))
        shown = self._shown
        logged = getattr(trainer.lightning_module, "logged", None)
        names = [name for name in shown_metrics(trainer) if name in trainer.callback_metrics]
        self._shown = names or shown
        if logged is not None:
            self._modes |= logged.modes_of(trainer.callback_metrics)
        self._trackers = self._trackers | ids_of(trainer.loggers)
        return (self._modes, self._shown, self._trackers, self._notes) != before

    def _write(self, status: str, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        if self._folder is None or not trainer.is_global_zero:
            return
        title = type(module).__name__
        describe: Callable[[], str] | None = getattr(module, "describe", None)
        if describe is not None:
            title = describe().split(" · ")[0]
        data = getattr(trainer, "datamodule", None)
        record = {
            "status": status,
            "seed": int(getattr(module, "run_seed", 0)),
            "arm": self._kept["arm"],
            "title": title,
            # None if the data module does not say.
            "partition_hash": getattr(data, "partition_hash", None),
            "validated_on": self._kept["validated_on"],
            "config_hash": self._kept["config_hash"],
            "claims_hash": self._kept["claims_hash"],
            "axes": self._kept["axes"],
            "started": self._kept["started"],
            "ended": None if status == "running" else _now(),
            "metrics_hash": None if status == "running" else metrics_hash(self._folder),
            "commit": self._kept["commit"],
            "rounds": trainer.max_epochs,
            "modes": self._modes,
            "shown": self._shown,
            "trackers": self._trackers,
            "notes": self._notes,
            "command": self.command,
            **({} if self.unknown is None else {"unknown": list(self.unknown)}),
            "machine": self._kept["machine"],
            "versions": {
                **{package: version_of(package) for package in _PACKAGES},
                "python": platform.python_version(),
            },
        }
        write_record(self._folder, record)


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
    ended = {"status": "done", "ended": _now(), "metrics_hash": metrics_hash(folder)}
    write_record(folder, record | ended)
    return True


def killed_before(folder: Path, rounds: int) -> int | None:
    """Return how many rounds were asked of a run that was killed after ``rounds`` of them."""
    record = read_record(folder)
    asked = record.get("rounds") or -1  # -1: without end
    return int(asked) if was_killed(record) and asked > rounds else None


def was_killed(record: Mapping[str, Any]) -> bool:
    """Return whether a run.json belongs to a run that could not write how it ended."""
    # A run that ended by an error has the time of its end. If the process was killed, a sweep marks
    # the run as failed, without a time.
    return record.get("status") in ("running", "failed") and record.get("ended") is None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _out_of_time(trainer: pl.Trainer) -> bool:
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # Lightning does not declare it
    remaining = [callback.time_remaining() for callback in callbacks if isinstance(callback, Timer)]
    return any(seconds is not None and seconds <= 0 for seconds in remaining)
