"""One client's training: where it starts, what it draws, its full gradient, and what is said when
it fails."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning.callback import ClientState, FederatedCallback
from fl_lightning.callbacks import PartialAveraging
from fl_lightning.machine.random_state import seed_client
from tests.helpers.learners import Dropping, InPlace, Lit, blobs, federated, trainer

ALONE: dict[str, Any] = {"engine": "sequential", "participation": "all", "local_epochs": 1}


def test_a_clients_round_from_its_own_start_to_what_it_brings_home() -> None:
    class Noting(FederatedCallback):
        def on_local_end(self, clients: Any) -> None:
            met.append((clients.client_ids[0], clients.start[0].clone(), clients.x[0].clone()))

    met: list[tuple[int, Tensor, Tensor]] = []
    module = federated(InPlace(), **ALONE, clip_norm=1e-3)
    before, run = (
        module.learner.running_mean.clone(),
        trainer(2, [PartialAveraging(periods={"net.2.*": "never"}), Noting()]),
    )
    run.fit(module, blobs(clients=2))
    assert float(run.callback_metrics["clipped_steps"]) == 1.0 and not torch.equal(
        module.learner.running_mean, before
    )
    kept = module.layout["net.2.weight"][0]
    for (i, _, end), (j, start, _) in zip(met[:2], met[2:], strict=True):
        assert i == j and torch.equal(start[kept], end[kept]) and not torch.equal(start, end)
    assert torch.equal(met[2][1][: kept.start], met[3][1][: kept.start])  # the server's


class FullGradient(FederatedCallback):
    """Takes a full gradient in two places of each client's round, and keeps the first."""

    found = ClientState(synchronised=False)

    def on_local_start(self, clients: Any) -> None:
        self.found[clients] = clients.full_gradient(clients.w / 2)

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> None:
        clients.full_gradient(2 * clients.x)


@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
@pytest.mark.parametrize("learner", [Dropping, InPlace])
def test_a_full_gradient_leaves_the_client_as_it_was(learner: type[Lit], engine: str) -> None:
    """Its model, its gradient, its buffers and its random numbers; its gradients are counted."""
    data = blobs(clients=3)
    found, counted = [], []
    for methods in ([], [FullGradient()]):
        torch.manual_seed(3)
        module = federated(learner(), **{**ALONE, "engine": engine}, workers=2)
        run = trainer(2, methods)
        run.fit(module, data)
        found.append([module.global_vector.detach(), *module.learner.buffers()])
        counted.append(float(run.callback_metrics["cost/gradients"]))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    batches = [data.batches_per_epoch(i) for i in range(3)]
    assert counted == [sum(batches), sum(k + (1 + k) * k for k in batches)]


def test_each_batch_of_a_full_gradient_meets_the_clients_own_buffers() -> None:
    met: list[Tensor] = []

    class Watched(InPlace):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            met.append(self.running_mean.clone())
            return super().training_step(batch, batch_idx)

    class AtStart(FederatedCallback):
        def on_local_start(self, clients: Any) -> None:
            met.clear()
            clients.full_gradient(clients.w)

    trainer(1, [AtStart()]).fit(federated(Watched(), **ALONE), blobs(clients=1))
    full, steps = met[:3], met[3:]
    assert len(steps) == 3 and all(torch.equal(buffer, full[0]) for buffer in [*full, steps[0]])
    assert not torch.equal(steps[1], steps[0])


SEEDS: list[tuple[int, int, str, Any]] = []


class Seeded(Lit):
    """Notes what its process's generators were seeded with, and what they give."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            drawn = (float(torch.rand(1)), float(np.random.rand()), random.random())
            SEEDS.append((self.current_epoch, torch.initial_seed(), self.purpose, drawn))
        return super().training_step(batch, batch_idx)

    purpose = "learner"

    def on_train_start(self) -> None:
        SEEDS.clear()  # of steps that are tried before round 0


class Telling(FederatedCallback):
    def __init__(self, learner: Lit) -> None:
        super().__init__()
        self._learner = learner

    def on_local_start(self, clients: Any) -> None:
        self._learner.purpose = "full"
        clients.full_gradient(clients.w)
        self._learner.purpose = "learner"


def test_random_numbers_are_a_function_of_seed_round_client_and_purpose() -> None:
    SEEDS.clear()
    learner = Seeded()
    trainer(2, [Telling(learner)]).fit(federated(learner, **ALONE), blobs(clients=2))
    found, expected = [seed[1:] for seed in SEEDS], []
    for t in range(2):
        for client in range(2):
            for purpose in ("full", "learner"):
                seed_client(1, t, client, purpose)
                expected.append(
                    (
                        torch.initial_seed(),
                        purpose,
                        (float(torch.rand(1)), float(np.random.rand()), random.random()),
                    )
                )
    assert found == expected


def test_what_a_client_logs_before_it_fails_does_not_count_in_the_next_run() -> None:
    class Once(Lit):
        failed = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1 and not self.failed:
                self.failed = True
                self.log("odd", torch.tensor(1e6))
                raise ValueError("once")
            self.log("odd", torch.tensor(1.0))
            return super().training_step(batch, batch_idx)

    module = federated(Once(), **ALONE)
    with pytest.raises(ValueError, match="once"):
        trainer(1).fit(module, blobs(clients=2))
    run = trainer(1)
    run.fit(module, blobs(clients=2))
    assert float(run.callback_metrics["odd"]) == 1.0
