"""Hooks that a learner registers on its parameters' gradients. Called in each step, or refused by
name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import UserError
from tests.helpers.learners import Lit, assert_trained_as, blobs, by_lightning, federated, trainer


class Halving(Lit):
    def __init__(self, hidden: int = 64) -> None:
        super().__init__(hidden)
        self.net[0].weight.register_hook(lambda g: 0.5 * g)


class Accumulating(Lit):
    """The other way, of PyTorch 2.1, which sees ``.grad``."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__(hidden)
        self.net[0].weight.register_post_accumulate_grad_hook(halve)


def halve(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


HOOKED: list[type[Lit]] = [Halving, Accumulating]


@pytest.mark.parametrize("learner", HOOKED)
@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_they_do_what_they_do_alone(learner: type[Lit], engine: str) -> None:
    data, alone = blobs(clients=1), learner().double()
    module = federated(learner(), engine=engine, participation="all")
    alone.load_state_dict(module.learner.state_dict())
    trainer(1).fit(module, data)
    assert module.engine_facts["engine"] == "sequential"
    assert_trained_as(module, by_lightning(alone, data.client_batches(0, 0, 3)), 1e-12)
    assert all(p.grad is None for p in module.learner.parameters())


@pytest.mark.parametrize("learner", HOOKED)
def test_engines_with_copies_are_refused_by_name(learner: type[Lit]) -> None:
    with pytest.raises(
        UserError,
        match=r"engine='concurrent' cannot train .*net.0.weight has a hook on its gradient",
    ):
        trainer(1).fit(federated(learner(), engine="concurrent"), blobs())
    module = federated(learner(), engine="stacked")
    with pytest.warns(
        UserWarning, match=r"engine='stacked' cannot train .*; engine='sequential' does"
    ):
        trainer(1).fit(module, blobs())


@pytest.mark.parametrize("engine", ["concurrent", "stacked"])
@pytest.mark.parametrize("when", ["on_train_start", "on_train_epoch_start"])
@pytest.mark.filterwarnings("ignore:you asked for engine='concurrent'")
def test_one_that_comes_later_is_refused_where_copies_train(engine: str, when: str) -> None:
    def registering(self: Any) -> None:
        self.net[0].weight.register_hook(lambda g: 0.5 * g)

    learner = type("Later", (Lit,), {when: registering})
    with pytest.raises(
        UserError, match=r"since the run began, net.0.weight has a hook on its gradient"
    ):
        trainer(1).fit(federated(learner(), engine=engine), blobs())


def test_one_that_a_step_registers_keeps_clients_off_copies() -> None:
    class InStep(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if not self.net[0].weight._backward_hooks:
                self.net[0].weight.register_hook(lambda g: 0.5 * g)
            return super().training_step(batch, batch_idx)

    with pytest.raises(
        UserError, match=r"engine='concurrent' cannot train InStep: its net.0.weight has a hook"
    ):
        trainer(1).fit(federated(InStep(), engine="concurrent"), blobs())


@pytest.mark.parametrize("engine", ["concurrent", "stacked"])
@pytest.mark.filterwarnings("ignore:engine=")
def test_backward_hooks_of_modules_are_called_in_every_engine(engine: str) -> None:
    """Copies have these: they lie with the module."""

    class OfModule(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].register_full_backward_hook(halved)
            self.net[2].register_full_backward_pre_hook(lambda module, grad: (0.5 * grad[0],))

    learners = []
    for kind in (OfModule, OfModule, Lit):
        torch.manual_seed(0)
        learners.append(kind())
    engines = ("sequential", engine, "sequential")
    (reference, module, plain) = map(
        lambda learner, name: federated(learner, engine=name), learners, engines
    )
    for each in (reference, module, plain):
        trainer(1).fit(each, blobs())
    torch.testing.assert_close(module.global_vector, reference.global_vector, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(module.global_vector, plain.global_vector)


def halved(module: nn.Module, given: Any, grad: Any) -> Any:
    return tuple(None if g is None else 0.5 * g for g in given)


class Looking(Lit):
    """Looks at gradients after the step, as peft's AdaLoRA does, and one weight has none."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.unused = nn.Parameter(torch.zeros(1))
        self.norms: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.unused.grad is None
        self.norms.append(float(sum(p.grad.norm() for p in self.net.parameters())))
        self.log("train/norm", self.norms[-1])


@pytest.mark.filterwarnings("ignore:engine=", "ignore:Looking keeps state")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("clip", [None, 100.0])
def test_gradients_are_there_after_the_step_as_in_plain_training(
    clip: float | None, momentum: float
) -> None:
    data = blobs(clients=1)
    rate = {"client_optimizer": lambda p: torch.optim.SGD(p, 0.1, momentum=momentum)}
    module = federated(Looking(), participation="all", clip_norm=clip, engine="sequential", **rate)
    alone = copy.deepcopy(module.learner)
    trainer(1, limit_val_batches=0).fit(module, data)
    own: Any = alone
    own.configure_optimizers = lambda: rate["client_optimizer"](alone.parameters())
    by_lightning(alone, data.client_batches(0, 0, 3))
    assert module.learner.norms[-3:] == pytest.approx(alone.norms)
    assert all(p.grad is None for p in module.learner.parameters())


class Held(Lit):
    """Holds its last layer's weight, as DINO does in its first epochs."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.net[2].weight.grad = None


class HeldWhileClipping(Held):
    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.net[2].weight.grad = None


class Given(Held):
    """Gives a gradient to a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.apart = nn.Parameter(torch.ones(2))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.apart.grad is None
        self.apart.grad = torch.ones_like(self.apart)


@pytest.mark.parametrize("learner", [Held, HeldWhileClipping, Given])
@pytest.mark.parametrize("clip", [None, 100.0])
def test_a_hook_decides_which_parameters_the_optimizer_steps(
    learner: type[Lit], clip: float | None
) -> None:
    data, alone = blobs(clients=1), learner().double()
    module = federated(learner(), engine="sequential", participation="all", clip_norm=clip)
    alone.load_state_dict(module.learner.state_dict())
    trainer(1).fit(module, data)
    assert_trained_as(module, by_lightning(alone, data.client_batches(0, 0, 3)), 1e-9)
