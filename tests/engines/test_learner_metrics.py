"""Metrics of torchmetrics in a learner, used as its documentation has it.

The numbers of plain Lightning.
"""

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


class Collected(Measured):
    """By a collection, whose metrics share their states."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {
            k.__name__: k(average="macro", **FOUR)
            for k in (torchmetrics.Precision, torchmetrics.Recall)
        }
        self.own = torchmetrics.MetricCollection(kinds)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.own.update(self.net(batch[0]).detach(), batch[1])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log_dict(self.own.compute())
        self.own.reset()


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
@pytest.mark.parametrize("learner", [Called, Updated, Collected])
def test_metrics_have_the_numbers_of_plain_lightning(
    learner: type[Lit], arguments: dict[str, Any]
) -> None:
    expected, found = of_plain_lightning(learner), of_a_round(learner, **arguments)
    assert len(expected) == (2 if learner is Collected else 5)
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


class Shared(Lit):
    """One metric for all its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(**FOUR)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.accuracy(self.net(batch[0]).detach(), batch[1])
        self.log("train/acc", self.accuracy)
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("test/acc", self.accuracy)


def test_what_steps_logged_is_in_no_later_test() -> None:
    module, data = federated(Shared()), blobs()
    run = trainer(1, limit_val_batches=0)
    run.fit(module, data)
    (after_fit,) = run.test(module, data, verbose=False)
    (again,) = run.test(module, data, verbose=False)
    assert after_fit == again


def on_ranks(folder: Path, learner: type[Lit], rank: int, world: int) -> None:
    settings = {"devices": world, "strategy": "federated"} if world > 1 else {}
    found = of_a_round(learner, settings=settings, engine="sequential")
    (folder / f"{world}-{rank}.json").write_text(
        json.dumps({k: float(v) for k, v in found.items() if "/" not in k})
    )


@pytest.mark.parametrize("learner", [Called, Updated])
def test_metrics_are_the_same_on_two_processes(learner: type[Lit], tmp_path: Path) -> None:
    for world in (1, 2):
        assert launched(on_ranks, world, tmp_path, learner) == [0] * world
    one, *two = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1")
    )
    assert len(one) > 4 and two == [pytest.approx(one, rel=1e-6)] * 2
