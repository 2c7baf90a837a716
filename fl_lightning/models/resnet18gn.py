"""ResNet-18 with BatchNorm or group normalisation (Hsieh et al., 2020), torchvision's network."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import linear
from torchvision.models.resnet import BasicBlock, ResNet

from fl_lightning.introspection.init_args import Given


class ResNet18(Given, ResNet):  # type: ignore[misc]  # torchvision has no types
    """torchvision's ResNet-18; for small images its first convolution is 3x3, without pooling.

    For ten classes of three channels it has 11,173,962 parameters.

    Args:
        norm: ``"batch"``: BatchNorm; ``"group"``: GroupNorm with ``groups``.
        stem: ``"cifar"``: a 3x3 convolution with stride 1; ``"imagenet"``: torchvision's, 7x7 with
            stride 2 and then max pooling, which leaves little of a small image.
        live_taps: leave out taps of convolutions that meet only padding: the same function, with
            ``"imagenet"`` a quarter faster on 32x32 images.
    """

    def __init__(
        self,
        num_classes: int,
        norm: Literal["batch", "group"] = "batch",
        groups: int = 2,
        stem: Literal["cifar", "imagenet"] = "cifar",
        live_taps: bool = True,
        in_channels: int = 3,
    ) -> None:
        layer = partial(nn.GroupNorm, groups) if norm == "group" else nn.BatchNorm2d
        super().__init__(BasicBlock, [2, 2, 2, 2], num_classes=num_classes, norm_layer=layer)
        if stem == "cifar":
            self.conv1 = nn.Conv2d(in_channels, 64, 3, 1, 1, bias=False)
            self.maxpool = nn.Identity()
        elif in_channels != 3:
            self.conv1 = nn.Conv2d(in_channels, 64, 7, 2, 3, bias=False)
        if stem == "cifar" or in_channels != 3:
            # torchvision initialises it in this way.
            nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        if live_taps:
            leave_out_dead_taps(self)


class ResNet18GN(ResNet18):
    """torchvision's ResNet-18 with ``GroupNorm(groups)``, and its stem for large images.

    For ten classes of three channels it has 11,181,642 parameters. The arguments are those of
    :class:`ResNet18`.
    """

    def __init__(
        self, num_classes: int, groups: int = 2, live_taps: bool = True, in_channels: int = 3
    ) -> None:
        super().__init__(num_classes, "group", groups, "imagenet", live_taps, in_channels)


class LiveTaps(nn.Conv2d):
    """A 3x3 convolution with padding 1 (and no bias, dilation or groups).

    This layer computes the same function as torch's, with the same weights and gradients. On 1x1
    maps only the centre tap meets data, and on 2x2 maps with stride 2 only four taps do; the others
    have gradient 0. In ResNet-18 with 32x32 inputs these are 62 % of all weights. Results differ
    from Conv2d's by rounding.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] == (1, 1) and self.stride == (1, 1):
            return linear(x.flatten(1), self.weight[:, :, 1, 1])[:, :, None, None]
        if x.shape[-2:] == (2, 2) and self.stride == (2, 2):
            return linear(x.flatten(1), self.weight[:, :, 1:, 1:].flatten(1))[:, :, None, None]
        return super().forward(x)


def leave_out_dead_taps(network: nn.Module) -> None:
    """Make 3x3 convolutions with padding 1 :class:`LiveTaps`; parameters and names stay."""
    for module in network.modules():
        # The forward of a subclass may compute something else.
        if type(module) is not nn.Conv2d or module.bias is not None or module.groups != 1:
            continue
        sizes = (module.kernel_size, module.padding, module.dilation)
        if sizes == ((3, 3), (1, 1), (1, 1)):
            module.__class__ = LiveTaps
