"""Learners that cannot be honoured are refused, with the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fl_lightning import FederatedModule, UserError
from tests.helpers.learners import Lit, blobs, trainer


class TwoOptimizers(Lit):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


class OwnStep(Lit):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...


class OldLayers(Lit):
    def configure_sharded_model(self) -> None: ...


class Manual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Lazy(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.LazyLinear(8)


class Mixed(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].double()


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (TwoOptimizers, ["TwoOptimizers", "2 optimizers", "client_optimizer"]),
        (OwnStep, ["OwnStep", "optimizer_step", "FederatedCallback"]),
        (OldLayers, ["configure_sharded_model", "configure_model"]),
        (Manual, ["manual optimization", "training_step", "one optimizer"]),
        (Lazy, ["lazy", "net.0.weight"]),
        (Mixed, ["several dtypes", "torch.float64"]),
    ],
)
def test_learners_that_cannot_be_honoured_are_refused(learner: Any, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        trainer(1).fit(
            FederatedModule(learner(), participation=0.3, seed=1), blobs(dtype=torch.float32)
        )
    assert all(word in str(refused.value) for word in words), refused.value
