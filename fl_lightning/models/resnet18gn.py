"""ResNet-18 with group normalisation (Hsieh et al., 2020), torchvision's network."""

from __future__ import annotations

from functools import partial

from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from fl_lightning.introspection.init_args import Given
from fl_lightning.models.padded_convolution import leave_out_dead_taps


class ResNet18GN(Given, ResNet):  # type: ignore[misc]  # torchvision has no types
    """torchvision's ResNet-18 with ``GroupNorm(groups)``.

    For ten classes of three channels it has 11,181,642 parameters.

    Args:
        live_taps: leave out taps of convolutions that meet only padding: the same function, a
            quarter faster on 32x32 images.
    """

    def __init__(
        self, num_classes: int, groups: int = 2, live_taps: bool = True, in_channels: int = 3
    ) -> None:
        super().__init__(
            BasicBlock,
            [2, 2, 2, 2],
            num_classes=num_classes,
            norm_layer=partial(nn.GroupNorm, groups),
        )
        if in_channels != 3:
            self.conv1 = nn.Conv2d(in_channels, 64, 7, 2, 3, bias=False)
            # torchvision initialises it in this way.
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        if live_taps:
            leave_out_dead_taps(self)
