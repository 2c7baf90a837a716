"""A run's folder, which is locked only when training starts; its config, loggers, checkpoints."""

from __future__ import annotations

import math
import os
import re
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from fl_lightning.aggregation.metric_states import tells_mode
from fl_lightning.errors import UserError, cannot_write, suggest
from fl_lightning.evaluation.measurement import Measurement
from fl_lightning.machine.lightning import Checkpoint, Logger, TensorBoardLogger, pl, rank_zero_only
from fl_lightning.metrics import MODES, Directions, is_accuracy, read_record
from fl_lightning.module import FederatedModule
from fl_lightning.record.metrics_csv import MetricsCSV
from fl_lightning.record.shown_metrics import compared_metrics
from fl_lightning.storage.atomic_files import written_aside
from fl_lightning.storage.lock import RunLock, held_by_all

# The first columns of TensorBoard's table of hyper-parameters, besides the network and the
# arguments of methods.
FIRST_COLUMNS = ("client_optimizer/lr", "data", "method", "seed")


def numbered(stem: str) -> list[tuple[int, Path]]:
    """Return the folders ``<stem>-<number>`` that exist, by number."""
    parent = Path(stem).parent
    pattern = re.escape(Path(stem).name) + r"-(\d+)"
    folders = []
    for entry in parent.iterdir() if parent.is_dir() else ():
        if match := re.fullmatch(pattern, entry.name):
            folders.append((int(match[1]), entry))
    return sorted(folders)


def next_free(stem: str) -> Path:
    """Return the folder after the last of ``numbered(stem)``; it is not created."""
    last = max((number for number, _ in numbered(stem)), default=0)
    return Path(f"{stem}-{last + 1}")


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of the run in ``folder``: last.ckpt, best.ckpt, then others,
    newest first.
    """
    order = {"last.ckpt": 0, "best.ckpt": 1}
    times: dict[Path, float] = {}
    for path in (folder / "checkpoints").glob("*.ckpt"):
        # The path may be a dangling link, or may just have been removed.
        with suppress(OSError):
            if stat.S_ISREG((status := path.stat()).st_mode):
                times[path] = status.st_mtime
    return sorted(times, key=lambda path: (order.get(path.name, 2), -times[path]))


def holds_run(folder: Path) -> bool:
    """Return whether a run completed a round in ``folder``.

    A run that stopped in round 0 leaves the folder free for another run.
    """
    # You may delete the checkpoints of a finished run.
    if (folder / "metrics.csv.gz").is_file() or checkpoints(folder):
        return True
    # Without checkpoints (enable_checkpointing=false), the row of round 1 in metrics.csv shows that
    # round 0 ended. Of a run of one round, run.json shows it.
    metrics = folder / "metrics.csv"
    rows = metrics.read_bytes().count(b"\n") - 1 if metrics.is_file() else 0
    return rows > 1 or (rows == 1 and read_record(folder).get("status") == "done")


def refuse_other_run(option: str, folder: Path, checkpoint: Any, way: str) -> None:
    """Refuse a folder that holds a run, unless the run resumes from a ``checkpoint`` in it.

    ``way``: how to go on with the run in the folder.
    """
    own = [path.resolve() for path in checkpoints(folder)]
    if not holds_run(folder) or (checkpoint and Path(checkpoint).resolve() in own):
        return
    advice = (
        f"Go on with it by {way}, or give" if own else "It has no checkpoint to go on from: give"
    )
    raise UserError(
        f"{option} {folder}: this folder already holds a run, and it was not changed. {advice} "
        f"another folder for a new run: {option} DIR."
    )


def check_writable(folder: Path, option: str = "--trainer.default_root_dir") -> None:
    """Refuse a folder that could not be created or written to; do not create it."""
    place = folder.absolute()
    try:
        place.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        # Some names are too long for a file system, or no text.
        raise UserError(f"{option} {str(folder)[:100]!r}: {error}. Give another folder.") from None
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        problem = "is not writable" if place.is_dir() else "is not a folder"
        raise UserError(
            f"{option} {folder}: {place} {problem}. Give a folder that can be written to."
        )


class RunEvents(TensorBoardLogger):
    """TensorBoard events directly in the run's folder.

    The folder's config.yaml takes the place of hparams.yaml. In a config it adds these events to
    other loggers; the run then sets the folder.

    Args:
        folder: the run's folder, once it is locked.
        first_round: events of later rounds, written before the run was resumed, are dropped.
        metrics: names of the metrics in the tab of hyper-parameters.
    """

    def __init__(
        self, folder: str | None = None, first_round: int = 0, metrics: Sequence[str] = ()
    ) -> None:
        self.metrics = metrics
        super().__init__(
            folder or "", name="", version="", purge_step=first_round, default_hp_metric=False
        )

    def save(self) -> None:
        self.experiment.flush()

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Fill the tab of hyper-parameters, with the last values of ``metrics``.

        TensorBoardLogger's own method would log a -1.
        """
        from torch.utils.tensorboard import summary as tensorboard

        # TensorBoard has no types.
        writer = self.experiment._get_file_writer()
        measured = dict.fromkeys(self.metrics, 0)
        experiment, *session = cast(Any, tensorboard).hparams(dict(params), measured)
        for summary in (_with_first_columns(experiment), *session):
            writer.add_summary(summary, step)


