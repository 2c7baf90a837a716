"""All updates of a round at the server, where a method asks for them: the same rows, and sums of
them, everywhere.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.aggregation.tree_sum import TreeSum, visiting_order
from fl_lightning.processes import world_size
from fl_lightning.round.ledger import Ledger


def gather(ledger: Ledger) -> Tensor:
    """What each client that finished transmitted, ``(n, D)``, ascending by client, in every
    process.
    """
    round = ledger.round
    world = world_size()
    rows = round.w.new_empty(len(ledger.finished), round.w.numel(), dtype=round.wide)
    leaf = {client: j for j, client in enumerate(round.ids)}
    for row, client in zip(rows, ledger.finished, strict=True):
        if client in ledger.updates:
            row.copy_(ledger.updates.pop(client))
        if world > 1:
            dist.broadcast(row, src=leaf[client] % world)
    return rows


def total(ledger: Ledger, rows: Tensor) -> dict[str, Tensor]:
    """Σ of the rows, and Σ p_i where weights differ: by the tree of the clients' sum, so with its
    bits.
    """
    round = ledger.round
    uniform = all(weight == 1 for weight in round.weights.values())
    of = dict(zip(ledger.finished, rows, strict=True))
    tree = TreeSum(len(round.ids))
    for leaf in visiting_order(len(round.ids)):
        client = round.ids[leaf]
        if client not in of:
            tree.add(leaf, None)
        elif uniform:
            tree.add(leaf, {"weighted": of[client]}, ["weighted"])
        else:
            tree.add(
                leaf,
                {"update": of[client], "weighted": of[client] * round.weights[client]},
                ["update"],
            )
    return tree.total or {}


def memory(who: str, most: int, w: Tensor) -> str:
    """What gathering the updates of ``most`` clients takes, for a reader."""
    kind = torch.promote_types(w.dtype, torch.float32)
    size = most * w.numel() * torch.empty((), dtype=kind).element_size()
    units = [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")]
    shown = next(
        (f"{size / factor:.3g} {unit}" for factor, unit in units if size >= factor), f"{size} bytes"
    )
    return (
        f"{who}: the updates of all participants are held at once, {most:,} × {w.numel():,} "
        f"numbers, {shown} of memory in each process"
    )
