"""Sums over the coordinates of a vector that do not depend on the number of threads.

PyTorch divides a long sum among its threads, so another number of threads gives another rounding.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

# One thread sums a piece, which is too short for PyTorch to split.
_PIECE = 4096


def ordered_sum(v: Tensor) -> Tensor:
    """Return the sum of all entries of ``v``, in pieces with fixed bounds.

    >>> import torch
    >>> ordered_sum(torch.ones(10_000))
    tensor(10000.)
    """
    v = v.reshape(-1)
    # Zeros at the end do not change a sum, so each pass replaces v by the sums of its pieces.
    while len(v) > _PIECE:
        v = pad(v, (0, -len(v) % _PIECE)).view(-1, _PIECE).sum(1)
    return v.sum()


def ordered_norm(v: Tensor) -> Tensor:
    """‖v‖, summed in float64.

    >>> import torch
    >>> ordered_norm(torch.tensor([3.0, 4.0]))
    tensor(5.)
    """
    return ordered_sum(v.double().square()).sqrt().to(v.dtype)
