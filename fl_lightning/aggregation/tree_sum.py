"""A sum over clients that does not depend on who computed it, or in what order.

Client j of the round's ascending list is leaf j of a fixed binary tree: even j are summed with even
ones, odd with odd ones, and so on by the low bits of j. Process r of 2^k owns the leaves j ≡ r (mod
2^k), which are one subtree.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.machine.processes import collective_device, gathered, world_size

Leaf = dict[str, Tensor]
Kinds = dict[str, tuple[torch.Size, torch.dtype]]  # a leaf's shapes and dtypes


def visiting_order(n: int) -> list[int]:
    """The leaves in the order that leaves the fewest partial sums waiting (at most log2 n).

    >>> visiting_order(6)
    [0, 4, 2, 1, 5, 3]
    """

    def visit(leaves: list[int]) -> list[int]:
        return leaves if len(leaves) < 2 else visit(leaves[0::2]) + visit(leaves[1::2])

    return visit(list(range(n)))


class TreeSum:
    """Σ of dictionaries of tensors over leaves 0…n-1, which are added in any order.

    Keys that start with ``max:`` take maxima. ``None`` is a leaf that takes no part.

    Of six leaves, leaf 5 waits for leaf 1, 4 apart. Their sum waits for leaf 3, 2 apart, and the
    sum of all odd leaves for that of the even ones, 1 apart. Leaf 3 has no sibling 7: it is such a
    sum by itself.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._waiting: dict[tuple[int, int], Leaf | None] = {}
        self.total: Leaf | None = None

    def add(self, leaf: int, values: Leaf | None, shared: Collection[str] = ()) -> None:
        """Take a leaf; its tensors are the sum's from now on.

        ``shared``: keys whose tensors somebody else may still change: these are copied.
        """
        # The node (residue, stride) sums the leaves j ≡ residue (mod stride). The leaf is a node
        # by itself under a stride that no two leaves share.
        stride = 1
        while leaf >= stride or leaf + stride < self.n:
            stride *= 2
        residue = leaf
        while stride > 1:
            half = stride // 2
            sibling = residue ^ half
            if sibling < self.n:
                # Whoever of two siblings comes first waits; the second carries their sum upwards.
                if (sibling, stride) not in self._waiting:
                    self._waiting[residue, stride] = _kept(values, shared)
                    return
                values = _merge(self._waiting.pop((sibling, stride)), values, shared)
                shared = ()
            residue = residue % half
            stride = half
        self.total = _kept(values, shared)


def _kept(values: Leaf | None, shared: Collection[str]) -> Leaf | None:
    """``values``, of which those under ``shared`` are copied, as others may still change them."""
    return values and {
        key: value.clone() if key in shared else value for key, value in values.items()
    }


def _merge(a: Leaf | None, b: Leaf | None, shared: Collection[str]) -> Leaf | None:
    """a + b, in a's memory; what is ``shared`` of b is copied where a has nothing to add it to."""
    if a is None or b is None:
        return _kept(b, shared) if a is None else a
    for key, value in b.items():
        if key not in a:
            a[key] = value.clone() if key in shared else value
        elif key.startswith("max:"):
            torch.maximum(a[key], value, out=a[key])
        else:
            a[key] += value
    return a


def sum_over_processes(total: Leaf | None) -> Leaf | None:
    """The sum of the processes' sums; it has the same bits in each of them.

    These are the bits of one process where the number of processes is a power of two.
    """
    world = world_size()
    if world == 1:
        return total
    kinds_here: Kinds = {key: (v.shape, v.dtype) for key, v in (total or {}).items()}
    kinds = gathered(kinds_here)
    kind_of: Kinds = {}
    for kinds_there in kinds:
        kind_of.update(kinds_there)
    if not kind_of:
        return None
    device = next(iter(total.values())).device if total else collective_device()
    leaves: list[Leaf] = [{} for _ in range(world)]
    # One vector a dtype travels, not one message a key: a process that has no tensor under a key,
    # since none of its clients gave one, sends zeros for it, which the others leave out.
    for dtype in sorted({dtype for _, dtype in kind_of.values()}, key=str):
        keys = sorted(key for key in kind_of if kind_of[key][1] == dtype)
        parts = []
        for key in keys:
            value = (total or {}).get(key)
            if value is None:
                value = torch.zeros(kind_of[key][0], dtype=dtype, device=device)
            parts.append(value.reshape(-1))
        vector = torch.cat(parts)
        vectors = [torch.empty_like(vector) for _ in range(world)]
        dist.all_gather(vectors, vector)
        sizes = [part.numel() for part in parts]
        for rank in range(world):
            for key, part in zip(keys, torch.split(vectors[rank], sizes), strict=True):
                if key in kinds[rank]:
                    leaves[rank][key] = part.view(kind_of[key][0]).clone()
    # Process r's sum is the node of the leaves j ≡ r, so the processes are the leaves of the rest
    # of the same tree.
    tree = TreeSum(world)
    for rank in range(world):
        tree.add(rank, leaves[rank] or None)
    # What travelled is sorted; the order is to be that of one process, in which logs are written.
    total = tree.total or {}
    return {key: total[key] for key in kind_of}
