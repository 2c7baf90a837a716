"""Augmentations of training batches by name: crop, flip, randaugment, mixup, cutmix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fl_lightning.accepted import (
    AtLeast,
    AtMost,
    NonNegativeInt,
    PositiveFloat,
    UnitInterval,
    check,
    checked,
    declared,
)
from fl_lightning.datamodules.batches.rand_augment import changed
from fl_lightning.datamodules.batches.samples import Batch
from fl_lightning.errors import UserError, suggest
from fl_lightning.machine.device_memory import to_device


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
                f"to {high:.3g}. Give pictures as uint8 or in [0, 1], or leave randaugment out."
            )
        return (pixels * 255).round().clamp(0, 255).to(torch.uint8)

    def from_bytes(self, pixels: Tensor) -> Tensor:
        x = pixels.float() / 255
        return (x - self._of(self.mean, x, 0.0)) / self._of(self.std, x, 1.0)


@checked
@dataclass(frozen=True)
class Crop:
    """Crop a window of the picture's size at random from the picture with a black frame.

    Args:
        padding: width of the frame on each side, in pixels.
        probability: probability that a picture is cropped.
    """

    padding: NonNegativeInt = 4
    probability: UnitInterval = 1.0

    def __call__(
        self, x: Tensor, y: Tensor, rng: np.random.Generator, pixels: Pixels
    ) -> tuple[Tensor, Tensor]:
        (n, channels, height, width) = x.shape
        p = self.padding
        places = rng.integers(0, 2 * p + 1, (n, 2))
        places[rng.random(n) >= self.probability] = p
        framed = pixels.zero(x).to(x.dtype).expand(n, channels, height + 2 * p, width + 2 * p)
        framed = framed.clone()
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
    """

    operations: NonNegativeInt = 2
    magnitude: Annotated[int, AtLeast(0), AtMost(30)] = 9

    def __call__(
        self, x: Tensor, y: Tensor, rng: np.random.Generator, pixels: Pixels
    ) -> tuple[Tensor, Tensor]:
        if x.shape[1] not in (1, 3):
            raise UserError(
                f"data.augment: randaugment takes pictures of 1 or 3 channels, and x has "
                f"{x.shape[1]}: leave it out."
            )
        # The operations read values of each picture, for which a GPU would wait each time.
        pictures = pixels.to_bytes(x.cpu())
        made = [changed(one, self.operations, self.magnitude, rng) for one in pictures]
        return pixels.from_bytes(to_device(torch.stack(made), x.device)).to(x.dtype), y


@checked
@dataclass(frozen=True)
class Mixup:
    """Mix x and the labels of two samples of the batch with weights λ and 1 − λ; λ ~ Beta(alpha,
    alpha).

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
    """Paste a box of another picture of the batch into each, and mix labels by area (Yun et al.,
    2019).
    """

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
    """Return the first and the last position of a box within a side."""
    reach = int(half * size)
    return max(middle - reach, 0), min(middle + reach, size)


Named = Crop | Flip | RandAugment | Mixup | Cutmix
NAMES: dict[str, type[Named]] = {
    "crop": Crop,
    "flip": Flip,
    "randaugment": RandAugment,
    "mixup": Mixup,
    "cutmix": Cutmix,
}


def augmentations_of(given: Any) -> tuple[Named, ...]:
    """Build them from the option ``augment``: names, or ``{name: {argument: value}}``, in their
    order.

    >>> augmentations_of(["flip", {"crop": {"padding": 2}}])
    (Flip(probability=0.5), Crop(padding=2, probability=1.0))

    Raises:
        UserError: a name, argument or value is not accepted.
    """
    made = []
    for item in [given] if isinstance(given, str | Mapping) else list(given):
        name: Any = item
        arguments: Mapping[str, Any] | None = None
        if isinstance(item, Mapping):
            if len(item) != 1:
                raise UserError(
                    f"data.augment has the item {dict(item)!r}: give one name per item, such as "
                    "[crop, {randaugment: {magnitude: 5}}]."
                )
            ((name, arguments),) = item.items()
        if name not in NAMES:
            raise UserError(
                f"data.augment has {name!r}, which is not an augmentation; there are "
                f"{', '.join(NAMES)}.{suggest(str(name), list(NAMES))}"
            )
        made.append(_made(NAMES[name], name, arguments or {}))
    return tuple(made)


def _made(cls: type[Named], name: str, arguments: Mapping[str, Any]) -> Named:
    known = declared(cls.__init__)
    for key, value in arguments.items():
        if key not in known:
            raise UserError(
                f"data.augment: {name} has no argument {key!r}; it has {', '.join(known)}."
                + suggest(str(key), list(known))
            )
        check(f"data.augment: {name}'s {key}", value, known[key])
    return cls(**arguments)


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
    mixing = [one for one in named if isinstance(one, Mixup | Cutmix)]
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
    x: Any = batch[0] if pair else None
    y: Any = batch[1] if pair else None
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
        what = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise UserError(
            "data.augment is for batches (x, y) of pictures (n, channels, height, width), and x is "
            f"{what}: leave it out."
        )
    if not mixing:
        return x, y
    if classes is None or not isinstance(y, Tensor) or y.ndim != 1 or y.is_floating_point():
        raise UserError(
            "data.augment: mixup and cutmix mix classes, but y are not class indices: leave them "
            "out."
        )
    return x, one_hot(y, classes).to(x.dtype)
