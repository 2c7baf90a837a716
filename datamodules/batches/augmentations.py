"""Augmentations of training batches by name: crop, flip, randaugment, mixup, cutmix."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot, pad

from fl_lightning.datamodules.batches.samples import Batch, Change
from fl_lightning.errors import UserError, suggest
from fl_lightning.introspection.accepted import (
    AtLeast,
    AtMost,
    NonNegativeInt,
    PositiveFloat,
    UnitInterval,
    checked,
)
from fl_lightning.machine.device_memory import to_device


def made_of(cls: Any, where: str, arguments: Mapping[str, Any]) -> Any:
    """Return an object of these arguments.

    Raises:
        UserError: one is not known; ``where`` is the place in the error.
    """
    known = [field.name for field in fields(cls)]
    for key in arguments:
        if key not in known:
            raise UserError(
                f"{where} has no argument {key!r}; it has {', '.join(known)}.{suggest(key, known)}"
            )
    return cls(**arguments)


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
        """Build it from the option ``augment``, a mapping; missing keys have their defaults.

        >>> CropFlip.of({"flip": False})
        CropFlip(padding=4, flip=False, probability=1.0)

        Raises:
            UserError: a key is not known, or a value is not accepted.
        """
        made: CropFlip = made_of(cls, "data.augment", given)
        return made

    def draw(self, rng: np.random.Generator, n: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return offsets (row, column) into padded images ``(n, 2)``, and flips ``(n,)``."""
        flips = rng.random(n) < 0.5 if self.flip else np.zeros(n, dtype=bool)
        offsets = rng.integers(0, 2 * self.padding + 1, (n, 2))
        if self.probability < 1:
            offsets[rng.random(n) >= self.probability] = self.padding  # the image itself
        return offsets, flips

    def apply(self, x: Tensor, offsets: NDArray[np.int64], flips: NDArray[np.bool_]) -> Tensor:
        """Return the augmented images x ``(n, channels, height, width)``, in a new tensor."""
        p = self.padding
        (height, width) = x.shape[-2:]
        at = to_device(offsets, x.device)
        windows = pad(x, (p, p, p, p)).unfold(2, height, 1).unfold(3, width, 1)
        x = windows[torch.arange(len(x), device=x.device), :, at[:, 0], at[:, 1]]
        if self.flip:
            x = torch.where(to_device(flips, x.device).view(-1, 1, 1, 1), x.flip(-1), x)
        return x


def augmented(augmentation: CropFlip, rng: np.random.Generator, samples: int) -> Change:
    """Augment an epoch's batches. It draws for the whole epoch, so chunks do not matter."""
    offsets, flips = augmentation.draw(rng, samples)
    return lambda x, y, part: augmentation.apply(x, offsets[part], flips[part])


# Takes a uint8 picture (channels, height, width) and a strength from -1 to 1.
Operation = Callable[[Tensor, float], Tensor]
STRONGEST = 30
# The operations 1 to 9 have a direction.
SIGNED = range(1, 10)


def changed(picture: Tensor, operations: int, magnitude: int, rng: np.random.Generator) -> Tensor:
    """Return a picture uint8 ``(channels, height, width)`` after operations drawn by ``rng``."""
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


@dataclass(frozen=True)
class Pixels:
    """The normalisation of x: (pixel in [0, 1] − mean) / std, one number per channel or none."""

    mean: Sequence[float] = ()
    std: Sequence[float] = ()

    def _of(self, values: Sequence[float], x: Tensor, default: float) -> Tensor:
        return to_device(list(values) or [default], x.device, torch.float32).view(1, -1, 1, 1)

    def zero(self, x: Tensor) -> Tensor:
        """Return black as a normalised value ``(1, channels or 1, 1, 1)``."""
        return -self._of(self.mean, x, 0.0) / self._of(self.std, x, 1.0)

    def to_bytes(self, x: Tensor) -> Tensor:
        """x as uint8.

        Raises:
            UserError: the values are not pixels in [0, 1].
        """
        pixels = x * self._of(self.std, x, 1.0) + self._of(self.mean, x, 0.0)
        low, high = float(pixels.min()), float(pixels.max())
        if low < -1e-4 or high > 1 + 1e-4:
            raise UserError(
                f"data.augment: randaugment changes pixels from 0 to 1, and x are from {low:.3g} "
                f"to {high:.3g}. Give pictures as uint8 or in [0, 1]; or say by which mean and "
                "deviation per channel x is normalised: {randaugment: {mean: [0.5], std: [0.2]}}."
            )
        return (pixels * 255).round().clamp(0, 255).to(torch.uint8)

    def from_bytes(self, pixels: Tensor) -> Tensor:
        x = pixels.float() / 255
        return (x - self._of(self.mean, x, 0.0)) / self._of(self.std, x, 1.0)


