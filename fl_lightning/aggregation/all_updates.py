"""All updates of a round at the server, if a method asks for them.

Rows and sums are the same in every process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.aggregation.over_processes import TreeSum, visiting_order
from fl_lightning.machine.processes import world_size
from fl_lightning.round.client_sums import Total
from fl_lightning.round.transaction import RoundTransaction


def gather(transaction: RoundTransaction) -> Tensor:
    """Return the updates ``(n, D)`` of the clients that finished, ascending, in every process."""
    round = transaction.round
    world = world_size()
    rows = round.w.new_empty(len(transaction.finished), round.w.numel(), dtype=round.wide)
    leaf = {client: j for j, client in enumerate(round.ids)}
    for row, client in zip(rows, transaction.finished, strict=True):
        # An update is removed from the transaction when it is copied into its row, so that there
        # are never two copies of all updates.
        if client in transaction.updates:
            row.copy_(transaction.updates.pop(client))
        # Process (leaf mod W) trained this client, so it has the client's update.
        if world > 1:
            dist.broadcast(row, src=leaf[client] % world)
    return rows


def add_up(transaction: RoundTransaction, rows: Tensor) -> None:
    """Put Σ of the rows into the round's total, and Σ p_i times them if weights differ."""
    round = transaction.round
    uniform = all(weight == 1 for weight in round.weights.values())
    row_of = dict(zip(transaction.finished, rows, strict=True))
    # Summing in the same tree gives the same bits as a run that gathers nothing.
    tree: TreeSum[Total] = TreeSum(len(round.ids))
    for leaf in visiting_order(len(round.ids)):
        client = round.ids[leaf]
        row = row_of.get(client)
        if row is None:
            tree.add(leaf, None)
        elif uniform:
            tree.add(leaf, Total(weighted=row), ["weighted"])
        else:
            weighted = row * round.weights[client]
            tree.add(leaf, Total(update=row, weighted=weighted), ["update"])
    if tree.total is not None:
        transaction.total.update = tree.total.update
        transaction.total.weighted = tree.total.weighted


def memory(who: str, most: int, w: Tensor) -> str:
    """Return as text how much memory it takes to gather the updates of ``most`` clients."""
    wide = torch.promote_types(w.dtype, torch.float32)
    size = most * w.numel() * wide.itemsize
    text = f"{size} bytes"
    for factor, unit in ((2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB")):
        if size >= factor:
            text = f"{size / factor:.3g} {unit}"
    return (
        f"{who}: the updates of all participants are held at once, {most:,} × {w.numel():,} "
        f"numbers, {text} of memory in each process"
    )
