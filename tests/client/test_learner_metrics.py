"""Metrics of torchmetrics in a learner, used as its documentation has it. The numbers of plain
Lightning."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from fl_lightning.callbacks import ControlVariates, SharpnessAwareMinimization
from tests.helpers.learners import Lit, as_batches, blobs, federated, trainer
from tests.helpers.processes import launched

ENGINES: list[dict[str, Any]] = [
    {"engine": "sequential"},
    *({"engine": "concurrent", "workers": k} for k in (1, 2)),
]
FOUR: dict[str, Any] = {"task": "multiclass", "num_classes": 4}


class Measured(Lit):
    """Metrics with states that are summed, averaged by weight, the largest, gathered, and merged by
    their own rule."""

    def __init__(self) -> None:
        super().__init__()
        self.own: Any = nn.ModuleDict(
            {
                "accuracy": torchmetrics.Accuracy(average="macro", **FOUR),
                "label": torchmetrics.MeanMetric(),
                "largest": torchmetrics.MaxMetric(),
                "auroc": torchmetrics.AUROC(**FOUR),
                "correlation": torchmetrics.PearsonCorrCoef(),
            }
        )

    def count(self, batch: Any, how: str) -> None:
        out, y = self.net(batch[0]).detach(), batch[1]
        first = out[:, 0]
        given = {"label": (y,), "largest": (first,), "correlation": (first, y.to(first))}
        for name, metric in self.own.items():
            getattr(metric, how)(*given.get(name, (out, y)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Called(Measured):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count(batch, "__call__")
        for name, metric in self.own.items():
            self.log(name, metric, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Updated(Measured):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count(batch, "update")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        for name, metric in self.own.items():
            self.log(name, metric.compute())
            metric.reset()


def made(learner: type[Lit]) -> Lit:
    torch.manual_seed(3)
    return learner().double()


def of_plain_lightning(learner: type[Lit]) -> dict[str, Tensor]:
    data = blobs()
    data.setup("fit")
    batches = [batch for client in range(10) for batch, _ in data.full_batches(client)]
    run = trainer(1, limit_val_batches=0)
    run.fit(made(learner), as_batches(batches))
    return {name: value for name, value in run.callback_metrics.items() if "/" not in name}


def of_a_round(
    learner: type[Lit], callbacks: Any = (), settings: Any = None, **arguments: Any
) -> dict[str, Tensor]:
    run = trainer(2, callbacks, **(settings or {}))
    run.fit(federated(made(learner), participation="all", **arguments), blobs())
    return run.callback_metrics


@pytest.mark.parametrize("arguments", ENGINES)
@pytest.mark.parametrize("learner", [Called, Updated])
def test_metrics_have_the_numbers_of_plain_lightning(
    learner: type[Lit], arguments: dict[str, Any]
) -> None:
    expected, found = of_plain_lightning(learner), of_a_round(learner, **arguments)
    assert len(expected) == 5
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].double(), value.double(), rtol=1e-5, atol=1e-6, msg=name
        )


@pytest.mark.parametrize(
    "method", [SharpnessAwareMinimization, partial(ControlVariates, "gradient")]
)
def test_gradients_that_are_no_steps_are_not_counted(method: Any) -> None:
    expected, found = of_a_round(Updated), of_a_round(Updated, [method()])
    assert all(found[name] == expected[name] for name in ("label", "accuracy", "auroc"))


def on_ranks(folder: Path, learner: type[Lit], rank: int, world: int) -> None:
    settings = {"devices": world, "strategy": "federated"} if world > 1 else {}
    found = of_a_round(learner, settings=settings, engine="sequential")
    (folder / f"{world}-{rank}.json").write_text(
        json.dumps({k: float(v) for k, v in found.items() if "/" not in k})
    )


@pytest.mark.parametrize("learner", [Updated])
def test_metrics_are_the_same_on_two_processes(learner: type[Lit], tmp_path: Path) -> None:
    for world in (1, 2):
        assert launched(on_ranks, world, tmp_path, learner) == [0] * world
    one, *two = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1")
    )
    assert len(one) > 4 and two == [pytest.approx(one, rel=1e-6)] * 2


class Best(Lit):
    """Keeps the best validation of all rounds, as lightning-hydra-template does."""

    def __init__(self) -> None:
        super().__init__()
        self.best = torchmetrics.MaxMetric()
        self.best.persistent(True)
        self.history = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=True)

    def on_validation_epoch_end(self) -> None:
        value = 1.0 / (1 + self.current_epoch)
        self.best(value)
        self.log("val/best", self.best.compute())
        self.history.increment()
        self.history.update(value)
        self.log("val/best_of_history", self.history.best_metric())


@pytest.mark.parametrize("arguments", [*ENGINES, {"engine": "stacked"}])
@pytest.mark.filterwarnings("ignore:engine='stacked'")
def test_a_metric_that_no_step_updates_goes_on_over_rounds(arguments: dict[str, Any]) -> None:
    run = trainer(3)
    run.fit(federated(Best(), participation="all", **arguments), blobs())
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    assert logged["val/best"] == logged["val/best_of_history"] == 1.0


@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
def test_a_resumed_run_goes_on_with_a_persistent_metric(engine: str, tmp_path: Path) -> None:
    run = trainer(1, default_root_dir=tmp_path)
    run.fit(federated(Best(), engine=engine), blobs())
    run.save_checkpoint(tmp_path / "run.ckpt")
    resumed = trainer(2)
    resumed.fit(federated(Best(), engine=engine), blobs(), ckpt_path=tmp_path / "run.ckpt")
    assert float(resumed.callback_metrics["val/best"]) == 1.0
