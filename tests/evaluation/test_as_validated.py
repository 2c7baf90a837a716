"""A client's own evaluation is what ``Trainer.validate`` would give on its samples alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from fl_lightning import InMemoryDataModule
from fl_lightning.callbacks import PerClientEvaluation
from tests.helpers.learners import Lit, federated, trainer

SIZE = 4  # of a batch in evaluation, so that a client has several


class Swapping(Lit):
    """Validates with weights of its own, plain tensors, and puts the trained ones back."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(5)
        self.kept = [0.3 * torch.randn(p.shape, generator=drawn) for p in self.parameters()]

    def swap(self) -> None:
        for p, own in zip(self.net.parameters(), self.kept, strict=True):
            p.data, own.data = own.data.to(p), p.data.clone()

    def on_validation_start(self) -> None:
        self.swap()

    def on_validation_end(self) -> None:
        self.swap()


class MovingAverage(Lit):
    """An average of its weights in a second network, which is in place during validation."""

    def __init__(self) -> None:
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("moved", torch.zeros(()))

    def on_train_epoch_start(self) -> None:
        for own, p in zip(self.average.parameters(), self.net.parameters(), strict=True):
            own.lerp_(p.detach(), 0.4)

    def on_validation_epoch_start(self) -> None:
        self.net, self.average = self.average, self.net

    def on_validation_epoch_end(self) -> None:
        self.net, self.average = self.average, self.net


class Counting(Lit):
    """Counts over an epoch's batches, and logs the share at its end."""

    def on_validation_epoch_start(self) -> None:
        self.right = self.seen = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.right += int((self.net(x).argmax(1) == y).sum())
        self.seen += len(y)

    def on_validation_epoch_end(self) -> None:
        self.log("val/acc", self.right / self.seen)
        self.log("val/batches_loss", float(self.seen), reduce_fx="sum")


class Reducing(Lit):
    """Each reduction, and a batch size of its own."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        losses = cross_entropy(self.net(x), y, reduction="none")
        self.log("val/sum_loss", losses.sum(), reduce_fx="sum")
        self.log("val/min_loss", losses.min(), reduce_fx="min")
        self.log("val/max_loss", losses.max(), reduce_fx=torch.max)
        self.log("val/mean_loss", losses.mean(), reduce_fx="mean")
        self.log("val/own_loss", losses.mean(), batch_size=batch_idx + 1)
        self.log_dict({"val/both_loss": losses.sum()}, on_step=True, on_epoch=True)


class Rated(Lit):
    """Metrics of torchmetrics, logged in steps."""

    def __init__(self) -> None:
        super().__init__()
        self.acc = MulticlassAccuracy(4)
        precision = torchmetrics.Precision("multiclass", num_classes=4)
        pair = {"val/f1": MulticlassF1Score(4), "val/precision": precision}
        self.rated = torchmetrics.MetricCollection(pair)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.net(batch[0])
        self.acc(out, batch[1])
        self.rated.update(out, batch[1])
        self.log("val/acc", self.acc)
        self.log_dict(self.rated)


class Looking(Lit):
    """Logs what its Trainer and its modules say of themselves, and moves a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.net[1].train()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.seen += len(batch[1])
        told = self.trainer
        stage = told.state.stage.value
        self.log("val/told_loss", float(told.validating) + 2 * float(told.training))
        self.log("val/stage_loss", float(stage == "validate") + 2 * float(told.evaluating))
        self.log("val/batches_loss", float(told.num_val_batches[0]))
        self.log("val/modes_loss", float(self.training) + 2 * float(self.net[1].training))
        self.log("val/seen_loss", self.seen, reduce_fx="max")


class Preparing(Lit):
    """Has a transfer hook, and draws nothing."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0] * 0.5, batch[1])


LEARNERS = [Lit, Swapping, MovingAverage, Counting, Reducing, Rated, Looking, Preparing]


def data() -> Any:
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 20, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 4, (200,), generator=draw)
    x = centres[y] + torch.randn(len(y), 20, generator=draw, dtype=torch.float64)
    own = [np.arange(i * 40, (i + 1) * 40 - 3 * i) for i in range(5)]
    return InMemoryDataModule(
        (x, y), clients=own, batch_size=8, client_test_fraction=0.3, eval_batch_size=SIZE, seed=7
    )


def loader_of(federation: Any, indices: Any) -> Any:
    x, y = federation._given_sets["train"]
    return DataLoader(TensorDataset(x[indices], y[indices]), batch_size=SIZE)


def by_lightning(module: Any, federation: Any, client: int) -> dict[str, float]:
    """What plain Lightning gives for the client's model on its own test samples."""
    loader = loader_of(federation, federation.client_test_indices(client))
    (values,) = trainer(1).validate(module.export(client=client), loader, verbose=False)
    return {name.removeprefix("val/").removesuffix("_epoch"): v for name, v in values.items()}


@pytest.mark.parametrize("learner", LEARNERS, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_client_is_measured_as_lightning_validates_it(learner: type[Lit]) -> None:
    federation = data()
    module = federated(learner(), engine="sequential")
    seen = PerClientEvaluation(modes={"f1": "max", "precision": "max"})
    trainer(2, [seen]).fit(module, federation)
    for client in range(5):
        expected = by_lightning(module, federation, client)
        measured = {name: column[client] for name, column in seen.table.items()}
        if "loss" not in expected:
            measured.pop("loss")  # where validation logs none, it is the training step's
        assert measured == pytest.approx(expected, rel=1e-6, abs=1e-9), client


def test_the_copy_comes_out_of_it_as_it_went_in() -> None:
    """Two measurements in one run, and the run itself, know nothing of each other."""
    modules = []
    for measured in ([], [PerClientEvaluation(1)]):
        torch.manual_seed(0)
        modules.append(federated(Swapping(), engine="sequential"))
        trainer(2, measured).fit(modules[-1], data())
    plain, module = modules
    assert torch.equal(plain.global_vector, module.global_vector)
    for ours, theirs in zip(module.learner.kept, plain.learner.kept, strict=True):
        assert torch.equal(ours, theirs)
    assert isinstance(module.learner.net, nn.Sequential)
