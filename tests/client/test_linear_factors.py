"""Gradients of single samples as factors: the sums of clipped gradients are those of whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_lightning.client.flat_learner import FlatLearner
from fl_lightning.client.sample_gradients import SampleGradients
from fl_lightning.learner.layout import Layout, flatten, trainable

CLIP = 0.3


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3, bias=False)

    def outputs(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return functional.cross_entropy(self.outputs(x), y)


class Pictures(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)
        self.drop = nn.Dropout(0.4)
        self.first = nn.Linear(12, 5)

    def outputs(self, x: Tensor) -> Tensor:
        return super().outputs(self.drop(self.convolution(x[:, None]).flatten(1)))


class FrozenBias(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first.bias.requires_grad_(False)


class Twice(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(5, 5)

    def outputs(self, x: Tensor) -> Tensor:
        h = self.again(torch.tanh(self.first(x)))
        return self.second(self.again(torch.tanh(h)))


class CalledInVain(Plain):
    def outputs(self, x: Tensor) -> Tensor:
        outputs = super().outputs(x)
        self.first(2 * x)
        return outputs


class Dropped(CalledInVain):
    """Taken again without one layer, its pass draws the same dropout."""

    def outputs(self, x: Tensor) -> Tensor:
        return super().outputs(functional.dropout(x, 0.5))


class Rows(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 5)

    def outputs(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x.unflatten(1, (3, 2)))).sum(1))


class Decayed(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.first.weight.square().sum()


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(6, 5)
        self.back.weight = self.first.weight

    def outputs(self, x: Tensor) -> Tensor:
        return super().outputs(x) + self.second(self.back(x))


class Penalised(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = torch.tanh(self.first(x))
        loss = functional.cross_entropy(self.second(h), y)
        (slope,) = torch.autograd.grad(loss, h, create_graph=True)
        return loss + slope.square().sum()


class Sloped(Plain):
    """Its loss has a gradient with respect to the input, by ``torch.func``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        slope = torch.func.grad(lambda x: functional.cross_entropy(self.outputs(x), y))(x)
        return functional.cross_entropy(self.outputs(x), y) + slope.square().sum()


class Taught(Plain):
    """It also calls its layers without gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        with torch.no_grad():
            taught = self.outputs(x + 1.0)
        return functional.mse_loss(self.outputs(x), taught)


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(3, 3)


def model(kind: type[Plain]) -> FlatLearner:
    torch.manual_seed(1)
    learner = kind().double()
    x = flatten([p.detach() for _, p in trainable(learner)])[None].clone()
    copy = FlatLearner(learner, Layout(learner), x)
    copy.attach()
    return copy


def batch(number: int = 5) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(number, 6, dtype=torch.float64, generator=draw)
    return x, torch.arange(number) % 3


def clipped_sum(copy: FlatLearner, at_once: int | None, factored: bool) -> tuple[Tensor, int]:
    """The sum of the clipped gradients, and how many layers came as factors."""
    torch.manual_seed(3)
    total = torch.zeros(copy.layout.size, dtype=torch.float64)
    layers = 0
    with torch.no_grad():
        for gradients in SampleGradients(copy, at_once, factored).of(batch(), 0):
            norms = gradients.norms()
            gradients.add((CLIP / norms).clamp(max=1.0), total)
            layers = len(gradients.factors)
    return total, layers


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        (Plain, 2),
        (Pictures, 2),
        (FrozenBias, 2),
        (Twice, 2),
        (CalledInVain, 1),
        (Dropped, 1),
        (Rows, 1),
        (Decayed, 0),
        (Tied, 0),
        (Penalised, 1),
        (Sloped, 0),
        (Taught, 2),
        (Unused, 2),
    ],
)
def test_factors_give_the_sums_of_whole_gradients(kind: type[Plain], layers: int) -> None:
    """Also of a second step, which knows the layers."""
    copy = model(kind)
    own, number = clipped_sum(copy, None, factored=True)
    assert number == layers
    again, _ = clipped_sum(copy, None, factored=True)
    assert torch.equal(own, again)
    whole, none = clipped_sum(model(kind), None, factored=False)
    assert none == 0 and torch.allclose(own, whole, rtol=0, atol=1e-12)
    if kind not in (Pictures, Dropped):  # one by one, dropout draws in another order
        alone, _ = clipped_sum(model(kind), 1, factored=True)
        assert torch.allclose(own, alone, rtol=0, atol=1e-12)


def test_each_sample_is_clipped_over_all_parameters() -> None:
    x, y = batch()
    copy = model(Pictures)
    copy.learner.eval()
    total = torch.zeros(copy.layout.size, dtype=torch.float64)
    for one in zip(x.split(1), y.split(1), strict=True):
        g = copy.gradient(one, 0)[0].clone()
        total += g * min(1.0, CLIP / float(g.norm()))
    assert torch.allclose(clipped_sum(copy, None, factored=True)[0], total, rtol=0, atol=1e-12)


def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    """Its rows times a factor of 0 would not be 0."""
    copy = model(Plain)
    x, y = batch()
    sums = []
    for value in (1e300, None):
        given = x.clone()
        chosen = slice(1, None)
        if value is not None:
            given[0] = value * value
            chosen = slice(None)
        total = torch.zeros(copy.layout.size, dtype=torch.float64)
        with torch.no_grad():
            pair = (given[chosen], y[chosen])
            for gradients in SampleGradients(copy, None, True).of(pair, 0):
                norms = gradients.norms()
                gradients.add(torch.where(norms.isfinite(), 1.0, 0.0), total)
        sums.append(total)
    assert bool(sums[0].isfinite().all())
    assert torch.allclose(*sums, rtol=0, atol=1e-12)
