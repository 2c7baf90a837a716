"""A folder for a run from Python, like the one that the command line gives to each of its runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fl_lightning.callbacks.loggers.run_card import RunCard
from fl_lightning.errors import UserError
from fl_lightning.lab.cli import run_folder
from fl_lightning.lab.cli.python_config import PythonConfig
from fl_lightning.lab.cli.run_record import RunRecord
from fl_lightning.machine.lightning import Checkpoint, pl
from fl_lightning.metrics import check_mode


class RunFolder(Checkpoint):
    """Gives a run from Python a folder, which ``report``, ``load`` and ``cite`` read.

    The folder holds what ``fl-lightning fit`` writes: ``run.json``, ``metrics.csv``, ``card.md``,
    ``partition.png``, ``checkpoints/last.ckpt`` and ``best.ckpt``, ``state/`` and ``config.yaml``.
    The config holds the settings that can be read from the objects. Tensors, lambdas and classes of
    a script cannot be in it: ``config.yaml`` and ``run.json`` (``unknown``) name the missing
    settings.

    Args:
        folder: the run's folder, such as ``"runs/mine"``; it may not hold another run.
        arm: the name of this setting in reports; None: the run's title. Two runs of one arm may
            differ only in their seeds.
        monitor: the metric of ``best.ckpt``; None: ``val/acc``, if the learner logs it.
        mode: the better direction, ``"max"`` or ``"min"``; None: the metric decides.

    Raises:
        UserError: when a fit begins, if the folder holds a run that this fit does not resume.

    Example:
        >>> from fl_lightning import RunFolder
        >>> RunFolder("runs/mine").last is None  # nothing is there to go on from
        True
    """

    # The module reads this attribute, and then does not claim a folder itself.
    claims_folder = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        arm: str | None = None,
        monitor: str | None = None,
        mode: str | None = None,
    ) -> None:
        check_mode("RunFolder: mode", mode)
        self.folder = Path(folder)
        self.arm = arm
        writer = run_folder.RunFolderWriter(self.folder, None, "", tensorboard=False)
        self._checkpoint = run_folder.RunCheckpoint(writer, monitor, mode)
        # The other callbacks of a run, which a fit adds to those of its Trainer.
        self._parts: list[pl.Callback] = []
        self._begun: tuple[object, object] = (None, None)  # the Trainer and module of a fit here

    @property
    def last(self) -> str | None:
        """Return the checkpoint to resume from: ``trainer.fit(…, ckpt_path=folder.last)``;
        None: the folder has no checkpoint.
        """
        path = self.folder / "checkpoints" / "last.ckpt"
        return str(path) if path.is_file() else None

    @property
    def dirpath(self) -> str:
        return self._checkpoint.dirpath

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if sum(isinstance(each, RunFolder) for each in vars(trainer)["callbacks"]) > 1:
            raise UserError("callbacks: a run has one folder. Give the Trainer a single RunFolder.")
        callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # Lightning does not declare it
        for part in self._parts:
            # Those of an earlier fit by this Trainer.
            if part in callbacks:
                callbacks.remove(part)
        # Lightning warns of a checkpoint whose callbacks are not there.
        self._parts = [] if stage == "fit" else [self._checkpoint]
        callbacks.extend(self._parts)
        if stage != "fit" or not _writes(trainer):
            return
        run_folder.check_writable(self.folder, "RunFolder")
        # Every later reader of the Trainer's root directory gets this folder.
        vars(trainer)["_default_root_dir"] = str(self.folder)
        # The arguments of a notebook's process were not typed by the user.
        typed = ["python", *sys.argv] if sys.argv[0].endswith(".py") else []
        writer = run_folder.RunFolderWriter(self.folder, None, "", tensorboard=False)
        self._checkpoint.run = writer
        cards = [] if any(isinstance(each, RunCard) for each in callbacks) else [RunCard()]
        record = RunRecord("", typed, self.arm, unknown=[], writer=writer)
        self._parts = [writer, *cards, self._checkpoint, record]
        # Lightning calls their `setup` too, as it comes to them.
        callbacks.extend(self._parts)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        begun, module = self._begun
        if _writes(trainer) and not (begun is trainer and module is pl_module):
            way = f"trainer.fit(…, ckpt_path=RunFolder({str(self.folder)!r}).last)"
            run_folder.refuse_other_run("RunFolder", self.folder, trainer.ckpt_path, way)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not _writes(trainer):
            return
        config = PythonConfig(trainer, pl_module, str(self.folder))
        for part in self._parts:
            if isinstance(part, run_folder.RunFolderWriter | RunRecord):
                part.config = config.text
            if isinstance(part, RunRecord):
                part.unknown = config.unknown
        # Remove the logger of an earlier fit by the same Trainer.
        path = self.folder / "metrics.csv"
        trainer.loggers = [each for each in trainer.loggers if getattr(each, "path", 0) != path]
        self._begun = (trainer, pl_module)


def _writes(trainer: pl.Trainer) -> bool:
    """Return whether this is more than a trial run."""
    return not vars(trainer).get("fast_dev_run")
