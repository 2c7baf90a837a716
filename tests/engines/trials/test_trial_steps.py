"""What the first step on a copy meets ends the run before round 0, with the learner's own error."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import FederatedCallback, FederatedModule
from fl_lightning.errors import UserError
from fl_lightning.models import MLP, ImageClassifier, LeNet
from tests.helpers.learners import Lit, blobs, federated, trainer

ENGINES = ("auto", "sequential", "concurrent", "stacked")


class Begun(FederatedCallback):
    rounds = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.rounds += 1


class Broken(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Linear(9, 4)


class Classes(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Linear(8, 2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("learner", [Broken, Classes])
def test_a_step_that_fails_ends_the_run_before_it_begins(engine: str, learner: type[Lit]) -> None:
    begun = Begun()
    with pytest.raises(
        (RuntimeError, IndexError), match=r"shapes cannot be multiplied|out of bounds"
    ) as caught:
        trainer(1, [begun]).fit(federated(learner(), engine=engine), blobs())
    if sys.version_info >= (3, 11):  # before, errors have no notes
        notes = " ".join(caught.value.__notes__)
        assert "nothing was started" in notes and "(8, 20) float64" in notes and "client" in notes
    assert begun.rounds == 0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("network", "what"),
    [
        (lambda: MLP([21, 8, 4]), "multiplied"),
        (lambda: MLP([20, 8, 2]), "out of bounds"),
        (lambda: LeNet(4), "shape|size|dim"),
    ],
)
def test_a_packaged_network_that_does_not_fit_is_a_paragraph(
    engine: str, network: Any, what: str
) -> None:
    module = FederatedModule(ImageClassifier(network().double(), 4).double(), seed=1, engine=engine)
    with pytest.raises(
        UserError,
        match=rf"does not fit the data: a step on client \d.*({what}).*Nothing was started",
    ):
        trainer(1).fit(module, blobs())


def test_a_learner_that_hooks_make_ready_later_is_given_its_time() -> None:
    class Readied(Lit):
        factor: Any = None

        def on_train_epoch_start(self) -> None:
            self.factor = 0.5

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * self.factor

    for engine in ENGINES[:3]:
        module = federated(Readied(), engine=engine)
        trainer(1).fit(module, blobs())
        assert bool(torch.isfinite(module.global_vector).all())
