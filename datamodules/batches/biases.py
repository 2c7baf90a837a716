"""Biases of the clients' training images (FedInit: Sun et al., 2023, § 5), before normalisation.

A bias changes whole tensors of pixels in [0, 1] and clips to that range; test data do not change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from fl_lightning.datamodules.batches.samples import Change, TensorSamples
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import Checked, NonNegativeFloat
from fl_lightning.machine.device_memory import to_device
from fl_lightning.sampling import generator


class Bias(Checked, ABC):
    """Base class of biases."""

    def __init__(self, std: NonNegativeFloat) -> None:
        self.std = std

    @abstractmethod
    def __call__(self, x: Tensor, y: Tensor, client: int, seed: int) -> Tensor:
        """Return a client's pixels x ``(n, channels, …)`` in [0, 1], biased; y ``(n,)``: labels."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(std={self.std})"


class ClientBias(Bias):
    """Client i multiplies colour channel k by max(0, 1 + std·z_ik), z standard normal."""

    def __call__(self, x: Tensor, y: Tensor, client: int, seed: int) -> Tensor:
        z = generator(seed, "client-bias", client).standard_normal(x.shape[1])
        factors = to_device(np.maximum(0.0, 1 + self.std * z), x.device, x.dtype)
        return (x * factors.view(1, -1, *[1] * (x.ndim - 2))).clamp_(0, 1)


class CategoryBias(Bias):
    """For all clients, samples of class y are brighter by std·z_y, z standard normal."""

    classes = 0  # of the training samples, once they are known

    def __call__(self, x: Tensor, y: Tensor, client: int, seed: int) -> Tensor:
        if len(y) == 0:
            return x
        # The stream's first numbers are the same for any length. Reading y on a GPU would wait for
        # all that was queued before.
        number = self.classes if y.is_cuda and self.classes else int(y.max()) + 1
        z = generator(seed, "category-bias").standard_normal(number)
        shift = to_device(self.std * z, x.device, x.dtype)[y]
        return (x + shift.view(-1, *[1] * (x.ndim - 1))).clamp_(0, 1)


def check_biases(biases: Sequence[Bias], data: Any) -> None:
    """Refuse biases for data that are not labelled images in memory."""
    if biases and not (
        isinstance(data, TensorSamples) and data.in_pixel_range and data.labels is not None
    ):
        raise UserError(
            f"biases is {list(biases)}, but they are for labelled images in memory, as uint8 or "
            "floats in [0, 1], with channels first: give biases=[] for these data."
        )
    for bias in biases:
        if isinstance(bias, CategoryBias) and len(data.labels):
            bias.classes = int(data.labels.max()) + 1


def biased(biases: Sequence[Bias], client: int, seed: int) -> Change:
    """Apply all biases to a client's batches."""

    def apply(x: Tensor, y: Tensor, part: slice) -> Tensor:
        for bias in biases:
            x = bias(x, y, client, seed)
        return x

    return apply
