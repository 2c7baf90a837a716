"""What each package's test asserts.

The export is worth what the run said, and a resumed run ends in the same bits.
"""

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
from fl_lightning.machine.lightning import LOGGERS, NAMESPACE, ModelCheckpoint, pl

ROUNDS, MIDDLE = 4, 2
TABLE: list[str] = []
"""A line for each package, printed at the end (conftest.py)."""


@dataclass
class Recipe:
    """A package's learner and data, each made anew for each run, and what it measures.

    ``metric``: its name in the run. ``outside``: its value by the package's own means, from the
    exported file. ``options``: arguments of ``FederatedModule``. ``weights_only``: of
    ``Trainer.fit``, where checkpoints hold objects.
    """

    package: str
    learner: Callable[[], Any]
    data: Callable[[], Any]
    metric: str
    outside: Callable[[Path], float]
    options: dict[str, Any]
    case: str = ""
    weights_only: bool | None = None
    callbacks: tuple[Any, ...] = ()


class Draws(pl.Callback):
    """Keeps the random state in which the latest validation of a run began.

    One that ``replays`` begins in it.
    """

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


def fit(
    recipe: Recipe, folder: Path, ckpt_path: Path | None = None
) -> tuple[FederatedModule, float, dict[str, Any]]:
    """All rounds, or those after a checkpoint.

    Gives the module, its metric and copies of all weights and buffers.
    """
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    module = FederatedModule(recipe.learner(), seed=1, **recipe.options)
    every_round = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = quiet_trainer(max_epochs=ROUNDS, callbacks=[every_round, *recipe.callbacks])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, recipe.data(), ckpt_path=ckpt_path, weights_only=recipe.weights_only)
    weights = {
        name: value.clone()
        for name, value in module.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    return module, float(trainer.callback_metrics[recipe.metric]), weights


def check(recipe: Recipe, tmp_path: Path, rtol: float = 1e-6) -> None:
    """Run, measure the export outside, and resume from the middle in fresh objects of another
    random state."""
    torch.manual_seed(0)
    FederatedModule(recipe.learner()).export(tmp_path / "untrained.ckpt")
    untrained = recipe.outside(tmp_path / "untrained.ckpt")
    torch.manual_seed(0)
    module, in_run, weights = fit(recipe, tmp_path / "whole")
    exported = tmp_path / "exported.ckpt"
    module.export(exported)
    outside = recipe.outside(exported)
    torch.manual_seed(99)
    _, in_resumed, again = fit(
        recipe, tmp_path / "resumed", tmp_path / "whole" / f"epoch={MIDDLE - 1}.ckpt"
    )
    same = weights.keys() == again.keys() and all(
        torch.equal(weights[name], again[name]) for name in weights
    )
    facts = filter(None, (NAMESPACE, module.engine_facts["engine"], recipe.case))
    what = f"{recipe.package} {version(recipe.package)} ({', '.join(facts)})"
    numbers = (
        f"{recipe.metric} {untrained:.6g} untrained, {in_run:.6g} in the run, {outside:.6g} "
        "of the export"
    )
    TABLE.append(f"{what}: {numbers}, resumed bits {'equal' if same else 'DIFFER'}")
    assert abs(untrained - in_run) > 100 * rtol * abs(in_run), (
        f"the metric does not see the training: {TABLE[-1]}"
    )
    assert abs(outside - in_run) <= rtol * abs(in_run), TABLE[-1]
    assert same, [name for name in weights if not torch.equal(weights[name], again[name])]
    assert in_resumed == in_run
