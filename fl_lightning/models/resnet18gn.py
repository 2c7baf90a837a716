"""ResNet-18 with group normalisation (Hsieh et al., 2020), torchvision's network."""

from __future__ import annotations

from functools import partial

from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet


class ResNet18GN(ResNet):  # type: ignore[misc]  # torchvision has no types
    """torchvision's ResNet-18 with ``GroupNorm(groups)``: 11,181,642 parameters for ten classes."""

    def __init__(self, num_classes: int, groups: int = 2) -> None:
        super().__init__(BasicBlock, [2, 2, 2, 2], num_classes=num_classes, norm_layer=partial(nn.GroupNorm, groups))
