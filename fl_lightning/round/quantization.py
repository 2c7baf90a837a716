"""Vectors in few bits: blocks with one scale each, levels drawn without bias, and packed bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning.learner.layout import Layout

# The tensors that `transmit` stores on its `clients` argument for `encode` to pack: name → (n, …).
Message = dict[str, Tensor]
Transmit = Callable[[Any, Any, Tensor], Tensor]
# Numbers packed at a time: a multiple of 8, so that each piece fills whole bytes.
_PIECE = 2**20


class Blocks:
    """The parts of a vector with a scale each: its parameter tensors, or the whole vector."""

    def __init__(self, layout: Layout, per_layer: bool) -> None:
        slices = [slice(0, layout.size)]
        if per_layer:
            slices = [where for where, _ in layout.values()]
        # An empty tensor has no scale.
        self.slices = [where for where in slices if where.stop > where.start]

    def scales(self, v: Tensor, norm: Literal["l2", "max", "mean"]) -> Tensor:
        """One number per block: ``(n, D)`` → ``(n, L)``; ``"mean"``: of the absolute values."""
        return torch.stack([self._scales(row, norm) for row in v])

    def _scales(self, row: Tensor, norm: str) -> Tensor:
        pieces = [row[where] for where in self.slices]
        if norm == "max":
            return torch.stack([piece.abs().max() for piece in pieces])
        if norm == "mean":
            return torch.stack([ordered_sum(piece.abs()) / len(piece) for piece in pieces])
        return torch.stack([ordered_sum(piece.square()).sqrt() for piece in pieces])

    def spread(self, scales: Tensor) -> Tensor:
        """Return the scale of each coordinate, in float64: ``(n, L)`` → ``(n, D)``."""
        columns = scales.double().split(1, dim=1)
        lengths = [where.stop - where.start for where in self.slices]
        spread = [column.expand(-1, k) for column, k in zip(columns, lengths, strict=True)]
        return torch.cat(spread, dim=1)


def bits_of(levels: int) -> int:
    """Return the number of bits of one of the numbers -s … s.

    >>> [bits_of(s) for s in (1, 7, 127, 128)]
    [2, 4, 8, 9]
    """
    return (2 * levels).bit_length()


def rounded_up(scales: Tensor) -> Tensor:
    """Return the least float32 numbers that are not smaller."""
    near = scales.float()
    above = torch.nextafter(near, torch.full_like(near, torch.inf))
    return torch.where(near.double() < scales, above, near)


def levels_of(v: Tensor, scale: Tensor, s: int, drawn: Tensor) -> Tensor:
    """Return levels q of v, int32; the mean of scale · q/s is v.

    Args:
        v: ``(n, D)``, float64.
        scale: scale of each coordinate, not less than ``|v|``.
        s: the largest level.
        drawn: uniform random numbers in [0, 1).
    """
    r = torch.where(scale > 0, v.abs() * s / scale, 0.0)
    low = r.floor()
    # Rounding may make a quotient larger than s.
    q = (low + (drawn < r - low)).clamp(max=s)
    return (v.sign() * q).int()


def packed(numbers: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Pack numbers from 0 to 2^bits - 1, one after the other in ⌈D bits/8⌉ bytes.

    >>> packed(np.array([1, 0, 3]), 2).tolist()
    [49]
    """
    places = np.arange(bits, dtype=np.uint32)
    pieces = [np.zeros(0, np.uint8)]
    for start in range(0, len(numbers), _PIECE):
        piece = numbers[start : start + _PIECE].astype(np.uint32)
        digits = (piece[:, None] >> places & 1).astype(np.uint8)
        pieces.append(np.packbits(digits, bitorder="little"))
    return np.concatenate(pieces)


