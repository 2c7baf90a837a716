"""What step hooks may ask for. The loss gradient at another point, the step's number, steps of some
epochs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning.callback import ClientState, FederatedCallback
from fl_lightning.callbacks import SharpnessAwareMinimization
from fl_lightning.testing import tiny_run
from tests.helpers.learners import Dropping, InPlace, Lit, Normed, blobs, federated, trainer


class Second(FederatedCallback):
    """A second model beside x (Ditto's), of which x sees nothing, and what depends on the step's
    number."""

    v = ClientState(initial="current_model", synchronised=False)
    heads = ClientState(shape=(), synchronised=False)

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> None:
        v = self.v[clients]
        g = clients.gradient_at(v)
        v.sub_(clients.lr * (g + clients.weight_decay * v + 0.1 * (v - clients.w)))
        self.heads[clients] += (clients.step < clients.steps_of(0.5))[:, 0] * (1.0 + clients.step)


class Again(FederatedCallback):
    """The loss gradient once more, at the same point, in place of the first. The same bits, or
    something was left."""

    neutral = {}

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        elsewhere = clients.gradient_at(clients.x + 1)
        again = clients.gradient_at(clients.x)
        assert elsewhere.data_ptr() != again.data_ptr() != gradient.data_ptr()
        return again


@pytest.mark.parametrize("learner", [Lit, Dropping, InPlace, Normed])
def test_the_gradient_at_x_is_that_of_the_loss_and_leaves_no_trace(learner: type[Lit]) -> None:
    found = []
    for methods in ([], [Again()]):
        torch.manual_seed(3)
        module = federated(learner(), engine="sequential", local_epochs=2)
        run = trainer(2, methods)
        run.fit(module, blobs())
        logged = {k: float(v) for k, v in run.callback_metrics.items() if k == "train/loss"}
        found.append((module.global_vector, dict(module.learner.named_buffers()), logged))
    (w, buffers, logged), (other, others, relogged) = found
    assert torch.equal(w, other) and logged == relogged
    assert all(torch.equal(buffers[name], others[name]) for name in buffers)


@pytest.mark.parametrize("learner", [Dropping, InPlace, Normed])
def test_what_a_step_has_drawn_and_left_in_buffers_stays_wherever_another_gradient_is_taken(
    learner: type[Lit],
) -> None:
    draws = list[list[float]]()

    class Elsewhere(FederatedCallback):
        asks = False

        def on_loss_gradient(self, clients: Any, gradient: Tensor) -> None:
            before = float(torch.rand(()))
            if self.asks:
                clients.gradient_at(clients.x + 1)
            draws[-1] += [before, float(torch.rand(()))]

    found = []
    for asks in (False, True):
        draws.append([])
        torch.manual_seed(3)
        module = federated(learner(), engine="sequential", capture=False, local_epochs=2)
        method = Elsewhere()
        method.asks = asks
        trainer(2, [method]).fit(module, blobs())
        found.append({"w": module.global_vector, **dict(module.learner.named_buffers())})
    assert draws[0] == draws[1] and len(set(draws[0])) == len(draws[0]) > 20
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_what_it_costs_is_counted() -> None:
    class Whole(FederatedCallback):
        def on_local_end(self, clients: Any) -> None:
            clients.full_gradient(clients.w)

    class Thrice(Second):
        def on_local_step_end(self, clients: Any) -> None:
            clients.gradient_at(clients.w)

    def cost(*methods: FederatedCallback, **given: Any) -> float:
        run = tiny_run(*methods, rounds=1, participation="all", local_epochs=2, **given)
        return float(run.trainer.callback_metrics["cost/gradients"])

    steps = 2 * (1 + 2 + 3 + 1 + 3 + 2)
    assert cost() == steps and cost(SharpnessAwareMinimization()) == 2 * steps
    assert cost(Whole()) == 1.5 * steps
    for engine in ({"engine": "sequential"}, {"engine": "concurrent", "capture": True}):
        assert cost(Thrice(), **engine) == 3 * steps


def test_outside_of_steps_it_is_an_error() -> None:
    class Early(FederatedCallback):
        def on_local_start(self, clients: Any) -> None:
            clients.gradient_at(clients.x)

    class Late(FederatedCallback):
        def on_local_end(self, clients: Any) -> None:
            _ = clients.step

    class Once(FederatedCallback):
        def on_local_step_end(self, clients: Any) -> None:
            if int(clients.step) == 1:
                clients.gradient_at(clients.x)

    for method, words in (
        (Early(), "hooks of a local step"),
        (Late(), r"clients\.step"),
        (Once(), "first local step"),
    ):
        with pytest.raises(RuntimeError, match=words):
            tiny_run(method, rounds=1)
