"""A sum over clients that does not depend on the processes or on the order of the addends.

Client j of the round's ascending list is leaf j of a fixed binary tree: even j are summed with even
ones, odd with odd ones, and so on by the low bits of j. Process r of 2^k owns the leaves j ≡ r (mod
2^k), which are one subtree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic

import torch
import torch.distributed as dist

from fl_lightning.machine.processes import collective_device, gathered, world_size
from fl_lightning.round.client_sums import Place, Some

# A leaf's shapes and dtypes, and the types of the devices on which its tensors lie.
Kinds = dict[Place, tuple[torch.Size, torch.dtype, str]]


def share_of(participants: Sequence[int], rank: int, world: int) -> Sequence[int]:
    """Return the participants that process ``rank`` of ``world`` processes trains.

    These are every ``world``-th, so that the process's share is one subtree of the sum.

    >>> share_of([3, 5, 8, 9, 12], 1, 2)
    [5, 9]
    """
    return participants[rank::world]


def visiting_order(n: int) -> list[int]:
    """Return the leaves in the order with the fewest waiting partial sums (at most log2 n).

    >>> visiting_order(6)
    [0, 4, 2, 1, 5, 3]
    """

    def visit(leaves: list[int]) -> list[int]:
        return leaves if len(leaves) < 2 else visit(leaves[0::2]) + visit(leaves[1::2])

    return visit(list(range(n)))


class TreeSum(Generic[Some]):
    """Σ of :class:`Sums` over leaves 0…n-1, which are added in any order.

    ``None`` is a leaf that does not contribute.

    Of six leaves, leaf 5 waits for leaf 1, 4 apart. The sum of leaves 5 and 1 waits for leaf 3, 2
    apart, and the sum of all odd leaves for that of the even ones, 1 apart. Leaf 3 has no sibling
    7, so it is such a sum by itself.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self._waiting: dict[tuple[int, int], Some | None] = {}
        self.total: Some | None = None

    def add(self, leaf: int, values: Some | None, shared: Collection[str] = ()) -> None:
        """Add a leaf; from now on its tensors belong to the sum.

        ``shared``: fields whose tensors other code may still change; these are copied.
        """
        # The node (residue, stride) sums the leaves j ≡ residue (mod stride). Find the stride at
        # which this leaf is alone in its node.
        stride = 1
        while leaf >= stride or leaf + stride < self.n:
            stride *= 2
        residue = leaf
        while stride > 1:
            half = stride // 2
            sibling = residue ^ half
            if sibling < self.n:
                # Of two sibling nodes, the first to arrive waits; the second adds both sums and
                # passes the result upwards.
                if (sibling, stride) not in self._waiting:
                    self._waiting[residue, stride] = values and values.kept(shared)
                    return
                values = _merge(self._waiting.pop((sibling, stride)), values, shared)
                shared = ()
            residue = residue % half
            stride = half
        self.total = values and values.kept(shared)


def _merge(a: Some | None, b: Some | None, shared: Collection[str]) -> Some | None:
    """a + b, in the memory of a; ``shared`` fields of b are copied if a has no such field."""
    if a is None or b is None:
        return b and b.kept(shared) if a is None else a
    for place, value in b.parts():
        own = a.get(place)
        if own is None:
            a.put(place, value.clone() if place[0] in shared else value)
        elif place[0] == a.MAXIMA:
            torch.maximum(own, value, out=own)
        else:
            own += value
    return a


def sum_over_processes(total: Some | None, kind: type[Some]) -> Some | None:
    """Return the sum of the processes' sums; it has the same bits in each of them.

    These are the bits of one process if the number of processes is a power of two. ``kind``: their
    class.
    """
    world = world_size()
    if world == 1:
        return total
    here = {} if total is None else dict(total.parts())
    kinds_here: Kinds = {place: (v.shape, v.dtype, v.device.type) for place, v in here.items()}
    kinds = gathered(kinds_here)
    kind_of: Kinds = {}
    for kinds_there in kinds:
        kind_of.update(kinds_there)
    if not kind_of:
        return None
    # Some sums lie on the GPU and others on the CPU, and NCCL sends only what lies on the GPU.
    device = collective_device()
    leaves = [kind() for _ in range(world)]
    # Send one vector per dtype, and not one message per tensor. A process whose clients gave no
    # tensor for a place sends zeros, which the others ignore.
    for dtype in sorted({dtype for _, dtype, _ in kind_of.values()}, key=str):
        places = sorted(place for place in kind_of if kind_of[place][1] == dtype)
        parts = []
        for place in places:
            value = here.get(place)
            if value is None:
                value = torch.zeros(kind_of[place][0], dtype=dtype, device=device)
            parts.append(value.to(device).reshape(-1))
        vector = torch.cat(parts)
        vectors = [torch.empty_like(vector) for _ in range(world)]
        dist.all_gather(vectors, vector)
        sizes = [part.numel() for part in parts]
        for rank in range(world):
            for place, part in zip(places, torch.split(vectors[rank], sizes), strict=True):
                if place in kinds[rank]:
                    shape, _, home = kind_of[place]
                    leaves[rank].put(place, part.view(shape).to(home, copy=True))
    # Process r's sum is the node of the leaves j ≡ r (mod W), so the processes are the leaves of
    # the upper part of the same tree.
    tree: TreeSum[Some] = TreeSum(world)
    for rank in range(world):
        tree.add(rank, leaves[rank] if kinds[rank] else None)
    # The vectors were sent in sorted order. Restore the order that one process has, because logs
    # are written in it.
    ordered = kind()
    for place in kind_of:
        value = None if tree.total is None else tree.total.get(place)
        assert value is not None  # at least one process has it
        ordered.put(place, value)
    return ordered
