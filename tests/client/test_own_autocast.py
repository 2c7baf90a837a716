"""A learner that uses autocast itself: each of its steps computes with the weights of that step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.callbacks import PerClientEvaluation
from tests.helpers.learners import Lit, blobs, trainer

STEPS = 3


class InBfloat16(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16):
            out = self.net(x)
        return cross_entropy(out.float(), y)


def run(rounds: int, *callbacks: Any, **arguments: Any) -> Any:
    """A client trains on all of its samples in each step."""
    torch.manual_seed(0)
    made = blobs(3, dtype=torch.float32)
    samples, own = made._given_sets["train"], [made.client_indices(i) for i in range(3)]
    data = InMemoryDataModule(samples, test=samples, clients=own, test_clients=own, batch_size=100)
    module = FederatedModule(
        InBfloat16(), participation=1.0, local_steps=STEPS, seed=1, **arguments
    )
    trainer(rounds, callbacks).fit(module, data)
    return module


def by_hand(learner: Any, module: Any, client: int) -> Any:
    """A copy of a learner after the local steps of a client."""
    learner = copy.deepcopy(learner)
    optimizer = learner.configure_optimizers()
    for _ in range(STEPS):
        optimizer.zero_grad()
        learner.training_step(samples_of(module, client), 0).backward()
        optimizer.step()
    return learner


def samples_of(module: Any, client: int) -> tuple[Tensor, Tensor]:
    data = module.trainer.datamodule
    (x, y), own = data._given_sets["train"], data.client_indices(client)
    return x[own], y[own]


def vector(learner: Any) -> Tensor:
    return torch.nn.utils.parameters_to_vector(learner.parameters()).detach()


@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
def test_steps_are_those_of_a_plain_loop(engine: str) -> None:
    module = run(1, engine=engine)
    torch.manual_seed(0)
    start = InBfloat16()
    mean = torch.stack([vector(by_hand(start, module, client)) for client in range(3)]).mean(0)
    assert float((mean - vector(start)).norm()) > 0.01
    assert torch.allclose(module.global_vector, mean, atol=1e-6)


def test_fine_tuning_is_that_of_a_plain_loop() -> None:
    module = run(1, PerClientEvaluation(finetune_epochs=STEPS))
    losses = []
    for client in range(3):
        x, y = samples_of(module, client)
        tuned = by_hand(module.export(), module, client)
        losses.append(float(cross_entropy(tuned.net(x), y)))
    logged = float(module.trainer.callback_metrics["clients/loss_finetuned"])
    assert logged == pytest.approx(sum(losses) / 3, abs=1e-5)
