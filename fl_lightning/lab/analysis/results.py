"""Reading a run's folder in a notebook: ``fl_lightning.load("runs/x")``."""

from __future__ import annotations

import logging
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.checkpoint import load_buffers
from fl_lightning.errors import UserError, suggest
from fl_lightning.evaluation.personal_models import check_partition, split_by_run
from fl_lightning.introspection.init_args import made
from fl_lightning.lab.cli.cli import CommandCLI
from fl_lightning.lab.cli.compose import prepare
from fl_lightning.lab.cli.compose import read as read_config
from fl_lightning.machine.lightning import LOGGERS, isolate_rng, pl
from fl_lightning.metrics import Metrics, read_modes, read_record
from fl_lightning.storage import site_journal
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO
from fl_lightning.storage.client_store import ClientStore
from fl_lightning.storage.rows_on_disk import KEY

# A run's folder has at least one of these; the last one is in the folder of a site's run.
OF_A_RUN = ("run.json", "config.yaml", "metrics.csv", "checkpoints", site_journal.JOURNAL)


class Run:
    """A run's folder; each part is read when it is first used.

    Args:
        checkpoint: the checkpoint to read; None: the last one, or the best if the last is missing.
        learner: learner that gets the weights, instead of the one that config.yaml describes.
        data: data module to use, instead of the one that config.yaml describes.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        checkpoint: Path | None = None,
        learner: pl.LightningModule | None = None,
        data: Any = None,
    ) -> None:
        self.folder = Path(folder)
        self._asked_for = checkpoint
        self._learner = learner
        self._data = data
        if not any((self.folder / name).exists() for name in OF_A_RUN):
            raise UserError(
                f"load({str(folder)!r}): this is not a run's folder. `fl-lightning fit` creates "
                "one. In Python, give the Trainer the callback RunFolder('runs/mine')."
            )

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @cached_property
    def metrics(self) -> Metrics:
        """Return the metrics that were logged, one row per round."""
        modes = read_modes(read_record(self.folder).get("modes"))
        return Metrics.read(self.folder / "metrics.csv", modes)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return config.yaml, as nested dicts."""
        return read_config(str(self.folder / "config.yaml"))

    @cached_property
    def checkpoint(self) -> dict[str, Any]:
        """Return the last checkpoint, or the best if there is no last one; it is verified."""
        return AtomicCheckpointIO().load_checkpoint(self.checkpoint_path)

    @property
    def checkpoint_path(self) -> Path:
        """Return the path of the checkpoint, whether it exists or not."""
        if self._asked_for is not None:
            return self._asked_for
        paths = [self.folder / "checkpoints" / name for name in ("last.ckpt", "best.ckpt")]
        return next((path for path in paths if path.is_file()), paths[0])

    @cached_property
    def _store(self) -> ClientStore:
        if (self.folder / site_journal.JOURNAL).is_file():
            return site_journal.latest(self.folder)
        held = self.checkpoint.get(KEY, {})
        folders = [self.checkpoint_path.parent / folder for folder in held.get("folders", ())]
        folders.append(self.folder / "state")
        store = ClientStore()
        store.load(held.get("clients", {}), next((f for f in folders if f.is_dir()), folders[0]))
        return store

    def client_state(self, name: str, client: int) -> Tensor | None:
        """Return the client's row of ``"ClassName.name"`` at the last checkpoint.

        None if the client has not taken part yet. In a site's folder: the row after the client's
        last round.

        Raises:
            UserError: no client has a row of that name.
        """
        names = [n for n in self._store.names() if not n.startswith(site_journal.STAGED)]
        if name not in names:
            raise UserError(
                f"client_state({name!r}): {self.folder} has no such state.{suggest(name, names)} "
                f"There are: {', '.join(names) or 'none'}."
            )
        row = self._store.read(name, client)
        return None if row is None else row.clone()

    @cached_property
    def learner(self) -> pl.LightningModule:
        """Return the learner at the last checkpoint's global weights, on the CPU, in evaluation
        mode.
        """
        learner = self._learner
        if learner is None:
            self._check_known("model.learner", "learner")
            learner = self._made_learner()
        learner.configure_model()
        learner.load_state_dict(self.checkpoint["state_dict"], strict=learner.strict_loading)
        load_buffers(learner, self.checkpoint)
        learner.eval()
        return learner

    @cached_property
    def partition(self) -> list[Any]:
        """Return the indices of the training samples of each client."""
        return [self.data.client_indices(client) for client in range(self.data.num_clients)]

    @cached_property
    def data(self) -> Any:
        """Return the run's data module, set up and split as in the run."""
        data = self._data
        if data is None:
            self._check_known("data", "data")
            data = self.built.datamodule
        split_by_run(data, self.checkpoint)
        data.setup("fit")
        check_partition(data, self.checkpoint, f"load({str(self.folder)!r})")
        return data

    def _made_learner(self) -> pl.LightningModule:
        """Return the learner that config.yaml describes; the data may be unknown."""
        learner: pl.LightningModule
        if "unknown" in read_record(self.folder):
            learner = made(self.config["model"]["learner"])
        else:
            learner = self.built.model.learner
        return learner

    def _check_known(self, key: str, argument: str) -> None:
        """Refuse to read a setting that is missing in config.yaml of a run from Python."""
        unknown = read_record(self.folder).get("unknown")
        lacking = [str(path) for path in unknown if str(path).startswith(key)] if unknown else []
        if lacking:
            raise UserError(
                f"load({str(self.folder)!r}): this run was made in Python, and its config.yaml "
                f"lacks {', '.join(lacking)}. Give the object: "
                f"load({str(self.folder)!r}, {argument}=…)."
            )

    @cached_property
    def built(self) -> CommandCLI:
        """Return learner and data as config.yaml describes them."""
        # The command line seeds the process. Restore these variables, so that a notebook keeps its
        # own.
        seeds = {key: os.environ.get(key) for key in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
        # Hide the messages about seeds and devices, which do not matter here.
        loggers = [logging.getLogger(name) for name in LOGGERS]
        levels = [logger.level for logger in loggers]
        with isolate_rng():
            try:
                for logger in loggers:
                    logger.setLevel(logging.WARNING)
                return CommandCLI("export", prepare("export", [str(self.folder)]))
            finally:
                for logger, level in zip(loggers, levels, strict=True):
                    logger.setLevel(level)
                for key, value in seeds.items():
                    os.environ.pop(key, None)
                    if value is not None:
                        os.environ[key] = value


def load(
    folder: str | os.PathLike[str], learner: pl.LightningModule | None = None, data: Any = None
) -> Run:
    """Return the run in ``folder``, with its learner, metrics, config, partition and client states.

    ``learner`` and ``data``: objects that replace those of config.yaml, for a run from Python whose
    config lacks them. The learner gets the run's weights.
    """
    return Run(folder, learner=learner, data=data)
