"""One client with all data, one epoch a round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.utils.data import DataLoader, Sampler, TensorDataset

from fl_lightning import FederatedModule, InMemoryDataModule
from tests.helpers.learners import Normed, trainer

EPOCHS, SAMPLES, BATCH, WITHIN = 5, 43, 8, 1e-6
STEPS = 6  # of an epoch: the last batch has three samples
KEPT = {"keep_optimizer_state": True}
ROUNDS, LOCAL_STEPS = ({**KEPT, "client_scheduler": unit} for unit in ("rounds", "local_steps"))
FOUR: dict[str, Any] = {"task": "multiclass", "num_classes": 4}


class Learner(Normed):
    """With the optimizer of a case, BatchNorm, and metrics in both of torchmetrics' patterns."""

    def __init__(self, case: str) -> None:
        torch.manual_seed(7)
        super().__init__()
        self.case = case
        self.called = torchmetrics.Accuracy(average="macro", **FOUR)
        self.updated = nn.ModuleDict(
            {"auroc": torchmetrics.AUROC(**FOUR), "mean": torchmetrics.MeanMetric()}
        )
        self.validated = torchmetrics.Accuracy(**FOUR)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y)
        self.called(out.detach(), y)
        self.log("called", self.called, on_step=False, on_epoch=True)
        self.updated["auroc"].update(out.detach(), y)
        self.updated["mean"].update(loss.detach(), weight=len(y))
        return loss

    def on_train_epoch_end(self) -> None:
        for name, metric in self.updated.items():
            self.log(name, metric.compute())
            metric.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated(self.net(batch[0]), batch[1])
        self.log("val/validated", self.validated)
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return CASES[self.case][0](self.parameters())


def momentum(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def scheduled(
    optimizer: Any, scheduler: Any, interval: str, frequency: int = 1, **arguments: Any
) -> Any:
    def configured(parameters: Any) -> Any:
        made = optimizer(parameters)
        told = {"scheduler": scheduler(made, **arguments)}
        told |= {"interval": interval, "frequency": frequency}
        return {"optimizer": made, "lr_scheduler": told}

    return configured


# by steps: schedules whose period is an epoch, since each round begins with the schedule's first
# step
CASES: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "sgd": (lambda p: SGD(p, lr=0.1, weight_decay=1e-3), {}),
    "momentum": (momentum, KEPT),
    "adam": (lambda p: Adam(p, lr=0.01, weight_decay=1e-3), KEPT),
    "decayed": (scheduled(momentum, lr_scheduler.ExponentialLR, "epoch", gamma=0.5), ROUNDS),
    "every second epoch": (
        scheduled(Adam, lr_scheduler.ExponentialLR, "epoch", 2, gamma=0.5),
        ROUNDS,
    ),
    "one cycle": (
        scheduled(momentum, lr_scheduler.OneCycleLR, "epoch", max_lr=0.1, total_steps=EPOCHS + 1),
        ROUNDS,
    ),
    "restarts": (
        scheduled(Adam, lr_scheduler.CosineAnnealingWarmRestarts, "step", T_0=STEPS),
        LOCAL_STEPS,
    ),
}


class OrderOfRun(Sampler[int]):
    """A client's samples in the order of its run; Lightning says which epoch it is."""

    def __init__(self, data: InMemoryDataModule) -> None:
        self.data, self.epoch = data, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from self.data.client_indices(0)[self.data.order(0, self.epoch, 0)].tolist()

    def __len__(self) -> int:
        return len(self.data.client_indices(0))


class Recorded(pl.Callback):
    """After each epoch: weights and buffers, and what callbacks can monitor."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.states.append(
            {name: value.detach().clone() for name, value in pl_module.state_dict().items()}
        )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.keep(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        # what is logged at an epoch's end is there once all of its hooks have run
        if trainer.current_epoch > 0:
            self.keep(trainer)

    def keep(self, trainer: Any) -> None:
        self.metrics.append(
            {name: float(value) for name, value in trainer.callback_metrics.items()}
        )


@cache
def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(0, 4, (SAMPLES,), generator=generator)
    centres, noise = (
        torch.randn(n, 20, generator=generator, dtype=torch.float64) for n in (4, SAMPLES)
    )
    return centres[y] + noise, y


@cache
def split() -> InMemoryDataModule:
    data = InMemoryDataModule(samples(), test=samples(), num_clients=1, batch_size=BATCH, seed=3)
    data.setup()
    return data


@cache
def of_plain_lightning(name: str) -> Recorded:
    recorded, whole = Recorded(), TensorDataset(*samples())
    ordered = DataLoader(whole, batch_size=BATCH, sampler=OrderOfRun(split()))
    trainer(EPOCHS, [recorded]).fit(
        Learner(name).double(), ordered, DataLoader(whole, batch_size=SAMPLES)
    )
    return recorded


@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
@pytest.mark.parametrize("name", CASES)
def test_every_epoch_is_plain_lightnings(name: str, engine: str) -> None:
    plain, found, given = of_plain_lightning(name), Recorded(), {"engine": engine, **CASES[name][1]}
    module = FederatedModule(
        Learner(name).double(), participation="all", local_epochs=1, seed=9, **given
    )
    trainer(EPOCHS, [found]).fit(module, split())
    assert module.engine_facts["engine"] == engine
    kept = (plain.states, found.states, plain.metrics, found.metrics)
    assert {len(each) for each in kept} == {EPOCHS}
    for epoch, (theirs, ours) in enumerate(zip(plain.states, found.states, strict=True)):
        assert theirs.keys() == ours.keys() and "net.1.running_var" in theirs
        for tensor, value in theirs.items():
            difference = float((ours[tensor] - value).abs().max())
            assert difference <= WITHIN, f"{tensor} after epoch {epoch}: {difference}"
    for theirs_, ours_ in zip(plain.metrics, found.metrics, strict=True):
        assert theirs_.keys() == {"called", "auroc", "mean", "val/validated", "val/acc", "val/loss"}
        mine = {metric: ours_[metric] for metric in theirs_}
        assert mine == pytest.approx(theirs_, rel=0, abs=WITHIN)