@checked
@dataclass(frozen=True)
class Crop:
    """Crop a window of the picture's size at random from the picture with a frame.

    Args:
        padding: width of the frame on each side, in pixels.
        probability: probability that a picture is cropped.
        frame: ``"black"``, or ``"mean"``: the data's mean colour, which is 0 after normalisation.
    """

    padding: NonNegativeInt = 4
    probability: UnitInterval = 1.0
    frame: Literal["black", "mean"] = "black"

    def __call__(
        self, x: Tensor, y: Tensor, rng: np.random.Generator, pixels: Pixels
    ) -> tuple[Tensor, Tensor]:
        (n, _channels, height, width) = x.shape
        p = self.padding
        places = rng.integers(0, 2 * p + 1, (n, 2))
        places[rng.random(n) >= self.probability] = p
        framed = pad(x, (p, p, p, p))
        if self.frame == "black":
            framed = pixels.zero(x).to(x.dtype).expand_as(framed).clone()
            framed[..., p : p + height, p : p + width] = x
        windows = framed.unfold(2, height, 1).unfold(3, width, 1)
        at = to_device(places, x.device)
        return windows[torch.arange(n, device=x.device), :, at[:, 0], at[:, 1]], y


@checked
@dataclass(frozen=True)
class Flip:
    """Exchange left and right, with a probability."""

    probability: UnitInterval = 0.5

    def __call__(
        self, x: Tensor, y: Tensor, rng: np.random.Generator, pixels: Pixels
    ) -> tuple[Tensor, Tensor]:
        flips = to_device(rng.random(len(x)) < self.probability, x.device)
        return torch.where(flips.view(-1, 1, 1, 1), x.flip(-1), x), y


@checked
@dataclass(frozen=True)
class RandAugment:
    """Apply operations on colours and shape, drawn per picture (Cubuk et al., 2020).

    Args:
        operations: number of operations, one after the other.
        magnitude: strength of the operations, 0 to 30.
        mean, std: by which x is normalised, one number per channel; empty: the data module's.
    """

    operations: NonNegativeInt = 2
    magnitude: Annotated[int, AtLeast(0), AtMost(30)] = 9
    mean: Sequence[float] = ()
    std: Sequence[float] = ()

    def __call__(
        self, x: Tensor, y: Tensor, rng: np.random.Generator, pixels: Pixels
    ) -> tuple[Tensor, Tensor]:
        if self.mean or self.std:
            pixels = Pixels(self.mean, self.std)
        # The operations read values of each picture, for which a GPU would wait each time.
        pictures = pixels.to_bytes(x.cpu())
        made = [changed(one, self.operations, self.magnitude, rng) for one in pictures]
        return pixels.from_bytes(to_device(torch.stack(made), x.device)).to(x.dtype), y


@checked
@dataclass(frozen=True)
class Mixup:
    """Mix x and labels of two samples of the batch with weights λ, 1 − λ; λ ~ Beta(alpha, alpha).

    H. Zhang et al., 2018. One λ per batch.
    """

    alpha: PositiveFloat = 0.2
    probability: UnitInterval = 1.0

    def __call__(
        self, x: Tensor, y: Tensor, rng: np.random.Generator, pixels: Pixels
    ) -> tuple[Tensor, Tensor]:
        share = rng.beta(self.alpha, self.alpha)
        other = to_device(rng.permutation(len(x)), x.device)
        if rng.random() >= self.probability:
            return x, y
        return share * x + (1 - share) * x[other], share * y + (1 - share) * y[other]