def unpacked(packed: NDArray[np.uint8], bits: int, size: int) -> NDArray[np.int64]:
    """Return the ``size`` numbers of ``bits`` bits that were packed.

    Raises:
        ValueError: it has another number of bytes.

    >>> unpacked(np.array([49], np.uint8), 2, 3).tolist()
    [1, 0, 3]
    """
    length = sum(-(-min(size - start, _PIECE) * bits // 8) for start in range(0, size, _PIECE))
    if packed.dtype != np.uint8 or packed.shape != (length,):
        raise ValueError(f"{packed.shape} {packed.dtype} in place of {length} bytes")
    places = 1 << np.arange(bits, dtype=np.int64)
    numbers = np.empty(size, np.int64)
    for start in range(0, size, _PIECE):
        stop = min(start + _PIECE, size)
        bytes_there = packed[start * bits // 8 : -(-stop * bits // 8)]
        digits = np.unpackbits(bytes_there, count=(stop - start) * bits, bitorder="little")
        numbers[start:stop] = digits.reshape(-1, bits) @ places
    return numbers


def as_array(values: Tensor) -> NDArray[Any]:
    """Return a tensor as an array; NumPy has no bfloat16, so its bits become whole numbers."""
    values = values.detach().cpu().contiguous()
    if values.dtype == torch.bfloat16:
        values = values.view(torch.int16)
    array: NDArray[Any] = values.numpy()
    return array


def check_arrays(arrays: Mapping[str, NDArray[Any]], lengths: Mapping[str, int | None]) -> None:
    """Refuse arrays of a message that have other names or shapes, and ``scales`` below 0.

    Args:
        lengths: by name, the number of entries; None: it is checked elsewhere.

    Raises:
        ValueError: they have.
    """
    if arrays.keys() != lengths.keys():
        raise ValueError(f"{sorted(arrays)} in place of {sorted(lengths)}")
    for name, length in lengths.items():
        if length is not None and arrays[name].shape != (length,):
            raise ValueError(f"{name} has the shape {arrays[name].shape}, not ({length},)")
    if "scales" in arrays and bool((arrays["scales"] < 0).any()):
        raise ValueError("a scale is negative")


def as_tensor(array: NDArray[Any], like: Tensor) -> Tensor:
    values = torch.from_numpy(np.array(array))
    if like.dtype == torch.bfloat16 and values.dtype == torch.int16:
        values = values.view(torch.bfloat16)
    return values.to(like.device)[None]


def once(transmit: Transmit) -> Transmit:
    """Make a hook ``transmit`` run only once per round for its clients, even if it is called again.

    The hook's message is stored on its clients, as ``vars(clients)["message"]``, and ``encode``
    packs it.
    """

    @wraps(transmit)
    def call(method: Any, clients: Any, update: Tensor) -> Tensor:
        there = vars(clients)
        if "transmitted" not in there:
            there["transmitted"] = transmit(method, clients, update)
        sent: Tensor = there["transmitted"]
        return sent

    return call


def message_of(transmit: Transmit, method: Any, clients: Any, update: Tensor) -> Message:
    """Return the message that ``transmit``, wrapped by :func:`once`, stored on its clients."""
    transmit(method, clients, update)
    message: Message = vars(clients)["message"]
    return message


# One thread sums a piece, which is too short for PyTorch to split.
_SUMMED = 4096


def ordered_sum(v: Tensor) -> Tensor:
    """Return the sum of all entries of ``v``, in pieces with fixed bounds.

    >>> import torch
    >>> ordered_sum(torch.ones(10_000))
    tensor(10000.)
    """
    v = v.reshape(-1)
    # Zeros at the end do not change a sum, so each pass replaces v by the sums of its pieces.
    while len(v) > _SUMMED:
        v = pad(v, (0, -len(v) % _SUMMED)).view(-1, _SUMMED).sum(1)
    return v.sum()


def ordered_norm(v: Tensor) -> Tensor:
    """‖v‖, summed in float64.

    >>> import torch
    >>> ordered_norm(torch.tensor([3.0, 4.0]))
    tensor(5.)
    """
    return ordered_sum(v.double().square()).sqrt().to(v.dtype)
