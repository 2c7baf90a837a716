"""Gradients of single samples of linear layers, held as two factors per sample.

If a step gives a linear layer one row a of a sample, once, the gradient of its weight is the outer
product of g and a, with g the gradient of the layer's output. Its norm is ‖g‖ ‖a‖, and a weighted
sum over samples is one product of matrices, so that no gradients (b, D) are stored.

I. Goodfellow: Efficient Per-Example Gradient Computations (2015), arXiv:1510.01799.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_lightning.learner.layout import Layout


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer, and the places of its parameters in the layout; None: frozen or no bias."""

    module: nn.Linear
    weight: int
    bias: int | None

    @property
    def places(self) -> set[int]:
        return {self.weight} if self.bias is None else {self.weight, self.bias}


def linear_layers(learner: nn.Module, layout: Layout, unheld: Collection[int]) -> list[LinearLayer]:
    """Return the linear layers whose weights clients train."""
    places = {name: place for place, name in enumerate(layout)}
    found = []
    for path, module in learner.named_modules():
        # A subclass may use its weight otherwise.
        if type(module) is not nn.Linear or "forward" in vars(module):
            continue
        prefix = path + "." if path else ""
        weight, bias = places.get(prefix + "weight"), places.get(prefix + "bias")
        if weight is None:
            continue
        layer = LinearLayer(module, weight, bias)
        if not layer.places & set(unheld):
            found.append(layer)
    return found


class Recorder:
    """Within :meth:`on`, layers add ``zeros`` to their outputs, and their inputs are recorded.

    The gradient at a layer's zeros is then that at its output. ``unfit``: the layers that a pass
    calls several times, with other shapes, or to take the gradient of a gradient, by index.
    """

    def __init__(self, layers: list[LinearLayer]) -> None:
        self.layers = layers
        # Of their parameters in the layout.
        self.places = set[int]().union(*(layer.places for layer in layers))
        self.zeros: list[Tensor] = []
        self.inputs: dict[int, Tensor] = {}
        self.passed: Counter[int] = Counter()  # backward passes through a layer
        self.unfit: set[int] = set()
        self.level: int | None = None

    def begin(self, zeros: list[Tensor]) -> None:
        """Begin a pass at the present level of ``torch.func``'s transforms."""
        self.zeros = zeros
        self.level = torch._C._functorch.maybe_current_level()

    @contextmanager
    def on(self, parameters: list[Tensor]) -> Iterator[None]:
        """Within, the layers compute with these parameters, which are in the layout's order."""
        try:
            for index, layer in enumerate(self.layers):
                vars(layer.module)["forward"] = self._forward(index, layer, parameters)
            yield
        finally:
            for layer in self.layers:
                vars(layer.module).pop("forward", None)

    def missing(self) -> set[int]:
        """Return the layers whose gradients the pass did not give."""
        twice = {index for index, times in self.passed.items() if times > 1}
        return self.unfit | twice | (set(range(len(self.layers))) - self.inputs.keys())

    def _forward(self, index: int, layer: LinearLayer, parameters: list[Tensor]) -> object:
        module = layer.module

        def count(gradient: Tensor) -> None:
            self.passed[index] += 1

        def forward(input: Tensor) -> Tensor:
            bias = module.bias if layer.bias is None else parameters[layer.bias]
            output = functional.linear(input, parameters[layer.weight], bias)
            if not torch.is_grad_enabled():
                return output
            again = index in self.inputs
            deeper = torch._C._functorch.maybe_current_level() != self.level
            if again or deeper or output.shape != self.zeros[index].shape:
                self.unfit.add(index)
                return output
            self.inputs[index] = input
            output = output + self.zeros[index].to(output.dtype)
            output.register_hook(count)
            return output

        return forward


@dataclass
class Gradients:
    """Gradients of b samples.

    Args:
        whole: ``(b, R)``, of all parameters but those of ``layers``.
        columns: the places of these R numbers among the D.
        factors: of each layer the places of weight and bias among the D, a ``(b, in)``, and g
            ``(b, out)``, both float64.
    """

    whole: Tensor
    columns: list[slice]
    factors: list[tuple[slice, slice | None, Tensor, Tensor]]

    def norms(self) -> Tensor:
        """Return ``(b,)``, float64."""
        total = self.whole.new_zeros(len(self.whole), dtype=torch.float64)
        if self.columns:
            # One sample at a time, so that its numbers in float64 stay in the processor's cache.
            wide = self.whole.new_empty(self.whole.shape[1], dtype=torch.float64)
            for square, gradient in zip(total, self.whole, strict=True):
                torch.sum(wide.copy_(gradient).square_(), 0, out=square)
        for _, bias, a, g in self.factors:
            ones = 0 if bias is None else 1
            of_g, of_a = (torch.linalg.vector_norm(each, dim=1).square() for each in (g, a))
            total += of_g * (of_a + ones)
        return total.sqrt_()

    def add(self, scales: Tensor, total: Tensor) -> None:
        """Add the samples' gradients times ``scales`` ``(b,)`` to ``total`` ``(D,)``.

        A sample whose scale is 0 is left out, also if its gradient is not finite.
        """
        used = scales != 0
        some = not bool(used.all())
        for weight, bias, a, g in self.factors:
            a, g = (a[used], g[used]) if some else (a, g)
            scaled = g * (scales[used] if some else scales)[:, None]
            total[weight].view(g.shape[1], a.shape[1]).addmm_(scaled.T, a)
            if bias is not None:
                total[bias] += scaled.sum(0)
        if not self.columns:
            return
        wide = total.new_empty(self.whole.shape[1])
        summed = torch.zeros_like(wide)
        for gradient, scale in zip(self.whole, scales.tolist(), strict=True):
            if scale:
                summed.add_(wide.copy_(gradient), alpha=scale)
        start = 0
        for column in self.columns:
            stop = start + column.stop - column.start
            total[column] += summed[start:stop]
            start = stop
