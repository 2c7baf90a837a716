"""VGG-11 for images of up to 32x32 pixels."""

from __future__ import annotations

from torch import Tensor, nn

from fl_lightning.introspection.init_args import Given


class VGG11(Given, nn.Module):
    """The eight convolutions of VGG-11 (Simonyan & Zisserman, 2015, configuration A), without
    norms.

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
