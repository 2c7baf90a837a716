"""What a client brings home: its update, uploads, buffers, logs and staged rows, added to the round's ordered sum."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_lightning.aggregation import Leaf, TreeSum
from fl_lightning.callback import Declaration, Upload
from fl_lightning.client_optimizer import ClientOptimizer
from fl_lightning.devices import to_host
from fl_lightning.engines.replica import Replica
from fl_lightning.errors import UserError
from fl_lightning.flat import all_finite
from fl_lightning.methods import Methods, checked_rows
from fl_lightning.rounds import Clients, Round

MISSING, DOWN_CLIENTS, UP_PARAMETERS, UP_BYTES, BUFFER_BYTES = range(5)


@dataclass
class Collector:
    """Called once a client, from any thread and in any order; the total does not depend on either.

    Args:
        leaves: clients that this process trains.
        uniform: whether all aggregation weights are equal.
        average_buffers: whether the server takes the clients' buffers.
    """

    round: Round
    methods: Methods
    leaves: int
    uniform: bool
    average_buffers: bool
    buffers: dict[str, Tensor]
    keep_optimizer_state: bool
    averaged: Tensor | None
    diverged: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = TreeSum(self.leaves)
        self.averaged_size = self.round.layout.size if self.averaged is None else int(self.averaged.sum())
        self._lock = threading.Lock()

    def __call__(self, leaf: int, clients: Clients, optimizer: ClientOptimizer, replica: Replica) -> None:
        (client,) = clients.client_ids
        traffic = torch.zeros(5, dtype=torch.int64)
        missing = self.round.layout.size
        if clients.kept_mask is not None:
            missing -= int(clients.kept_mask[0].sum())
        traffic[MISSING], traffic[DOWN_CLIENTS] = missing, 1
        traffic[BUFFER_BYTES] = sum(b.numel() * b.element_size() for b in self.buffers.values())
        update = clients.x - self.round.w
        values: Leaf = {"traffic": traffic}
        rows: dict[str, Tensor] = {}
        buffers = None
        if all_finite(update):
            buffers = self._buffers(replica, self.round.weights[client])
        if buffers is not None:
            values.update(self._finished(clients, client, update, traffic), **buffers)
            rows = {key: value[0] for key, declared, value in clients.written()}
            rows = to_host(rows | self._kept(clients, optimizer))
        with self._lock:
            if not rows and "weight" not in values:
                self.diverged.append(client)
            for key, row in rows.items():
                self.round.staged.setdefault(key, {})[client] = row
            self.tree.add(leaf, values)

    def _kept(self, clients: Clients, optimizer: ClientOptimizer) -> dict[str, Tensor]:
        rows = optimizer.state() if self.keep_optimizer_state else {}
        if self.round.parts is not None:
            rows |= self.round.parts.end(clients, 0)
        return rows

    def _finished(self, clients: Clients, client: int, update: Tensor, traffic: Tensor) -> Leaf:
        weight, wide = self.round.weights[client], self.round.wide
        values: Leaf = {"weight": torch.tensor(float(weight), dtype=torch.float64)}
        if self.round.parts is not None:
            values["copies"] = update[0].to(wide) * weight
        transmit = self.methods.owner("transmit")
        if transmit is not None:
            update = checked_rows(transmit, transmit(clients, update), update).clone()
        self._sum(values, "", update[0].to(wide), weight)
        sent = self.methods.sent_by_clients()
        size = update.element_size()
        parameters, number = clients.transmitted
        parameters = self.averaged_size if parameters is None else parameters
        up, up_bytes = parameters, (parameters * size if number is None else number)
        for key, value in clients.uploads.items():
            declared = self.methods.declared[key]
            assert isinstance(declared, Upload)
            self._sum(values, key, value[0].to(result_dtype(declared, update.dtype), copy=True), weight)
            if key in sent:
                count = self.averaged_size if declared.shape is None else value[0].numel()
                up, up_bytes = up + count, up_bytes + count * value.element_size()
        traffic[UP_PARAMETERS], traffic[UP_BYTES] = round(up), round(up_bytes)
        for name, per_client in clients.logs.items():
            values["log:" + name] = per_client[0].to(torch.float64, copy=True)
            values["num:" + name] = torch.ones((), dtype=torch.float64, device=per_client.device)
        return values

    def _buffers(self, replica: Replica, weight: float) -> Leaf | None:
        """Changes of floating-point and complex buffers, values of the others; None if a change is not finite."""
        values: Leaf = {}
        for name, own in replica.buffers.items() if self.average_buffers else ():
            if name not in self.buffers:
                continue
            held = self.buffers[name]
            if own.shape != held.shape:
                raise UserError(
                    f"buffers='average': the buffer {name} has shape {tuple(held.shape)} at the server and "
                    f"{tuple(own.shape)} after a client's steps, so there is no average. Keep its shape, or use "
                    "buffers='keep'."
                )
            own = own.to(held.dtype)
            if held.is_floating_point() or held.is_complex():
                kind = torch.promote_types(held.dtype, torch.float32)
                same = (own == held) | (own.isnan() & held.isnan())  # a mask of -inf stays what it is
                change = torch.where(same, 0, own.to(kind) - held.to(kind))
                if not bool(change.isfinite().all()):
                    return None
                values["buffer:" + name] = change * weight
            else:  # gloo knows no bool
                values["max:" + name] = own.to(torch.uint8 if held.dtype == torch.bool else held.dtype, copy=True)
        return values

    def _sum(self, values: Leaf, key: str, row: Tensor, weight: float) -> None:
        """Add a row that is ours to keep, uniformly and by weight (where these differ)."""
        uniform, weighted = ("sum:" + key, "weighted:" + key) if key else ("update", "weighted")
        if self.uniform:
            values[uniform if key else weighted] = row
        else:
            values[uniform], values[weighted] = row, row * weight


def result_dtype(declaration: Declaration, default: torch.dtype) -> torch.dtype:
    """The dtype in which an upload is summed: at least float32 for floating point."""
    kind = declaration.dtype or default
    return torch.promote_types(kind, torch.float32) if kind.is_floating_point else kind