def _with_first_columns(summary: Any) -> Any:
    """Return a summary of hyper-parameters whose first columns tell runs apart.

    TensorBoard sorts columns by name, but those that are marked to differ come first. It shows the
    first five.
    """
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = summary.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(content.content)
    names = {info.name for info in data.experiment.hparam_infos}
    # A library's network has a name; a network of your own, or none, is told by its class.
    kinds = ("learner/network/name", "learner/network", "learner")
    first = {*FIRST_COLUMNS, next((kind for kind in kinds if kind in names), "")}
    for info in data.experiment.hparam_infos:
        info.differs = info.name in first or info.name.startswith("method/")
    content.content = data.SerializeToString()
    return summary


class RunFolderWriter(pl.Callback):
    """Locks the run's folder once all else is known to work, and puts config and loggers there.

    A resumed run keeps its old config.yaml until ``write_config`` after its first new checkpoint,
    so a resume that fails does not change the run.
    Args:
        folder: the run's folder.
        stem: if no folder was given, the next free ``<stem>-<number>`` is used.
        config: the text of config.yaml.
        tensorboard: whether to write TensorBoard events.
    """

    # The module reads this attribute, and then does not claim a folder itself.
    claims_folder = True

    def __init__(self, folder: Path, stem: str | None, config: str, tensorboard: bool) -> None:
        self.folder = folder
        self.stem = stem
        self.config = config
        self.tensorboard = tensorboard
        self._written = False
        self._lock: RunLock | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        # Lock the folder before reading the checkpoint in it.
        if self.stem is None and self.folder.is_dir():
            self._lock = held_by_all(self.folder, trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self._lock is not None and not self._lock.used:
            self.teardown(trainer, pl_module, "fit")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, FederatedModule)
        folder: Path | str = self._claim() if trainer.is_global_zero else ""
        self.folder = Path(trainer.strategy.broadcast(str(folder)))
        self._lock = self._lock or held_by_all(self.folder, trainer)
        self._lock.use()
        # Every later reader of the Trainer's root directory gets this folder.
        vars(trainer)["_default_root_dir"] = str(self.folder)
        first_round = trainer.current_epoch
        fresh = first_round == 0 or not (self.folder / "config.yaml").exists()
        if trainer.is_global_zero and fresh:
            self.write_config()
        loggers: list[Logger] = [MetricsCSV(self.folder)]
        if self.tensorboard:
            loggers.append(RunEvents(str(self.folder), first_round, compared_metrics(trainer)))
        trainer.loggers = [*loggers, *trainer.loggers]
        if trainer.is_global_zero:
            print(pl_module.describe(), flush=True)
            for callback in pl_module.run.methods.callbacks:
                if text := callback.announced():
                    print(text, flush=True)
            line = f"→ {self.folder}"
            if first_round and first_round != trainer.max_epochs:
                # The console counts rounds from 1.
                line += f", going on with round {first_round + 1}"
            print(line, flush=True)

    def _claim(self) -> Path:
        """Create the folder; if two runs start at once, each takes the next free one."""
        folder = self.folder
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=self.stem is None)
                return folder
            except OSError as error:
                if not isinstance(error, FileExistsError) or self.stem is None:
                    raise cannot_write(folder, error) from None
                folder = next_free(self.stem)

    def write_config(self) -> None:
        """Write config.yaml when this is called for the first time."""
        if self._written:
            return
        self._written = True
        with written_aside(self.folder / "config.yaml") as file:
            file.write(self.config.encode())


