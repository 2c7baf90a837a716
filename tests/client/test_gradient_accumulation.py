"""Local steps over several batches: `accumulate`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import InMemoryDataModule
from fl_lightning import callbacks as c
from fl_lightning.callback import ClientState, FederatedCallback
from fl_lightning.client.gradient_accumulation import batches_in
from fl_lightning.errors import UserError
from tests.helpers.agreement import Run, trained
from tests.helpers.agreement import near as near_in_all
from tests.helpers.federation import Network
from tests.helpers.learners import Lit, blobs, federated, trainer

ADAMW = {"client_optimizer": lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.1)}


class Plain(Network):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        return loss


class Masked(Network):
    """Samples of class 0 have no target, so batches of one size have unequal numbers of targets."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        targets = torch.where(y == 0, -1, y)
        count = (targets != -1).sum()
        loss = nn.functional.cross_entropy(
            self.net(x), targets, ignore_index=-1, reduction="sum"
        ) / count.clamp(min=1)
        self.log("train/loss", loss)
        return {"loss": loss, "count": count}


class AtAnotherPoint(FederatedCallback):
    """The gradient of the step's batches elsewhere, and the number of the step."""

    v = ClientState(initial="current_model", synchronised=False)

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> None:
        v = self.v[clients]
        v.sub_(0.1 * clients.gradient_at(v) * (1 + clients.step))


def of_batches(size: int) -> Callable[..., Any]:
    return lambda x, y, own: InMemoryDataModule((x, y), clients=own, batch_size=size)


def near(run: Run, reference: Run) -> None:
    """As large batches leave it, except for the number of gradients."""
    for one in (run, reference):
        for metrics in one.record.metrics:
            metrics.pop("cost/gradients", None)
            metrics.pop("cost/forwards", None)
    near_in_all(run, reference)


@pytest.mark.parametrize(
    ("learner", "methods", "given"),
    [
        (Plain, [], {}),
        (Plain, [], {"engine": "concurrent", "workers": 2}),
        (Plain, [], {"clip_norm": 0.5, "weighting": "samples"}),
        (Plain, [], ADAMW | {"keep_optimizer_state": True}),
        (Masked, [], {}),
        (Masked, [], ADAMW | {"clip_norm": 0.1}),
        (Plain, [c.SharpnessAwareMinimization], {}),
        (Masked, [c.SharpnessAwareMinimization], {"local_epochs": 1.5}),
        (Plain, [partial(c.LocallyEstimatedPerturbation, 0.1)], {}),
        (Plain, [c.ControlVariates], {"local_steps": 3}),
        (Plain, [AtAnotherPoint], {"local_epochs": 2}),
        (Plain, [c.ModelContrast], {}),
        (Plain, [c.PersonalHead], {}),
        (Plain, [partial(c.PrototypePull, 3, 4)], {}),
        (Plain, [partial(c.PrototypePull, 3, 4), c.SharpnessAwareMinimization], {}),
    ],
)
def test_batches_of_a_step_are_one_large_batch(
    learner: Any, methods: list[Any], given: dict[str, Any]
) -> None:
    """Clients have 1 to 12 samples, so the last step of an epoch may have fewer batches."""
    given = {"engine": "sequential", **given}
    large, *small = (
        trained(
            ([make() for make in methods], {}),
            learner=learner,
            data=of_batches(size),
            accumulate=4 // size,
            **given,
        )
        for size in (4, 1, 2)
    )
    for each in small:
        near(each, large)


def test_a_step_takes_no_batch_of_the_next_epoch() -> None:
    """Five batches, two a step: three steps an epoch."""
    module = federated(participation=1.0, accumulate=2, local_epochs=2)
    run = trainer(1)
    run.fit(module, blobs(1, 40, batch_size=8))
    assert module.steps(0, 0) == 6
    assert run.callback_metrics["cost/gradients"] == 10
    assert "2 batches per step" in module.describe()
    module = federated(participation=1.0, accumulate=2, local_steps=4)
    run = trainer(1)
    run.fit(module, blobs(1, 40, batch_size=8))
    assert module.steps(0, 0) == 4
    assert run.callback_metrics["cost/gradients"] == batches_in(4, 5, 2) == 7


class Counting(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.told.append(f"start {batch_idx} last={self.trainer.is_last_batch}")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.told.append("zero")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.told.append("step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.told.append(f"end {batch_idx}")


def test_the_learners_hooks_see_batches_and_steps() -> None:
    learner = Counting()
    module = federated(learner, participation=1.0, accumulate=2, engine="sequential")
    run = trainer(1)
    run.fit(module, blobs(1, 24, batch_size=8))
    # Trials before round 0 work on copies.
    told = "start 0 last=False; zero; end 0; start 1 last=False; step; end 1; "
    assert learner.told == (told + "start 2 last=True; zero; step; end 2").split("; ")


@pytest.mark.parametrize("count", [-1, float("nan"), "many", [1, 2]])
def test_a_count_that_is_no_number_is_refused(count: Any) -> None:
    class Wrong(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "count": count}

    with pytest.raises(UserError, match=r"count=.*a number from 0|count="):
        trainer(1).fit(federated(Wrong(), accumulate=2), blobs())
