"""LeNet, as in the simulator of FedInit's and FedSMOO's authors for CIFAR-10.

No table of their papers has this network.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from fl_lightning.accepted import PositiveInt
from fl_lightning.errors import UserError
from fl_lightning.introspection.init_args import Given


class LeNet(Given, nn.Module):
    """Two 5x5 convolutions of 64 channels, each with 2x2 max pooling, then three linear layers.

    The three linear layers have 384, 192 and ``num_classes`` units. Inputs are ``(n, in_channels,
    input_size, input_size)``; for ten classes of 3x32x32 there are 797,962 parameters.

    Args:
        channels: of both convolutions; 16 is the size in the small sweeps, with 237,466 parameters.
    """

    # On a CPU this shortens a step to 0.8 to 0.9 of its time.
    prefers_channels_last = True
    # Pixels per side; a smaller image has no pixels left after both poolings.
    smallest_input = 16

    def __init__(
        self,
        num_classes: int,
        in_channels: int = 3,
        input_size: int = 32,
        channels: PositiveInt = 64,
    ) -> None:
        super().__init__()
        # Each convolution removes four pixels per side, and each pooling halves the rest.
        side = ((input_size - 4) // 2 - 4) // 2
        if input_size < self.smallest_input:
            raise UserError(
                f"LeNet's input_size is {input_size}: give at least {self.smallest_input}, or use "
                "MLP for smaller images."
            )
        self.conv1 = nn.Conv2d(in_channels, channels, 5)
        self.conv2 = nn.Conv2d(channels, channels, 5)
        self.fc1 = nn.Linear(channels * side * side, 384)
        self.fc2 = nn.Linear(384, 192)
        self.fc3 = nn.Linear(192, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(torch.relu(self.conv1(x)), 2)
        x = max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        x = torch.relu(self.fc2(x))
        y: Tensor = self.fc3(x)
        return y