class RunCheckpoint(Checkpoint):
    """Writes ``last.ckpt`` after every round, and links it as ``best.ckpt`` when the metric
    improves.

    Args:
        run: object that knows the folder, once training starts.
        monitor: the metric; None: ``val/acc``, if the learner logs it.
        mode: the better direction, ``"max"`` or ``"min"``; None: the metric decides.
    """

    def __init__(
        self, run: RunFolderWriter, monitor: str | None = None, mode: str | None = None
    ) -> None:
        self.run = run
        self.given = monitor is not None
        self.monitor = monitor or "val/acc"
        self.directions = Directions("Give --monitor_mode", {self.monitor: mode})
        # The mode ("min" or "max") by which the best value was found.
        self.mode: str | None = None
        self.best: float | None = None
        self.best_round = -1
        self.explained = False
        self._followed = False  # whether best.ckpt has been read in this fit

    @property
    def state_key(self) -> str:
        return "RunCheckpoint"

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("monitor", "mode", "best", "best_round")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        read = {name: state_dict[name] for name in self.state_dict()}
        if read["monitor"] == self.monitor:
            vars(self).update(read)

    @property
    def folder(self) -> Path:
        return self.run.folder / "checkpoints"

    @property
    def dirpath(self) -> str:
        """Return the folder of the checkpoints, under the name that ModelCheckpoint gives it."""
        return str(self.folder)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask which direction is better, unless a torchmetrics metric of the learner may decide
        it later.
        """
        self._followed = False
        assert isinstance(pl_module, FederatedModule)
        if not trainer.ckpt_path and not pl_module.run.continues(trainer):
            # A new run has no best value yet; there may be one of a checkpoint that was refused.
            self.mode = self.best = None
            self.best_round = -1
        if self.given and not tells_mode(pl_module):
            self.directions.greater(self.monitor)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._follow(trainer)

    def on_later_rounds_dropped(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make last.ckpt the checkpoint from which this fit resumed.

        The fit's first row is about to replace the rows of later rounds. A kill before the first
        new checkpoint must not leave the last.ckpt of a round that has no row any more.
        """
        if self._resumed_own(trainer):
            self._link(trainer, Path(str(trainer.ckpt_path)), "last.ckpt")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # If no round was left, Lightning did not call `on_train_start`. A folder in which no run
        # began gets no checkpoint.
        if self._resumed_own(trainer) and not self._followed:
            self._follow(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        improved = self._improved(trainer)
        # Do what Lightning does by default in every round.
        trainer.save_checkpoint(self.folder / "last.ckpt", weights_only=False)
        if trainer.is_global_zero:
            self.run.write_config()
        if improved:
            self._link(trainer, self.folder / "last.ckpt")

    def _resumed_own(self, trainer: pl.Trainer) -> bool:
        """Return whether this fit resumed from a checkpoint of its own folder."""
        resumed = trainer.ckpt_path
        return bool(resumed) and Path(str(resumed)).resolve().parent == self.folder.resolve()

    def _follow(self, trainer: pl.Trainer) -> None:
        """Make best.ckpt the checkpoint of the best round up to the one where this fit resumes.

        A kill may have come between writing last.ckpt and linking best.ckpt. A fit that resumes
        from another checkpoint also drops the rounds after it, and best.ckpt may belong to one of
        these.
        """
        self._followed = True
        resumed = trainer.ckpt_path
        if resumed and self.best_round >= 0 and self.best_round == trainer.current_epoch - 1:
            self._link(trainer, Path(resumed))

    def _explain(self, trainer: pl.Trainer) -> None:
        """After the first validation without the metric, report why there is no best.ckpt."""
        names = sorted(name for name in trainer.callback_metrics if name.startswith("val"))
        if names and not self.explained and trainer.is_global_zero:
            self.explained = True
            self._record(trainer)
            decided = [name for name in names if self.directions.known(name) is not None]
            best = next(filter(is_accuracy, decided), decided[0] if decided else None)
            way = (
                f"--monitor {best}" if best else f"--monitor {names[0]} --monitor_mode max (or min)"
            )
            print(f"no {self.monitor} is logged, so best.ckpt is not kept; {way} would keep it")

    def _record(self, trainer: pl.Trainer) -> None:
        """Read the directions of the learner's torchmetrics."""
        assert isinstance(trainer.lightning_module, FederatedModule)
        self.directions.record(trainer.lightning_module.logged.modes_of(trainer.callback_metrics))

    def _improved(self, trainer: pl.Trainer) -> bool:
        if self.monitor not in trainer.callback_metrics:
            validated = trainer.fit_loop.epoch_loop.val_loop._has_run
            # A logger that has not measured yet may still log it.
            measuring = [c for c in vars(trainer)["callbacks"] if isinstance(c, Measurement)]
            if self.given and validated and all(c.measured for c in measuring):
                known = sorted(trainer.callback_metrics)
                raise UserError(
                    f"--monitor {self.monitor}: no metric has this name."
                    f"{suggest(self.monitor, known)} Logged so far: {', '.join(known)}."
                )
            if not self.given:
                self._explain(trainer)
            return False
        self._record(trainer)
        mode = MODES[not self.directions.greater(self.monitor)]
        # The best value under the other mode is not the best under this one.
        if mode != self.mode:
            self.mode = mode
            self.best = None
        value = float(trainer.callback_metrics[self.monitor])
        better = self.best is None or (value > self.best if mode == "max" else value < self.best)
        # NaN cannot be the best value: no value would ever beat it.
        if not better or math.isnan(value):
            return False
        self.best = value
        self.best_round = trainer.current_epoch
        return True

    def _link(self, trainer: pl.Trainer, source: Path, name: str = "best.ckpt") -> None:
        """Make the checkpoint ``name`` a link to ``source``."""
        link = self.folder / name
        aside = self.folder / f".{name}.tmp"
        if not trainer.is_global_zero or not source.is_file():
            return
        if link.exists() and link.samefile(source):
            return
        aside.unlink(missing_ok=True)
        try:
            os.link(source.resolve(), aside)
        except OSError:
            # The file system does not support hard links.
            with written_aside(link) as file, open(source, "rb") as whole:
                shutil.copyfileobj(whole, file)
            return
        aside.replace(link)
        # rename(2) does nothing if both names are links to one file.
        aside.unlink(missing_ok=True)
