"""The largest eigenvalue and the trace of exact Hessians."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fl_lightning import InMemoryDataModule
from fl_lightning.errors import UserError
from fl_lightning.evaluation.curvature import Curvature, Hessian, measure, top, trace
from fl_lightning.evaluation.evaluator import Evaluator, samples_of
from fl_lightning.learner.layout import Layout


class Net(pl.LightningModule):
    """Cross-entropy of a network."""

    def __init__(self, *layers: nn.Module, sign: int = 1) -> None:
        super().__init__()
        self.net, self.sign = nn.Sequential(*layers), sign

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.sign * cross_entropy(self.net(batch[0]), batch[1])


class TiedLinear(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


def norm() -> nn.Module:
    """With statistics as after training."""
    layer = nn.BatchNorm1d(8)
    assert layer.running_mean is not None and layer.running_var is not None
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    return layer


CASES = {
    "logistic regression": lambda: Net(nn.Linear(6, 3)),
    "negative dominant eigenvalue": lambda: Net(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), sign=-1
    ),
    "BatchNorm and dropout": lambda: Net(
        nn.Linear(6, 8), norm(), nn.Tanh(), nn.Dropout(), nn.Linear(8, 3)
    ),
    "tied weights": lambda: Net(TiedLinear(), nn.Linear(6, 3)),
}


def made(case: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Tensor]:
    """A learner, five clients of 6 to 30 samples, some held twice, and the learner's vector."""
    torch.manual_seed(4)
    learner = CASES[case]().to(dtype)
    for parameter in learner.parameters():
        parameter.data *= 1.5
    y = torch.arange(90) % 3
    x = torch.randn(90, 6) + 1.5 * nn.functional.one_hot(y, 6)
    clients = [range(0, 30), range(30, 36), range(36, 60), range(50, 70), range(70, 90)]
    data = InMemoryDataModule(
        (x.to(dtype), y), clients=[list(own) for own in clients], batch_size=7
    )
    return learner, data, torch.cat([p.detach().reshape(-1) for p in learner.parameters()])


def exact(learner: Any, data: Any, w: Tensor) -> Any:
    """H ``(D, D)`` of the mean loss over all clients' samples, by torch.func alone, in float64."""
    layout, learner = Layout(learner), learner.double().eval()
    own = np.concatenate([data.client_indices(i) for i in range(5)])
    x, y = (t[own] for t in data._given_sets["train"])

    def loss(vector: Tensor) -> Tensor:
        named = {n.removeprefix("net."): vector[s].view(shape) for n, (s, shape) in layout.items()}
        out: Tensor = learner.sign * cross_entropy(
            functional_call(learner.net, named, (x.double(),)), y
        )
        return out

    return torch.func.hessian(loss)(w.double()).numpy()


def measured(
    case: str, dtype: torch.dtype = torch.float32, probes: int = 100
) -> tuple[Curvature, Any]:
    learner, data, w = made(case, dtype)
    hessian = Hessian(Evaluator(learner, Layout(learner), data), w, samples_of(data))
    return measure(hessian, 1e-3, probes, seed=0), (learner, data, w)


@pytest.mark.parametrize("case", CASES)
def test_eigenvalue_and_trace_are_those_of_the_exact_hessian(case: str) -> None:
    found, problem = measured(case)
    values = np.linalg.eigvalsh(exact(*problem))
    assert len(values) <= 300
    assert found.norm == pytest.approx(float(problem[2].double().norm()), rel=1e-6)
    assert found.top_eigenvalue == pytest.approx(values[-1], rel=1e-3)
    assert found.top_residual <= 1.1e-3
    assert abs(found.trace - values.sum()) <= min(3 * found.trace_stderr, 0.05 * abs(values.sum()))
    if case.startswith("negative"):
        assert abs(values[0]) > 2 * values[-1] > 0


def test_products_are_exact_and_the_standard_error_of_the_trace_is_true() -> None:
    learner, data, w = made("tied weights", torch.float64)
    hessian = Hessian(Evaluator(learner, Layout(learner), data), w, samples_of(data))
    products = np.stack([hessian(row) for row in np.eye(len(w))])
    assert np.allclose(products, exact(learner, data, w), rtol=1e-9, atol=1e-12)
    trace_is, away = float(np.trace(products)), []
    for seed in range(12):
        mean, error = trace(hessian, 20, seed, np.eye(len(w))[0])
        away.append((mean - trace_is) / error)
    # what the standard error says is what one sees
    assert 0.3 < np.std(away) < 3 and abs(np.mean(away)) < 1.5


class Flat(pl.LightningModule):
    """A loss without curvature: linear in its parameters."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.w.sum()


class Once(torch.autograd.Function):
    """Can be differentiated once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    # Torch has no types there.
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


class Diverging(Flat):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.w**2).sum() * torch.inf


class Rough(Flat):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = Once.apply(self.w).sum()
        return loss


@pytest.mark.parametrize("size", [1, 30])
def test_flat_losses_and_losses_that_are_not_finite(size: int) -> None:
    data = made("logistic regression")[1]
    for kind in (Flat, Diverging):
        learner = kind(size)
        hessian = Hessian(
            Evaluator(learner, Layout(learner), data), torch.ones(size), samples_of(data)
        )
        found = measure(hessian, 1e-3, 4, 0)
        expected = 0.0 if kind is Flat else float("nan")
        assert [found.top_eigenvalue, found.trace] == pytest.approx([expected] * 2, nan_ok=True)


def test_a_loss_that_cannot_be_differentiated_twice_is_refused_by_name() -> None:
    data, learner = made("logistic regression")[1], Rough(30)
    with pytest.raises(UserError, match="Rough: its loss cannot be differentiated twice"):
        evaluator = Evaluator(learner, Layout(learner), data)
        top(Hessian(evaluator, torch.ones(30), samples_of(data)), 1e-3, 0)
