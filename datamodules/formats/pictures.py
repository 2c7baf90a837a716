"""Pictures from files, decoded by PIL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import PositiveInt

# PIL's modes to which it converts any picture, with 8 bits per channel or 1.
Mode = Literal["1", "L", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"]
# A number of pixels, or height and width.
Size = PositiveInt | tuple[PositiveInt, PositiveInt] | None


@dataclass(frozen=True)
class Pictures:
    """Settings by which pictures become tensors.

    Args:
        size: ``(height, width)``, to which each picture is resized; None: pictures keep their size.
        mode: PIL's mode, such as ``"RGB"`` or ``"L"``; None: the picture's own, but a palette
            becomes RGB, and one bit becomes L.
        mean, std: one number per channel, or nothing.
        filter: PIL's filter for resizing; None: its default.
    """

    size: tuple[int, int] | None = None
    mode: str | None = "RGB"
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    filter: Image.Resampling | None = Image.Resampling.BILINEAR

    @classmethod
    def of(
        cls, size: Size, mode: str | None, mean: Sequence[float], std: Sequence[float]
    ) -> Pictures:
        """Return the settings that options name."""
        pair = (size, size) if isinstance(size, int) else size
        return cls(None if pair is None else (pair[0], pair[1]), mode, tuple(mean), tuple(std))

    def read(self, file: Any) -> NDArray[np.uint8]:
        """Return a file's picture as uint8 ``(height, width)`` or ``(height, width, channels)``.

        Raises:
            UserError: it cannot be decoded.
        """
        what = f"The picture {str(file)!r} cannot be read"
        with refused(what, "Copy it again, or take it out."), Image.open(file) as picture:
            return self.array(picture)

    def array(self, picture: Image.Image) -> NDArray[np.uint8]:
        """Return a picture that PIL has opened as an array of the same form."""
        if picture.mode[0] in "IF":
            raise UserError(
                f"A picture of the mode {picture.mode!r} has more than 256 levels, of which PIL "
                "keeps the first 256: save the pictures with 8 bits per channel."
            )
        # The pixels of a palette picture are places in its palette, from which PIL makes colours.
        mode = self.mode or {"P": "RGB", "PA": "RGBA", "1": "L"}.get(picture.mode)
        if mode is not None:
            picture = picture.convert(mode)
        if self.size is not None:
            (height, width) = self.size
            picture = picture.resize((width, height), self.filter)
        pixels = np.asarray(picture, np.uint8)
        return pixels * np.uint8(255) if picture.mode == "1" else pixels

    def tensor(self, pixels: NDArray[np.uint8]) -> Tensor:
        """Return float32 ``(channels, height, width)``, in [0, 1], then normalised."""
        x = torch.from_numpy(np.array(pixels)).float() / 255
        x = x.unsqueeze(0) if x.ndim == 2 else x.permute(2, 0, 1).contiguous()
        for name, given in (("mean", self.mean), ("std", self.std)):
            if len(given) not in (0, 1, len(x)):
                raise UserError(
                    f"data.{name} is {list(given)}, and a picture has {len(x)} channels: give one "
                    "number per channel, or data.mode, to which pictures are converted."
                )
        if self.mean:
            x -= torch.tensor(self.mean).view(-1, 1, 1)
        if self.std:
            x /= torch.tensor(self.std).view(-1, 1, 1)
        return x
