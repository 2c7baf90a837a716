"""A sum over clients that does not depend on who computed it, in what order, or in how many
processes.

Client j of the round's ascending list is leaf j of a fixed binary tree: even j are summed with even
ones, odd with odd ones, and so on by the low bits of j. Process r of 2^k owns the leaves j ≡ r (mod
2^k), which are one subtree.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.processes import collective_device, gathered, world_size

Leaf = dict[str, Tensor]


def visiting_order(n: int) -> list[int]:
    """The leaves in the order that leaves the fewest partial sums waiting (at most log2 n).

    >>> visiting_order(6)
    [0, 4, 2, 1, 5, 3]
    """

    def visit(leaves: list[int]) -> list[int]:
        return leaves if len(leaves) < 2 else visit(leaves[0::2]) + visit(leaves[1::2])

    return visit(list(range(n)))


class TreeSum:
    """Σ of dictionaries of tensors over leaves 0…n-1, added in any order; keys starting with
    ``max:`` take maxima.

    ``None`` is a leaf that takes no part.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._waiting: dict[tuple[int, int], Leaf | None] = {}
        self.total: Leaf | None = None

    def add(self, leaf: int, values: Leaf | None, lent: Collection[str] = ()) -> None:
        """Take a leaf; its tensors are the sum's from now on, but for those under ``lent``, of
        which it keeps none.
        """
        stride = 1
        while leaf >= stride or leaf + stride < self.n:
            stride *= 2
        residue = leaf
        while stride > 1:
            half = stride // 2
            sibling = residue ^ half
            if sibling < self.n:
                if (sibling, stride) not in self._waiting:
                    self._waiting[residue, stride] = _kept(values, lent)
                    return
                values = _merge(self._waiting.pop((sibling, stride)), values, lent)
                lent = ()
            residue = residue % half
            stride = half
        self.total = _kept(values, lent)


def _kept(values: Leaf | None, lent: Collection[str]) -> Leaf | None:
    return values and {
        key: value.clone() if key in lent else value for key, value in values.items()
    }


def _merge(a: Leaf | None, b: Leaf | None, lent: Collection[str]) -> Leaf | None:
    """a + b, in a's memory; ``lent``: what of b is not to be kept."""
    if a is None or b is None:
        return _kept(b, lent) if a is None else a
    for key, value in b.items():
        if key not in a:
            a[key] = value.clone() if key in lent else value
        elif key.startswith("max:"):
            torch.maximum(a[key], value, out=a[key])
        else:
            a[key] += value
    return a


def sum_over_processes(total: Leaf | None) -> Leaf | None:
    """The processes' sums combined along the same tree; the same bits everywhere. Alone: unchanged."""
    world = world_size()
    if world == 1:
        return total
    mine_are = None if total is None else {k: (v.shape, v.dtype) for k, v in total.items()}
    shapes = gathered(mine_are)
    present: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for shape in shapes:
        present.update(shape or {})
    if not present:
        return None
    device = next(iter(total.values())).device if total else collective_device()
    leaves: list[Leaf] = [{} for _ in range(world)]
    for dtype in sorted({d for _, d in present.values()}, key=str):
        keys = sorted(k for k, (_, d) in present.items() if d == dtype)
        mine = torch.cat(
            [
                (
                    total[k]
                    if total and k in total
                    else torch.zeros(present[k][0], dtype=dtype, device=device)
                ).reshape(-1)
                for k in keys
            ]
        )
        everyone = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(everyone, mine)
        sizes = [present[k][0].numel() for k in keys]
        for rank, vector in enumerate(everyone):
            own = shapes[rank] or {}
            leaves[rank].update(
                (k, part.view(present[k][0]).clone())
                for k, part in zip(keys, torch.split(vector, sizes), strict=True)
                if k in own
            )
    tree = TreeSum(world)
    for rank in range(world):
        tree.add(rank, leaves[rank] or None)
    return tree.total
