"""A run opened for analysis: its evaluated model, its clients' data, and an evaluator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.checkpoint import load_buffers
from fl_lightning.client.forward_pass import conversion, forward_context
from fl_lightning.engines.engine_plan import EnginePlan
from fl_lightning.evaluation.evaluator import Evaluator, Samples, drawn
from fl_lightning.lab.analysis.results import Run
from fl_lightning.lab.cli.compose import config_of_run
from fl_lightning.learner.layout import Layout, flatten, trainable
from fl_lightning.learner.modules import lightning_modules
from fl_lightning.machine.device_memory import prepare_process
from fl_lightning.storage.rows_on_disk import KEY


@dataclass(frozen=True)
class Opened:
    """The model of a run's checkpoint.

    Args:
        folder: the run's.
        checkpoint: the file.
        rounds: number of rounds of this model.
        seed: the run's seed.
        learner: the learner with the evaluated weights.
        data: the run's.
        trainer: Trainer from the run's config, which is never used to fit.
        as_buffers: frozen parameters that the learner's steps write, by name.
    """

    folder: Path
    checkpoint: Path
    rounds: int
    seed: int
    learner: Any
    data: Any
    trainer: Any
    as_buffers: tuple[str, ...] = ()

    @cached_property
    def layout(self) -> Layout:
        return Layout(self.learner)

    @cached_property
    def vector(self) -> Tensor:
        """The evaluated weights ``(D,)``."""
        return flatten([p.detach() for _, p in trainable(self.learner)])

    def samples(self, number: int | None, purpose: str) -> Samples:
        """Return so many of the clients' samples (None: all), as a run's loggers draw them."""
        return drawn(self.data, number, self.seed, purpose)

    def evaluator(self, exact: bool) -> Evaluator:
        """Return an evaluator of the learner on the data.

        ``exact``: in full precision, else in the run's precision.
        """
        device = self.trainer.strategy.root_device
        convert = conversion(self.trainer, self.learner, self.data)
        context = torch.enable_grad if exact else forward_context(self.trainer, device)
        return Evaluator(
            self.learner, self.layout, self.data, self.seed, context, convert, self.as_buffers
        )


def opened(path: Path) -> Opened:
    """Open the run in a folder at its last checkpoint, or the run to which the checkpoint ``path``
    belongs.

    Raises:
        UserError: ``path`` is neither, or the run has no checkpoint yet.
    """
    folder = path
    if path.is_file():
        # A checkpoint may lie in a subfolder of its run's.
        above = path.absolute().parents
        with_config = [place for place in above if (place / "config.yaml").is_file()]
        folder = [*with_config, path.parent][0]
    config_of_run("analyse", folder)
    run = Run(folder, path if path.is_file() else None)
    held = run.checkpoint.get(KEY, {})
    plan = EnginePlan.from_dict(held.get("engine"))
    built = run.built
    device = built.trainer.strategy.root_device
    prepare_process(device)
    learner: Any = built.trainer.precision_plugin.convert_module(run.learner).to(device)
    # The network was converted to float64 after its weights were loaded. Load them again, in full
    # precision.
    if built.trainer.precision == "64-true":
        learner.load_state_dict(run.checkpoint["state_dict"], strict=learner.strict_loading)
        load_buffers(learner, run.checkpoint)
    # The learner's hooks may read their Trainer.
    for part in lightning_modules(learner):
        part._trainer = built.trainer
    return Opened(
        folder,
        run.checkpoint_path,
        held.get("rounds", 0),
        held.get("seed", 0),
        learner,
        run.data,
        built.trainer,
        () if plan is None else plan.as_buffers,
    )
