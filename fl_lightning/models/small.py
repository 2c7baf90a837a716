"""Small networks for images, and a perceptron.

LeNet is that of the simulator of FedInit's and FedSMOO's authors for CIFAR-10; no table of their
papers has it. The ResNets are those of He et al. (2016, § 4.2): ResNet-20 with BatchNorm is as in
FedALS, the others are variants of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import AtLeast, PositiveInt
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


class FedAvgCNN(Given, nn.Module):
    """PFLlib's network: 5x5 convolutions of 32 and 64 channels, each with 2x2 max pooling, then 512
    units and ``num_classes``.

    The convolutions have no padding, unlike those of McMahan et al. (2017). Inputs are ``(n,
    in_channels, input_size, input_size)``; for ten classes of 1x28x28 there are 582,026 parameters.
    """

    def __init__(self, num_classes: int, in_channels: int = 1, input_size: int = 28) -> None:
        super().__init__()
        # Each convolution removes four pixels per side, and each pooling halves the rest.
        side = ((input_size - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(in_channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * side * side, 512)
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = max_pool2d(torch.relu(self.conv1(x)), 2)
        x = max_pool2d(torch.relu(self.conv2(x)), 2)
        y: Tensor = self.fc(torch.relu(self.fc1(x.flatten(1))))
        return y


class MLP(Given, nn.Module):
    """Linear layers with ReLU between; inputs ``(n, …)`` are flattened to ``(n, sizes[0])``."""

    def __init__(self, sizes: Sequence[int] = (784, 200, 200, 10)) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__()
        # The last layer's outputs are logits, so no ReLU follows it.
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x.flatten(1))
        return y


class VGG11(Given, nn.Module):
    """VGG-11's eight convolutions (Simonyan & Zisserman, 2015, configuration A), without norms.

    Inputs are ``(n, in_channels, height, width)`` of up to 32 pixels per side. The pooling layers
    round up, so smaller images also end with one pixel. The head is 512-512-512- ``num_classes``,
    as is usual for CIFAR (the federated papers publish no definition): 9,750,922 parameters for ten
    classes of three channels.
    """

    # Pixels per side; a larger image would leave more than one pixel for the head.
    largest_input = 32

    def __init__(self, num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for stage in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
            for width in stage:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, num_classes),
        )
        for module in self.features:
            # Without norms, a network with PyTorch's default initialisation hardly learns.
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classifier(self.features(x).flatten(1))
        return y


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
        # If maps shrink, the number of channels grows, and the new channels are zeros.
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
        depth: Annotated[int, AtLeast(8)] = 20,
        width: PositiveInt = 16,
    ) -> None:
        if depth % 6 != 2 or width % 2:
            raise UserError(
                f"ResNet20: depth={depth} has to be 6 k + 2, such as 20, 32, 44, 56, and "
                f"width={width} an even number."
            )
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
