"""RandAugment's operations (Cubuk et al., 2020), as in torchvision.

torchvision's own class draws from the process's generator, which belongs to the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from torch import Tensor

# Takes a uint8 picture (channels, height, width) and a strength from -1 to 1.
Operation = Callable[[Tensor, float], Tensor]
STRONGEST = 30
# The operations 1 to 9 have a direction.
SIGNED = range(1, 10)


def changed(picture: Tensor, operations: int, magnitude: int, rng: np.random.Generator) -> Tensor:
    """Return a picture uint8 ``(channels, height, width)`` after so many operations drawn by
    ``rng``.
    """
    every = all_operations()
    places = rng.integers(len(every), size=operations)
    for place, sign in zip(places, rng.random(operations), strict=True):
        share = magnitude / STRONGEST
        picture = every[place](picture, -share if place in SIGNED and sign < 0.5 else share)
    return picture


@cache
def all_operations() -> tuple[Operation, ...]:
    """Return RandAugment's fourteen operations, in torchvision's order."""
    from torchvision.transforms import functional

    def moved(picture: Tensor, across: float, down: float) -> Tensor:
        (_, height, width) = picture.shape
        pixels = [int(150 / 331 * width * across), int(150 / 331 * height * down)]
        made: Tensor = functional.affine(picture, 0.0, pixels, 1.0, [0.0, 0.0])
        return made

    def sheared(picture: Tensor, across: float, down: float) -> Tensor:
        degrees = [math.degrees(math.atan(0.3 * share)) for share in (across, down)]
        # The upper left corner stays fixed, as in AutoAugment.
        made: Tensor = functional.affine(picture, 0.0, [0, 0], 1.0, degrees, center=[0, 0])
        return made

    return (
        lambda picture, share: picture,
        lambda picture, share: sheared(picture, share, 0.0),
        lambda picture, share: sheared(picture, 0.0, share),
        lambda picture, share: moved(picture, share, 0.0),
        lambda picture, share: moved(picture, 0.0, share),
        lambda picture, share: functional.rotate(picture, 30.0 * share),
        lambda picture, share: functional.adjust_brightness(picture, 1.0 + 0.9 * share),
        lambda picture, share: functional.adjust_saturation(picture, 1.0 + 0.9 * share),
        lambda picture, share: functional.adjust_contrast(picture, 1.0 + 0.9 * share),
        lambda picture, share: functional.adjust_sharpness(picture, 1.0 + 0.9 * share),
        lambda picture, share: functional.posterize(picture, 8 - round(4 * share)),
        lambda picture, share: functional.solarize(picture, 255.0 * (1.0 - share)),
        lambda picture, share: functional.autocontrast(picture),
        lambda picture, share: functional.equalize(picture),
    )
