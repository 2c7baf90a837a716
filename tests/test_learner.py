"""Learners that cannot be honoured are refused, with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning import FederatedModule, UserError
from tests.helpers.learners import Lit, blobs, trainer


class TwoOptimizers(Lit):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


class Untrained(pl.LightningModule):
    """Without training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(20, 4)


class Configured(Lit):
    """What ``configure_optimizers`` gives, made of one optimizer and a scheduler of another."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def configure_optimizers(self) -> Any:
        optimizer, other = (torch.optim.SGD(self.parameters(), 0.1) for _ in range(2))
        return self.given(optimizer, torch.optim.lr_scheduler.StepLR(other, 1))


class OwnStep(Lit):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...


class OldLayers(Lit):
    def configure_sharded_model(self) -> None: ...


class Manual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Mixed(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].double()


class Complex(Lit):
    """With a trainable complex parameter beside real ones, or alone."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.net.requires_grad_(not alone)
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (TwoOptimizers, ["TwoOptimizers", "2 optimizers", "client_optimizer"]),
        (Untrained, ["Untrained has no training_step"]),
        (lambda: Configured(lambda o, s: ([o], [s])), ["StepLR", "built with another optimizer"]),
        (lambda: Configured(lambda o, s: (o, s)), ["Configured", "Unknown configuration"]),
        (lambda: Configured(lambda o, s: "SGD"), ["Configured", "Unknown configuration"]),
        (OwnStep, ["OwnStep", "optimizer_step", "FederatedCallback"]),
        (OldLayers, ["configure_sharded_model", "configure_model"]),
        (Manual, ["manual optimization", "training_step", "one optimizer"]),
        (Mixed, ["several dtypes", "torch.float64"]),
        (lambda: Complex(alone=False), ["phase is complex64", "torch.view_as_real"]),
        (lambda: Complex(alone=True), ["phase is complex64", "torch.view_as_real"]),
    ],
)
def test_learners_that_cannot_be_honoured_are_refused(learner: Any, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        trainer(1).fit(
            FederatedModule(learner(), participation=0.3, seed=1), blobs(dtype=torch.float32)
        )
    assert all(word in str(refused.value) for word in words), refused.value
