"""Rows of client state in memory. Rows of one client with the same bytes are one tensor.

Two callbacks may keep the same vector, such as a client's last model. The store holds it once, and
a segment has it once.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor

# A name's entry in a segment's header is about as large as a smaller row.
SHARED_FROM = 4096  # bytes


class HeldRows(OrderedDict[tuple[str, int], Tensor]):
    """Rows by (name, client).

    ``bytes``: their size; a tensor under several names counts once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._uses: Counter[int] = Counter()

    def hold(self, new: Mapping[tuple[str, int], Tensor]) -> None:
        replaced = [self[key] for key in new if key in self]
        # One call into C, which an interrupt cannot stop half-way.
        self.update(new)
        for row in new.values():
            if not self._uses[id(row)]:
                self.bytes += row.nbytes
            self._uses[id(row)] += 1
        for row in replaced:
            self._release(row)

    def drop(self, key: tuple[str, int]) -> None:
        if (row := self.pop(key, None)) is not None:
            self._release(row)

    def _release(self, row: Tensor) -> None:
        self._uses[id(row)] -= 1
        if not self._uses[id(row)]:
            del self._uses[id(row)]
            self.bytes -= row.nbytes


def shared(row: Tensor, others: list[Tensor]) -> Tensor:
    """Return the tensor of ``others`` that has the same bytes as ``row``; else add ``row``.

    Args:
        row, others: contiguous, on the CPU.
    """
    if row.nbytes < SHARED_FROM:
        return row
    for other in others:
        if other is row or _same_bytes(other, row):
            return other
    others.append(row)
    return row


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    # Numbers are compared as bytes, because 0.0 equals -0.0, and NaN does not equal itself.
    first, second = (row.reshape(-1).view(torch.uint8) for row in (one, other))
    begins = torch.equal(first[:SHARED_FROM], second[:SHARED_FROM])
    return begins and torch.equal(first, second)
