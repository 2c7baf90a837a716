"""Steps that cannot be replayed, from the first round or from a later one on, run each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.callback import FederatedCallback
from tests.helpers.learners import Lit, Normed
from tests.helpers.replays import assert_same, ran, replayed

pytestmark = pytest.mark.fast


class Indexed(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + batch_idx % 2)


class Reading(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 1 else 2 * loss


class Masking(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((x[y > 0], y[y > 0]), batch_idx)


class Outside(Lit):
    """Computes where no dispatcher sees it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = torch.from_numpy(np.abs(batch[0].numpy()).mean(1))
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.log("train/loss", loss.mean())
        return (loss * weight).mean()


class Metrical(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("train/acc", self.accuracy)
        return super().training_step(batch, batch_idx)


class Adaptive(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.NAdam(self.parameters(), lr=0.01)


REFUSED = {
    Indexed: "uses batch_idx",
    Reading: "reads a value",
    Masking: "shape",
    Outside: "values of a tensor are read",
    Metrical: "changes accuracy",
    Adaptive: "reads a value",
}


@pytest.mark.parametrize("learner", REFUSED, ids=lambda learner: learner.__name__)
def test_steps_that_cannot_be_replayed_run_each_time(learner: type[Lit]) -> None:
    _, expected, _ = ran(learner, list, {}, engine="sequential")
    with pytest.warns(UserWarning, match="local steps are not captured"):
        module, found, _ = ran(learner, list, {}, capture=True)
    assert (
        module.engine_facts["capture"].startswith("no: ")
        and REFUSED[learner] in module.engine_facts["capture"]
    )
    assert_same(expected, found)


def test_a_hook_that_reads_a_value_ends_capture_and_not_the_run() -> None:
    class Looking(FederatedCallback):
        def on_local_gradient(self, clients: Any, gradient: Tensor) -> None:
            if float(gradient.abs().max()) > 0.05:
                gradient.mul_(0.5)

    _, expected, _ = ran(Lit, lambda: [Looking()], {}, engine="sequential")
    with pytest.warns(UserWarning, match="local steps are not captured"):
        _, found, engine = ran(Lit, lambda: [Looking()], {}, capture=True)
    assert_same(expected, found)
    assert replayed(engine) == 0


class Later(Normed):
    """Steps that can be replayed in round 0 and not in the next ones: each in its own way."""

    way = ""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(20))
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.current_epoch == 0:
            return loss
        if self.way == "index":
            return loss * (1 + batch_idx % 2)
        if self.way == "buffer":
            self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
            return loss + 0.1 * self.mean.sum() * self.net[0].bias.sum()
        if self.way == "attribute":
            self.calls += 1
            return loss * (0.5 if self.calls % 4 == 0 else 1)
        return loss * (3 if 3 not in batch[1].tolist() else 1)


@pytest.mark.parametrize("way", ["index", "buffer", "attribute", "values"])
def test_steps_that_change_in_a_later_round_run_each_time(way: str) -> None:
    def make() -> Later:
        learner = Later()
        learner.way = way
        return learner

    # what is kept on the learner goes on in its copy
    alone = {"workers": 1} if way == "attribute" else {}
    _, expected, _ = ran(make, list, {}, capture=False, **alone)
    with pytest.warns(UserWarning, match="local steps are not captured"):
        module, found, _ = ran(make, list, {}, capture=True, **alone)
    assert module.engine_facts["capture"].startswith("no: ")  # which round 0 could not tell
    assert_same(expected, found)
