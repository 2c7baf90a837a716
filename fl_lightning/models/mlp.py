"""Multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from fl_lightning.errors import UserError
from fl_lightning.introspection.init_args import Given


class MLP(Given, nn.Module):
    """Linear layers with ReLU between; inputs ``(n, …)`` are flattened to ``(n, sizes[0])``."""

    def __init__(self, sizes: Sequence[int] = (784, 200, 200, 10)) -> None:
        if len(sizes) < 2 or None in sizes or min(sizes) < 1:
            raise UserError(
                f"MLP's sizes is {list(sizes)}: give at least two numbers from 1, input and output."
            )
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__()
        # The last layer's outputs are logits, so no ReLU follows it.
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x.flatten(1))
        return y
