"""Convolutions that leave out taps which meet only padding, on maps of one or two pixels."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear


class LiveTaps(nn.Conv2d):
    """A 3x3 convolution with padding 1 (and no bias, dilation or groups).

    This layer computes the same function as torch's, with the same weights and gradients. On 1x1
    maps only the centre tap meets data, and on 2x2 maps with stride 2 only four taps do; the others
    have gradient 0. In ResNet-18 with 32x32 inputs these are 62 % of all weights. Results differ
    from Conv2d's by rounding.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Take maps ``(n, inputs, height, width)``."""
        if x.shape[-2:] == (1, 1) and self.stride == (1, 1):
            return linear(x.flatten(1), self.weight[:, :, 1, 1])[:, :, None, None]
        if x.shape[-2:] == (2, 2) and self.stride == (2, 2):
            return linear(x.flatten(1), self.weight[:, :, 1:, 1:].flatten(1))[:, :, None, None]
        return super().forward(x)


def leave_out_dead_taps(network: nn.Module) -> None:
    """Convert a network's 3x3 convolutions with padding 1 to :class:`LiveTaps`.

    Parameters and names do not change.
    """
    for module in network.modules():
        # The forward of a subclass may compute something else.
        if type(module) is not nn.Conv2d or module.bias is not None or module.groups != 1:
            continue
        sizes = (module.kernel_size, module.padding, module.dilation)
        if sizes == ((3, 3), (1, 1), (1, 1)):
            module.__class__ = LiveTaps
