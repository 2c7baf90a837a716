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
from fl_lightning import callbacks as c
from fl_lightning.client.step_hooks import differentiated
from tests.helpers.learners import (
    Lit,
    assert_trained_as,
    blobs,
    by_hand,
    by_lightning,
    client_rows,
    federated,
    trainer,
)

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


@pytest.mark.filterwarnings("ignore:engine=", "ignore:None of the inputs")
@pytest.mark.parametrize("settings", ENGINES, ids=str)
@pytest.mark.parametrize("learner", [Reentrant, WithinBackward])
def test_layers_whose_gradient_comes_by_a_backward_within_are_trained(
    learner: type[Lit], settings: dict[str, Any]
) -> None:
    data = blobs(clients=1)
    module = federated(learner(), participation="all", **settings)
    plain = copy.deepcopy(module.learner)
    trainer(1).fit(module, data)
    assert_trained_as(module, by_hand(plain, data.client_batches(0, 0, 3)))


class Detached(Lit):
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
    run = trainer(1, [c.HessianLogger(every_n_rounds=1)])
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


OPTIMIZERS = {
    "decay": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "groups": lambda p: torch.optim.AdamW([{"params": [each]} for each in p], 0.01),
}
pytestmark = pytest.mark.filterwarnings("ignore:engine=")


class TwoHeads(Lit):
    """The loss depends on one of two heads, by the batch's first label or always."""

    def __init__(self, by_batch: bool = False) -> None:
        super().__init__()
        self.other = nn.Linear(8, 4)
        self.by_batch = by_batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.net[1](self.net[0](x))
        if self.by_batch and batch_idx % 2:
            return nn.functional.cross_entropy(self.other(hidden), y)
        return nn.functional.cross_entropy(self.net[2](hidden), y)


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [*(("adamw", each) for each in ENGINES), *((name, ENGINES[0]) for name in OPTIMIZERS)],
    ids=str,
)
def test_a_head_that_the_loss_does_not_depend_on_stays(optimizer: str, settings: Any) -> None:
    data = blobs(clients=1)
    learner = TwoHeads()
    module = federated(
        learner, participation="all", client_optimizer=OPTIMIZERS[optimizer], **settings
    )
    plain = copy.deepcopy(learner)
    trainer(1).fit(module, data)
    batches = data.client_batches(0, 0, 3)
    assert_trained_as(module, by_hand(plain, batches, OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimizer", ["decay", "momentum"])
def test_a_head_stays_in_the_steps_that_do_not_use_it(optimizer: str, clip: float | None) -> None:
    data = blobs(clients=1)
    learner = TwoHeads(by_batch=True)
    module = federated(
        learner,
        participation="all",
        client_optimizer=OPTIMIZERS[optimizer],
        clip_norm=clip,
        engine="sequential",
    )
    plain = copy.deepcopy(learner)

    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], clip)
            super().step()

    def clipped(parameters: Any) -> Any:
        (group,) = OPTIMIZERS[optimizer](parameters).param_groups
        options = {name: group[name] for name in ("lr", "momentum", "weight_decay")}
        return Clipped(parameters, **options)

    trainer(1).fit(module, data)
    assert_trained_as(module, by_hand(plain, data.client_batches(0, 0, 3), clipped), 1e-6)


def test_a_head_that_a_method_pulls_is_stepped() -> None:
    data = blobs(clients=1)
    learner = TwoHeads(by_batch=True)
    module = federated(
        learner,
        participation="all",
        client_optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        engine="sequential",
    )
    start = learner.other.weight.detach().clone()
    trainer(1, [c.ProximalTerm(5.0)]).fit(module, data)
    assert not torch.equal(module.export().other.weight, start)


class HeadAlone(Lit):
    """Its optimizer holds the head; the body asks for gradients all the same."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)


@pytest.mark.parametrize("personal", [c.ProximalPersonalModel, c.MoreauEnvelope])
def test_what_no_optimizer_holds_stays_in_personal_models_too(personal: Any) -> None:
    module = federated(HeadAlone(), participation="all", engine="sequential")
    trainer(2, [personal()]).fit(module, blobs(clients=2))
    body = module.layout["net.2.weight"][0].start
    models = [
        row
        for (key, _), row in client_rows(module).items()
        if row.shape == module.global_vector.shape
    ]
    assert models
    w = module.global_vector.detach()
    for model in models:
        assert torch.equal(model[:body], w[:body]) and not torch.equal(model[body:], w[body:])


def test_clipping_counts_what_the_optimizer_holds() -> None:
    data = blobs(clients=1)
    learner = HeadAlone()
    module = federated(learner, participation="all", clip_norm=0.05, engine="sequential")
    plain = copy.deepcopy(learner)
    trainer(1).fit(module, data)
    by_lightning(plain, data.client_batches(0, 0, 3), gradient_clip_val=0.05)
    assert_trained_as(module, plain, 1e-6)
