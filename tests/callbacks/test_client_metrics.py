"""Clients measured by the learner's torchmetrics: what is left out, and what is no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_lightning import callbacks as c
from tests.callbacks.test_per_client_evaluation import data, run
from tests.helpers.learners import Lit, federated, trainer


class Shared(Lit):
    """One metric in both steps, which measure different things."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.update(100.0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.update(1.0)
        self.log("val/seen_loss", self.seen)


def test_what_the_training_step_puts_into_a_shared_metric_is_not_measured() -> None:
    measured = c.PerClientEvaluation()
    trainer(1, [measured]).fit(federated(Shared()), data())
    assert set(measured.table["seen_loss"].values()) == {1.0}


def clients_with(module: Any, fits: Callable[[Tensor], Any]) -> set[int]:
    """The clients whose test samples fit; the samples of class 0 are the positives."""
    data = module.trainer.datamodule
    y = data._given_sets["train"][1]
    found = {i for i in range(10) if fits(y[data.client_test_indices(i)] == 0)}
    assert 1 < len(found) < 9
    return found


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    ("task", "thresholds"), [("binary", None), ("binary", 50), ("multi", None)]
)
@pytest.mark.filterwarnings("ignore:No positive samples")
def test_an_auroc_of_one_class_is_no_value(by_hand: bool, task: str, thresholds: Any) -> None:
    """torchmetrics returns 0 for it, which would count as the worst possible ranking."""

    class Binary(Lit):
        def __init__(self) -> None:
            super().__init__()
            kind = "multiclass" if task == "multi" else "binary"
            self.auroc = torchmetrics.AUROC(kind, thresholds, num_classes=2)
            self.hits = torchmetrics.Accuracy("binary")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            scores, y = self.net(batch[0])[:, 0], (batch[1] == 0).long()
            self.log("val/loss", cross_entropy(self.net(batch[0]), batch[1]))
            pairs = torch.stack([-scores, scores], 1).softmax(1)
            self.auroc.update(pairs if task == "multi" else scores, y)
            self.hits.update(scores, y)
            self.log("val/acc", self.hits)
            if not by_hand:
                self.log("val/auroc", self.auroc)

        def on_validation_epoch_end(self) -> None:
            if by_hand:
                self.log("val/auroc", self.auroc.compute())
                self.auroc.reset()

    with pytest.warns(UserWarning, match="clients have no value of auroc"):
        module = run(seen := c.PerClientEvaluation(1), learner=Binary, rounds=1)
    both = clients_with(module, lambda positive: len(positive.unique()) == 2)
    assert seen.table["auroc"].keys() == both
    assert len(seen.table["acc"]) == 9


@pytest.mark.parametrize("thresholds", [None, 50])
@pytest.mark.parametrize("task", ["binary", "multilabel"])
@pytest.mark.filterwarnings("ignore:No positive samples")
def test_an_average_precision_without_positives_is_no_value(task: Any, thresholds: Any) -> None:
    """torchmetrics returns 0 for it; without negatives it is 1, which is a value."""

    class Precise(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.ap = torchmetrics.AveragePrecision(task, thresholds, num_labels=2)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            scores, y = self.net(batch[0])[:, 0].sigmoid(), (batch[1] == 0).long()
            both = (torch.stack([scores, scores], 1), torch.stack([y, torch.zeros_like(y)], 1))
            self.ap.update(*((scores, y) if task == "binary" else both))
            self.log("val/ap", self.ap)

    with pytest.warns(UserWarning, match="clients have no value of ap"):
        module = run(seen := c.PerClientEvaluation(1), learner=Precise, rounds=1)
    positive = clients_with(module, torch.any)
    assert seen.table["ap"].keys() == positive
