"""What each package's test asserts: the export is worth what the run said, and a resumed run ends in the same bits."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fl_lightning import FederatedModule
from fl_lightning.lightning import LOGGERS, NAMESPACE, ModelCheckpoint, pl

ROUNDS, MIDDLE = 4, 2
TABLE: list[str] = []
"""A line for each package, printed at the end (conftest.py)."""


@dataclass
class Recipe:
    """A package's learner and data, each made anew for each run, and what it measures.

    ``metric``: its name in the run. ``outside``: its value by the package's own means, from the exported file.
    ``options``: arguments of ``FederatedModule``. ``weights_only``: of ``Trainer.fit``, where checkpoints hold objects.
    """

    package: str
    learner: Callable[[], Any]
    data: Callable[[], Any]
    metric: str
    outside: Callable[[Path], float]
    options: dict[str, Any]
    weights_only: bool | None = None
    callbacks: tuple[Any, ...] = ()


class Draws(pl.Callback):
    """Keeps the random state in which the latest validation of a run began; one that ``replays`` begins in it."""

    def __init__(self, replays: Draws | None = None) -> None:
        self.state, self.replays = torch.get_rng_state(), replays

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.replays is None:
            self.state = torch.get_rng_state()
        else:
            torch.set_rng_state(self.replays.state)


def quiet_trainer(**options: Any) -> Any:
    """A Trainer for the CPU that prints and logs nothing."""
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", **silent, **options)


def fit(recipe: Recipe, folder: Path, ckpt_path: Path | None = None) -> tuple[FederatedModule, float, dict[str, Any]]:
    """All rounds, or those after a checkpoint; gives the module, its metric and copies of all weights and buffers."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    module = FederatedModule(recipe.learner(), seed=1, **recipe.options)
    every_round = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = quiet_trainer(max_epochs=ROUNDS, callbacks=[every_round, *recipe.callbacks])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, recipe.data(), ckpt_path=ckpt_path, weights_only=recipe.weights_only)
    weights = {name: value.clone() for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    return module, float(trainer.callback_metrics[recipe.metric]), weights


def check(recipe: Recipe, tmp_path: Path, rtol: float = 1e-6) -> None:
    """Run, measure the export outside, and resume from the middle in fresh objects of another random state."""
    torch.manual_seed(0)
    start = {name: value.clone() for name, value in recipe.learner().named_parameters()}
    torch.manual_seed(0)
    module, in_run, weights = fit(recipe, tmp_path / "whole")
    exported = tmp_path / "exported.ckpt"
    module.export(exported)
    outside = recipe.outside(exported)
    torch.manual_seed(99)
    _, in_resumed, again = fit(recipe, tmp_path / "resumed", tmp_path / "whole" / f"epoch={MIDDLE - 1}.ckpt")
    same = weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    what = f"{recipe.package} {version(recipe.package)} ({NAMESPACE}, {module.engine_facts['engine']})"
    numbers = f"{recipe.metric} {in_run!r} in the run, {outside!r} of the export"
    TABLE.append(f"{what}: {numbers}, resumed bits {'equal' if same else 'DIFFER'}")
    moved = [name for name, value in start.items() if name in weights and not torch.equal(value, weights[name])]
    assert moved, "nothing was trained"
    assert outside == in_run or abs(outside - in_run) <= rtol * abs(in_run), TABLE[-1]
    assert same, [name for name in weights if not torch.equal(weights[name], again[name])]
    assert in_resumed == in_run
