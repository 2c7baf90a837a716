"""Gradients are what `backward()` gives, whichever way a learner takes parts of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fl_lightning import UserError
from fl_lightning.callbacks import HessianLogger
from fl_lightning.client.step_hooks import differentiated
from tests.helpers.learners import Lit, blobs, federated, trainer

ENGINES: list[dict[str, Any]] = [
    {"engine": "sequential"},
    {"engine": "concurrent", "workers": 2, "capture": False},
    {"engine": "concurrent", "workers": 2, "capture": True},
    {"engine": "stacked"},
    {"engine": "auto"},
]


class Reentrant(Lit):
    """Its first layer computes its activations twice, as transformers' checkpointing does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        entering = x.detach().requires_grad_()
        hidden = checkpoint(self.net[:2], entering, use_reentrant=True)
        return nn.functional.cross_entropy(self.net[2](hidden), y)


class Inner(torch.autograd.Function):
    """A function whose backward calls `backward` itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        again = x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(again).backward(gradient)
        return again.grad, None


class WithinBackward(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = Inner.apply(x.detach().requires_grad_(), self.net[:2])
        return nn.functional.cross_entropy(self.net[2](hidden), y)


class Hooked(Reentrant):
    """With a hook of its own around the backward."""

    def on_before_backward(self, loss: Tensor) -> None:
        assert loss.ndim == 0


@pytest.mark.filterwarnings("ignore:engine=", "ignore:None of the inputs")
@pytest.mark.parametrize("settings", ENGINES, ids=str)
@pytest.mark.parametrize("learner", [Reentrant, WithinBackward, Hooked])
def test_layers_whose_gradient_comes_by_a_backward_within_are_trained(
    learner: type[Lit], settings: dict[str, Any]
) -> None:
    data = blobs(clients=1)
    module = federated(learner(), participation="all", **settings)
    plain = copy.deepcopy(module.learner)
    plain.log = lambda *a, **k: None
    trainer(1).fit(module, data)
    optimizer = plain.configure_optimizers()
    for step, batch in enumerate(data.client_batches(0, 0, 3)):
        optimizer.zero_grad()
        plain.training_step(batch, step).backward()
        optimizer.step()
    for name, value in module.export().state_dict().items():
        torch.testing.assert_close(
            value, plain.state_dict()[name], rtol=1e-10, atol=1e-10, msg=name
        )


class Detached(Lit):
    """Its loss requires a gradient, and no parameter gets one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            out = self.net(x)
        return nn.functional.cross_entropy(out.requires_grad_(), y)


def test_a_learner_none_of_whose_parameters_gets_a_gradient_is_told() -> None:
    module = federated(Detached())
    with pytest.warns(UserWarning, match="Detached: .* none of its trainable parameters got a"):
        trainer(1).fit(module, blobs())
    usual = federated()
    trainer(1).fit(usual, blobs())
    assert not any("got a gradient" in note for note in usual.notes)


class OwnBackward(Lit):
    """Its step calls `backward` of a loss of its own before, as meta-learning does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        nn.functional.mse_loss(self.net(x), torch.ones(len(y), 4, dtype=x.dtype)).backward()
        return nn.functional.cross_entropy(self.net(x), y)


class WithoutOwnBackward(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
def test_gradients_that_a_step_leaves_are_cleared_as_in_plain_training(engine: str) -> None:
    ends = []
    for learner in (OwnBackward, WithoutOwnBackward):
        torch.manual_seed(0)
        module = federated(learner(), engine=engine)
        trainer(2).fit(module, blobs())
        ends.append(module.global_vector.detach())
    assert torch.equal(*ends)


def test_curvature_refuses_what_no_second_derivative_sees() -> None:
    module = federated(Reentrant())
    run = trainer(1, [HessianLogger(every_n_rounds=1)])
    with pytest.raises(UserError, match=r"Reentrant: .*differentiated twice.*use_reentrant=False"):
        run.fit(module, blobs())


class Holding(TorchDispatchMode):
    """Holds the outputs of all operations, as a recording does, and counts copies."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func is torch.ops.aten.copy_.default
        self.held.append(func(*args, **(kwargs or {})))
        return self.held[-1]


@pytest.mark.parametrize(("recording", "copied"), [(True, 0), (False, 4)])
def test_a_recorded_step_does_not_copy_its_gradients(recording: bool, copied: int) -> None:
    """Each replay would repeat the copies: ten percent of a round of the MLP."""
    net = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4))
    parameters = list(net.parameters())
    with Holding() as mode:
        loss = net(torch.ones(3, 20)).square().sum()
        gradients = differentiated(loss, parameters, recording)
    assert mode.copies == copied and all(p.grad is None for p in parameters)
    expected = torch.autograd.grad(net(torch.ones(3, 20)).square().sum(), parameters)
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient is not None and torch.equal(gradient, other)


def test_hooks_of_parameters_see_the_gradient_of_a_recorded_step() -> None:
    parameter = nn.Parameter(torch.ones(3))
    seen: list[Tensor] = []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    (gradient,) = differentiated(parameter.square().sum(), [parameter], recording=True)
    assert len(seen) == 1 and gradient is not None and torch.equal(seen[0], gradient)
