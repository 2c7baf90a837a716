"""ResNet-20 for 32x32 images (He et al., 2016, § 4.2), with BatchNorm, as in FedALS."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


class _Block(nn.Module):
    """Two 3x3 convolutions; the shortcut has no parameters (option A: subsampled, padded with zeros)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.added = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.added:
            x = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added // 2, self.added // 2))
        return torch.relu(y + x)


class ResNet20(nn.Module):
    """Nine blocks of 16, 32, 64 channels; inputs ``(n, 3, 32, 32)``; 269,722 parameters for ten classes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        self.blocks = nn.Sequential(*[_Block(a, b) for a, b in pairwise(widths)])
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.bn1(self.conv1(x))))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y
