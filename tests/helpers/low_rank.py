"""A small network with adapters, made without peft: float64, biases trained beside."""

from __future__ import annotations

import math
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn


class LowRank(nn.Module):
    """y = (W + scaling B A) x + bias: W is frozen, A, B and bias are trained; B is 0 at first."""

    def __init__(self, d_in: int, out: int, rank: int, scaling: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, d_in) / math.sqrt(d_in), requires_grad=False)
        self.bias = nn.Parameter(0.1 * torch.randn(out))
        self.lora_A = nn.Parameter(torch.randn(rank, d_in) / math.sqrt(d_in))
        self.lora_B = nn.Parameter(torch.zeros(out, rank))
        self.scaling = scaling

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.linear(x, self.weight, self.bias)
        return out + self.scaling * (x @ self.lora_A.T) @ self.lora_B.T


class OfDigits(pl.LightningModule):
    """Two adapters on 8 × 8 pictures of ten classes, float32, with a metric of validation."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.first = LowRank(64, 16, 3, 0.7)
            self.head = LowRank(16, 10, 2, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x.flatten(1))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        # The fewer rounds the run has, the longer its steps.
        lr = 0.3 / (self.trainer.max_epochs or 1)
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=lr)


class Adapted(pl.LightningModule):
    """Two adapters of ranks 3 and 2 with scales 0.7 and 1.5: 3 inputs, 5 hidden, 4 classes."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.first = LowRank(3, 5, 3, 0.7)
            self.head = LowRank(5, 4, 2, 1.5)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)
