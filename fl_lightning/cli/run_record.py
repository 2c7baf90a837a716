"""``run.json``: what a run is and how it stands, for readers without the code that made it."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fl_lightning import facts
from fl_lightning.cli.compose import parse_yaml
from fl_lightning.errors import Diverged
from fl_lightning.lightning import Timer, pl
from fl_lightning.metrics import read_modes
from fl_lightning.storage.files import written_aside

_PACKAGES = ("fl-lightning", "torch", "pytorch-lightning", "numpy")


def run_record(
    status: str,
    seed: int,
    title: str,
    partition_hash: str | None,
    config: Mapping[str, Any],
    rounds: int | None,
    command: Sequence[str],
    arm: str | None = None,
    claims_hash: str | None = None,
    modes: Mapping[str, str] | None = None,
    shown: Sequence[str] = (),
    axes: Mapping[str, str] | None = None,
    times: tuple[str | None, str | None] = (None, None),
    commit: str | None = None,
) -> dict[str, Any]:
    """The content of run.json.

    Args:
        status: running, done, diverged, stopped or failed.
        seed: the run's.
        title: the method's name.
        partition_hash: of who has which data; None where the data cannot tell.
        config: config.yaml as nested dicts. Its hash leaves out the seed and the folder, so that
            the runs of one arm share it.
        rounds: how many were asked for.
        command: as typed.
        arm: what a sweep calls this setting.
        claims_hash: of the claims that were made before the run.
        axes: key of a sweep's grid → this run's value, as its arm names it.
        times: when it started and when it ended, in UTC; None: not yet.
        commit: of the checkout that ran, see :func:`checkout`.
        modes: metric → "max" or "min", of logged torchmetrics that say which way they are better.
        shown: names of the metrics by which it is shown, the first first.
    """
    return {
        "status": status,
        "seed": seed,
        "arm": arm,
        "title": title,
        "partition_hash": partition_hash,
        "config_hash": config_hash(config),
        "claims_hash": claims_hash,
        "axes": dict(axes or {}),
        "started": times[0],
        "ended": times[1],
        "commit": commit,
        "rounds": rounds,
        "modes": dict(modes or {}),
        "shown": list(shown),
        "command": list(command),
        "versions": {
            **{package: _version(package) for package in _PACKAGES},
            "python": platform.python_version(),
        },
    }


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of a config without its seed and its folder.

    >>> ours = {"model": {"a": 1}}
    >>> config_hash({"seed_everything": 0, **ours}) == config_hash({"seed_everything": 1, **ours})
    True
    """
    trainer = dict(config.get("trainer") or {})
    trainer.pop("default_root_dir", None)
    kept = {**config, "trainer": trainer}
    for key in ("seed_everything", "ckpt_path"):
        kept.pop(key, None)
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def checkout() -> str | None:
    """The commit of the checkout that this code is of; None: it is of none.

    Where its files differ it ends in ``-dirty``.
    """
    here = Path(__file__).resolve()
    described = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        # The first command fails in a checkout that this code only lies in, as in site-packages.
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, *described).strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


class RunRecord(pl.Callback):
    """Writes ``run.json`` in the run's folder when training starts and when it ends, in any way.

    "running" stays in it where the process was killed. A resumed run keeps the arm and the claims
    that it began with.

    Args:
        config: text of config.yaml.
        command: as typed.
        arm: what a sweep calls this setting.
        claims_hash: SHA-256 of a sweep's claims.yaml.
        axes: key of a sweep's grid → this run's value.
    """

    def __init__(
        self,
        config: str,
        command: Sequence[str],
        arm: str | None = None,
        claims_hash: str | None = None,
        axes: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.command = list(command)
        self.arm = arm
        self.claims_hash = claims_hash
        self.axes = dict(axes or {})
        self._started: str | None = None
        self._commit: str | None = None
        # It is known, and ours to write, once training starts.
        self._path: Path | None = None
        self._modes: dict[str, str] = {}
        self._shown: list[str] = []

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """The config, parsed once: the record is written often."""
        return parse_yaml(self.config) or {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._path = Path(trainer.default_root_dir) / "run.json"
        earlier = read_record(self._path)
        self.arm = self.arm or earlier.get("arm")
        self.claims_hash = self.claims_hash or earlier.get("claims_hash")
        self.axes = self.axes or earlier.get("axes") or {}
        # A run that starts anew in a folder has no more of the one before.
        if trainer.current_epoch:
            self._started = earlier.get("started")
            self._modes = read_modes(earlier.get("modes"))
        else:
            self._started = None
            self._modes = {}
        self._started = self._started or _now()
        self._commit = checkout() if trainer.is_global_zero else None
        self._write("running", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # It is written now, as a run that is killed has names too.
        if self._path is not None and self._take_names(trainer):
            self._write("running", trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rounds = trainer.max_epochs
        all_done = rounds is not None and 0 <= rounds <= trainer.current_epoch
        asked = getattr(pl_module, "stop_requested", False) or _out_of_time(trainer)
        self._write("stopped" if asked and not all_done else "done", trainer)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        status = "failed"
        if isinstance(exception, Diverged):
            status = "diverged"
        elif isinstance(exception, KeyboardInterrupt | SystemExit):
            status = "stopped"
        self._write(status, trainer)

    def _take_names(self, trainer: pl.Trainer) -> bool:
        """Note what the learner's torchmetrics said of themselves, and what is shown.

        Tells whether any of that is new.
        """
        modes = dict(self._modes)
        shown = self._shown
        logged = getattr(trainer.lightning_module, "logged", None)
        names = [name for name in facts.shown(trainer) if name in trainer.callback_metrics]
        self._shown = names or shown
        if logged is not None:
            self._modes |= logged.modes_of(trainer.callback_metrics)
        return self._modes != modes or self._shown != shown

    def _write(self, status: str, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        self._take_names(trainer)
        if self._path is None or not trainer.is_global_zero:
            return
        title = type(module).__name__
        describe: Callable[[], str] | None = getattr(module, "describe", None)
        if describe is not None:
            title = describe().split(" · ")[0]
        record = run_record(
            status=status,
            seed=int(getattr(module, "run_seed", 0)),
            title=title,
            partition_hash=getattr(getattr(trainer, "datamodule", None), "partition_hash", None),
            config=self._settings,
            rounds=trainer.max_epochs,
            command=self.command,
            arm=self.arm,
            claims_hash=self.claims_hash,
            modes=self._modes,
            shown=self._shown,
            axes=self.axes,
            times=(self._started, None if status == "running" else _now()),
            commit=self._commit,
        )
        with written_aside(self._path) as file:
            file.write((json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode())


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _out_of_time(trainer: pl.Trainer) -> bool:
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # Lightning does not declare it
    remaining = [callback.time_remaining() for callback in callbacks if isinstance(callback, Timer)]
    return any(seconds is not None and seconds <= 0 for seconds in remaining)


def read_record(path: Path) -> dict[str, Any]:
    """The content of a run.json; empty where there is none, or it cannot be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        # The code runs from a checkout that is not installed.
        return None
