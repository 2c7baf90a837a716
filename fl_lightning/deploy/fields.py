"""The fields of a message, each checked once when it is taken, before anything is done with it."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from fl_lightning.deploy.transport import BFLOAT, Array, Message, Number, said, visible

LARGEST = 2**53  # of whole numbers: a sum of some hundred of them still fits in 8 bytes
MOST_SAMPLES = 2**32  # of a client
# Of a number in an update, an upload or a row: its square, and the sum over many clients, weighted
# by samples, are still finite in single precision.
MOST = 2.0**60
LONGEST_NAME = 200


class WrongField(Exception):
    """A field of a message is not what it has to be.

    Args:
        field: its name in the message; ``why``: what is wrong, as a clause about it.
        finite: whether its numbers are finite.
    """

    def __init__(self, field: str, why: str, finite: bool = True) -> None:
        super().__init__(f"the field {visible(field, LONGEST_NAME)} {why}")
        self.finite = finite


class Fields:
    """Fields of a message that have not been taken yet.

    Args:
        within: the beginning of their names in the message, which these names do not have.
    """

    def __init__(
        self, numbers: dict[str, Number], arrays: dict[str, Array], within: str = ""
    ) -> None:
        self.numbers = numbers
        self.arrays = arrays
        self.within = within

    @classmethod
    def of(cls, message: Message) -> Fields:
        return cls(dict(message.numbers), dict(message.arrays))

    def wrong(self, name: str, why: str, finite: bool = True) -> NoReturn:
        """Refuse a field."""
        raise WrongField(self.within + name, why, finite)

    def by_first(self, words: Collection[str]) -> dict[str, Fields]:
        """Take the fields whose names begin with one of these words and a slash, by the word."""
        groups = {word: Fields({}, {}, f"{self.within}{word}/") for word in words}
        for kind in ("numbers", "arrays"):
            left = {}
            for name, value in getattr(self, kind).items():
                word, slash, rest = name.partition("/")
                if slash and word in groups:
                    getattr(groups[word], kind)[rest] = value
                else:
                    left[name] = value
            setattr(self, kind, left)
        return groups

    def under(self, word: str) -> Fields:
        """Take the fields whose names begin with this word and a slash."""
        return self.by_first([word])[word]

    def end(self) -> None:
        """Refuse the fields that were not taken."""
        for name in (*self.numbers, *self.arrays):
            self.wrong(name, "was not asked for")

    def integer(self, name: str, low: int = 0, high: int = LARGEST) -> int:
        """Take a whole number from ``low`` to ``high``."""
        number = self.numbers.pop(name, None)
        if number is None:
            self.wrong(name, "is missing")
        if not isinstance(number, int) or not low <= number <= high:
            self.wrong(name, f"is {visible(number, 40)}, and not a whole number in {low} … {high}")
        return number

    def flag(self, name: str) -> bool:
        return bool(self.integer(name, 0, 1))

    def optional(self, name: str, low: int = 0, high: int = LARGEST) -> int | None:
        """Take a whole number, if there is one."""
        return self.integer(name, low, high) if name in self.numbers else None

    def number(self, name: str, finite: bool = False) -> float:
        """Take a number that double precision has; ``finite``: neither NaN nor infinite."""
        number = self.numbers.pop(name, None)
        if number is None:
            self.wrong(name, "is missing")
        try:
            value = float(number)
        except OverflowError:
            self.wrong(name, "is larger than any number in double precision")
        if finite and not np.isfinite(value):
            self.wrong(name, "is not finite", finite=False)
        return value

    def integers(
        self, name: str, low: int, high: int, length: int | None = None, most: int = 2**24
    ) -> list[int]:
        """Take a list of whole numbers from ``low`` to ``high``; ``length``: how many."""
        array = self.array(name, "iu")
        if array.ndim != 1 or len(array) > most or length not in (None, len(array)):
            expected = "a list" if length is None else f"a list of {length}"
            self.wrong(name, f"has the shape {array.shape}, and not that of {expected}")
        numbers: list[int] = array.tolist()
        outside = [number for number in numbers if not low <= number <= high]
        if outside:
            self.wrong(name, f"holds {outside[0]}, and not only whole numbers in {low} … {high}")
        return numbers

    def text(self, name: str, most: int) -> str:
        """Take a text of at most so many bytes."""
        array = self.array(name, "u")
        if array.ndim != 1 or array.itemsize != 1 or len(array) > most:
            self.wrong(name, f"is not a text of at most {most} bytes")
        return said(array)

    def array(self, name: str, kinds: str = "biufcV") -> Array:
        """Take an array of one of these kinds of numbers, as NumPy calls them."""
        array = self.arrays.pop(name, None)
        if array is None:
            self.wrong(name, "is missing")
        if array.dtype.kind not in kinds:
            self.wrong(name, f"has the type {array.dtype}, which is not accepted there")
        return array

    def mask(self, name: str, size: int) -> Tensor:
        """Take a mask ``(size,)``, as bits that are compressed."""
        length = (size + 7) // 8
        try:
            # A compressed message must not expand to more than the mask's size.
            packed = self.array(name, "u").tobytes()
            bits = zlib.decompressobj().decompress(packed, length + 1)
        except zlib.error as error:
            self.wrong(name, f"is not a mask ({error})")
        if len(bits) != length:
            self.wrong(name, f"is not a mask of {size} coordinates, which has {length} bytes")
        return torch.from_numpy(np.unpackbits(np.frombuffer(bits, np.uint8), count=size) > 0)

    def tensor(
        self,
        name: str,
        shapes: Collection[tuple[int, ...]] | None,
        dtype: torch.dtype,
        infinite: bool = False,
        most: float = math.inf,
    ) -> Tensor:
        """Take a tensor, in memory of its own.

        Args:
            shapes: the accepted shapes; None: all.
            dtype: its numbers are of this kind (whole ones of this very type), and finite in it.
            infinite: whether its numbers may be infinite.
            most: the largest magnitude of its numbers.
        """
        array = self.array(name)
        if shapes is not None and array.shape not in shapes:
            expected = " or ".join(sorted({str(shape) for shape in shapes}))
            self.wrong(name, f"has the shape {array.shape}, and not {expected}")
        value = tensor_of(array)
        real, imaginary = value.is_floating_point(), value.is_complex()
        alike = real == dtype.is_floating_point and imaginary == dtype.is_complex
        if not alike or (not (real or imaginary) and value.dtype != dtype):
            self.wrong(name, f"has the type {value.dtype}, and not {dtype}")
        converted = value.to(dtype)
        if infinite and bool(converted.isnan().any()):
            self.wrong(name, "holds NaN", finite=False)
        if (real or imaginary) and not infinite and not finite(converted, most):
            what = "not finite" if most == math.inf else f"not finite or above {most:.2g}"
            self.wrong(name, f"holds numbers that are {what} in {dtype}", finite=False)
        return value


def tensor_of(array: Array) -> Tensor:
    """Return the tensor whose numbers an array has, in memory of its own."""
    copied = np.array(array, order="C")
    if array.dtype == BFLOAT:
        return torch.from_numpy(copied.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(copied)


def finite(values: Tensor, most: float = math.inf) -> bool:
    """Return whether no entry is infinite or NaN, or larger than ``most``."""
    if values.is_complex() or not values.numel():
        return bool(values.isfinite().all())
    low, high = map(float, values.aminmax())
    # NaN is in no order.
    return math.isfinite(low) and math.isfinite(high) and -most <= low and high <= most


def check_name(fields: Fields, name: str) -> None:
    """Refuse the name of a metric that is long, or has other signs than names of metrics have."""
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        fields.wrong(name, "has a name that no metric can have")
