"""Augmentation of whole tensors of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning.accepted import NonNegativeInt, UnitInterval, check, checked, declared
from fl_lightning.datamodules.batches.samples import Change
from fl_lightning.errors import UserError, suggest
from fl_lightning.machine.device_memory import to_device


@dataclass(frozen=True)
class Draws:
    """Random draws for n images: offsets (row, column) into the padded image ``(n, 2)``, and which
    images are flipped ``(n,)``.
    """

    offsets: NDArray[np.int64]
    flips: NDArray[np.bool_]

    def __getitem__(self, part: slice) -> Draws:
        return Draws(self.offsets[part], self.flips[part])


@checked
@dataclass(frozen=True)
class CropFlip:
    """Random crop with zero padding, then a horizontal flip with probability 1/2 if ``flip``.

    Args:
        padding: pixels on each side.
        probability: probability that an image is cropped; otherwise it does not change.
    """

    padding: NonNegativeInt = 4
    flip: bool = True
    probability: UnitInterval = 1.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CropFlip:
        """Build it from the option ``augment``, a mapping; keys that it leaves out have their
        defaults.

        >>> CropFlip.of({"flip": False})
        CropFlip(padding=4, flip=False, probability=1.0)

        Raises:
            UserError: a key is not known, or a value is not accepted.
        """
        known = declared(cls.__init__)
        for key, value in given.items():
            if key not in known:
                raise UserError(
                    f"data.augment: the key {key!r} is not known; accepted are {', '.join(known)}."
                    + suggest(str(key), known)
                )
            check(f"data.augment.{key}", value, known[key])
        return cls(**given)

    def draw(self, rng: np.random.Generator, n: int) -> Draws:
        flips = rng.random(n) < 0.5 if self.flip else np.zeros(n, dtype=bool)
        offsets = rng.integers(0, 2 * self.padding + 1, (n, 2))
        if self.probability < 1:
            offsets[rng.random(n) >= self.probability] = self.padding  # the image itself
        return Draws(offsets, flips)

    def apply(self, x: Tensor, draws: Draws) -> Tensor:
        """Return the augmented images x ``(n, channels, height, width)`` of any dtype, in a new
        tensor.
        """
        p = self.padding
        (height, width) = x.shape[-2:]
        offsets = to_device(draws.offsets, x.device)
        windows = pad(x, (p, p, p, p)).unfold(2, height, 1).unfold(3, width, 1)
        x = windows[torch.arange(len(x), device=x.device), :, offsets[:, 0], offsets[:, 1]]
        if self.flip:
            x = torch.where(to_device(draws.flips, x.device).view(-1, 1, 1, 1), x.flip(-1), x)
        return x


def augmented(augmentation: CropFlip, rng: np.random.Generator, samples: int) -> Change:
    """Augment the batches of one epoch. All draws of the epoch are made at once, so the chunks do
    not matter.
    """
    draws = augmentation.draw(rng, samples)
    return lambda x, y, part: augmentation.apply(x, draws[part])