@checked
@dataclass(frozen=True)
class Cutmix:
    """Paste a box of another picture of the batch, and mix labels by area (Yun et al., 2019)."""

    alpha: PositiveFloat = 1.0
    probability: UnitInterval = 1.0

    def __call__(
        self, x: Tensor, y: Tensor, rng: np.random.Generator, pixels: Pixels
    ) -> tuple[Tensor, Tensor]:
        half = 0.5 * np.sqrt(1 - rng.beta(self.alpha, self.alpha))
        (height, width) = x.shape[-2:]
        middle = (int(rng.integers(height)), int(rng.integers(width)))
        other = to_device(rng.permutation(len(x)), x.device)
        if rng.random() >= self.probability:
            return x, y
        top, bottom = _ends(middle[0], half, height)
        left, right = _ends(middle[1], half, width)
        mixed = x.clone()
        mixed[..., top:bottom, left:right] = x[other][..., top:bottom, left:right]
        share = 1 - (bottom - top) * (right - left) / (height * width)
        return mixed, share * y + (1 - share) * y[other]


def _ends(middle: int, half: float, size: int) -> tuple[int, int]:
    reach = int(half * size)
    return max(middle - reach, 0), min(middle + reach, size)


Named = Crop | Flip | RandAugment | Mixup | Cutmix
# These mix samples of a batch.
MIXING = (Mixup, Cutmix)
NAMES: dict[str, type[Named]] = {
    "crop": Crop,
    "flip": Flip,
    "randaugment": RandAugment,
    "mixup": Mixup,
    "cutmix": Cutmix,
}


def augmentations_of(given: Any) -> tuple[Named, ...]:
    """Build them from the option ``augment``: names, or ``{name: {argument: value}}``, in order.

    >>> augmentations_of(["flip", {"crop": {"padding": 2}}])
    (Flip(probability=0.5), Crop(padding=2, probability=1.0, frame='black'))

    Raises:
        UserError: a name, argument or value is not accepted.
    """
    made = []
    for item in [given] if isinstance(given, str | Mapping) else list(given):
        for name, arguments in (item if isinstance(item, Mapping) else {item: None}).items():
            if name not in NAMES:
                raise UserError(
                    f"data.augment has {name!r}, which is not an augmentation; there are "
                    f"{', '.join(NAMES)}.{suggest(str(name), NAMES)}"
                )
            made.append(made_of(NAMES[name], f"data.augment: {name}", arguments or {}))
    return tuple(made)


def augmented_batches(
    batches: Iterable[Batch],
    named: Sequence[Named],
    draws: Callable[[int], np.random.Generator],
    pixels: Pixels,
    classes: int | None,
) -> Iterator[Batch]:
    """A client's batches ``(x, y)``, augmented.

    With mixup or cutmix y becomes shares of the classes ``(n, classes)``. If both are named, each
    batch uses one of the two.

    Args:
        draws: function that returns the generator of the k-th batch.

    Raises:
        UserError: x are not pictures, or y are not classes.
    """
    mixing = [one for one in named if isinstance(one, MIXING)]
    for k, batch in enumerate(batches):
        rng = draws(k)
        chosen = mixing[int(rng.integers(len(mixing)))] if len(mixing) > 1 else None
        x, y = _checked(batch, mixing, classes)
        for one in named:
            if chosen is None or one not in mixing or one is chosen:
                x, y = one(x, y, rng, pixels)
        yield [x, y] if isinstance(batch, list) else (x, y)


def _checked(batch: Batch, mixing: Sequence[Named], classes: int | None) -> tuple[Tensor, Tensor]:
    """Return x and y; for mixed samples y holds the shares of the classes."""
    pair = isinstance(batch, tuple | list) and len(batch) == 2
    x: Any
    y: Any
    x, y = batch if pair else (batch, None)
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
        what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise UserError(
            "data.augment is for batches (x, y) of pictures (n, channels, height, width), and x is "
            f"{what}: leave it out."
        )
    if not mixing:
        return x, y
    if classes is None or y.ndim != 1 or y.is_floating_point():
        raise UserError("data.augment: mixup and cutmix mix classes, but y are not class indices.")
    return x, one_hot(y, classes).to(x.dtype)
