"""``server.outputs``: the learner's forward at any vector, at the server."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_lightning import FederatedCallback, UserError
from fl_lightning.testing import check_method
from tests.helpers.learners import Lit, blobs, federated, trainer

X = torch.linspace(-1, 1, 60, dtype=torch.float64).view(3, 20)


class Dropping(Lit):
    """With dropout and BatchNorm, which evaluation leaves as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)
        )

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class Asks(FederatedCallback):
    """Keeps the server's outputs, and one step on them at the server."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def on_round_start(self, server: Any) -> None:
        self.seen.append(server.outputs(server.w, X.float()))
        point = server.w.clone()
        with torch.enable_grad():
            point.requires_grad_()
            loss = cross_entropy(server.outputs(point, X), torch.tensor([0, 1, 2]))
            self.gradients += torch.autograd.grad(loss, point)


def test_outputs_and_gradients_are_the_exported_learner_s() -> None:
    learner = Dropping()
    asks = Asks()
    module = federated(learner)
    exported = module.export().eval()
    trainer(1, [asks]).fit(module, blobs())
    (seen,), (gradient,) = asks.seen, asks.gradients
    assert not seen.requires_grad and seen.dtype == torch.float64
    expected = exported(X.float().double())
    torch.testing.assert_close(seen, expected.detach(), rtol=0, atol=1e-12)
    cross_entropy(exported(X), torch.tensor([0, 1, 2])).backward()
    own = torch.cat([p.grad.view(-1) for p in exported.parameters()])
    torch.testing.assert_close(gradient, own, rtol=0, atol=1e-12)


def test_asking_changes_nothing() -> None:
    ends = []
    for methods in ([], [Asks()]):
        module = federated(Dropping())
        trainer(2, methods).fit(module, blobs())
        ends.append([module.global_vector, *module.learner.buffers()])
    assert all(one.equal(other) for one, other in zip(*ends, strict=True))


def test_a_learner_without_forward_is_told() -> None:
    with pytest.raises(UserError, match=r"server\.outputs: Lit has no forward"):
        trainer(1, [Asks()]).fit(federated(Lit()), blobs())


class Ensemble(FederatedCallback):
    """One step of the average towards the mean of the clients' predictions."""

    neutral = {"lr": 0.0}

    def __init__(self, x: Tensor, lr: float = 0.1) -> None:
        super().__init__()
        self.x, self.lr = x, lr

    def on_server_update(self, server: Any, updates: Tensor) -> None:
        if not len(updates):
            return
        each = [server.outputs(server.given + one, self.x).softmax(1) for one in updates]
        student = server.w_before + server.update
        with torch.enable_grad():
            student.requires_grad_()
            loss = cross_entropy(server.outputs(student, self.x), torch.stack(each).mean(0))
            (gradient,) = torch.autograd.grad(loss, student)
        server.update -= self.lr * gradient


def test_distillation_at_the_server_keeps_every_contract() -> None:
    x = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    report = check_method(partial(Ensemble, x))
    assert report.ok, str(report)
