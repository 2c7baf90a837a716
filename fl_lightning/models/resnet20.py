"""ResNets for small images (He et al., 2016, § 4.2).

ResNet-20 with BatchNorm is as in FedALS; the others are variants of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fl_lightning.errors import UserError
from fl_lightning.introspection.init_args import Given

# Number of groups in group normalisation, as in ResNet18GN.
GROUPS = 2


def _norm(norm: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(GROUPS, channels)


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters.

    The shortcut is option A of the paper: the input is subsampled, and padded with zeros.
    """

    def __init__(self, inputs: int, outputs: int, norm: str) -> None:
        super().__init__()
        self.stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, 1, bias=False)
        self.bn1 = _norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = _norm(norm, outputs)
        self.added = outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        # Where maps shrink, the number of channels grows: the new channels are zeros.
        if self.added:
            channels = self.added // 2
            x = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, channels, channels))
        return torch.relu(y + x)


class ResNet20(Given, nn.Module):
    """Blocks of ``width``, 2 ``width``, 4 ``width`` channels.

    Inputs are ``(n, in_channels, height, width)`` of any size. For ten classes of three channels
    it has 269,722 parameters.

    Args:
        norm: ``"batch"``: BatchNorm; ``"group"``: GroupNorm with two groups.
        depth: 6 k + 2 for k blocks of each width: 20, 32, 44, 56, 110.
        width: channels of the first blocks; an even number.

    Raises:
        UserError: norm, depth or width is not accepted.
    """

    # On a CPU this shortens a step to 0.85 to 1 of its time.
    prefers_channels_last = True

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        norm: Literal["batch", "group"] = "batch",
        depth: int = 20,
        width: int = 16,
    ) -> None:
        if depth < 8 or depth % 6 != 2:
            raise UserError(f"ResNet20's depth is {depth}: give 6 k + 2, such as 20, 32, 44, 56.")
        if width < 2 or width % 2:
            raise UserError(f"ResNet20's width is {width}: give an even number from 2, such as 16.")
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, 1, 1, bias=False)
        self.bn1 = _norm(norm, width)
        blocks = (depth - 2) // 6
        widths = [width] * (blocks + 1) + [2 * width] * blocks + [4 * width] * blocks
        self.blocks = nn.Sequential(*[_Block(a, b, norm) for a, b in pairwise(widths)])
        self.fc = nn.Linear(4 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(torch.relu(self.bn1(self.conv1(x))))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y
