"""What clients contribute: updates, uploads, buffers and logs go into the round's ordered sum, rows
are staged.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from fl_lightning.aggregation import traffic
from fl_lightning.aggregation.tree_sum import Leaf, TreeSum, sum_over_processes
from fl_lightning.buffers import BufferPolicy
from fl_lightning.devices import to_host
from fl_lightning.errors import UserError
from fl_lightning.learner import all_finite, same_bits
from fl_lightning.methods import Methods, checked_rows
from fl_lightning.processes import gathered
from fl_lightning.round.clients import Clients
from fl_lightning.round.context import BUFFER
from fl_lightning.round.ledger import Ledger
from fl_lightning.state import Upload

# the row of a client's latest round, in runs whose method decides what a client uses
FINISHED = "personal.round"


class Contributions:
    """Adds one client at a time, from any thread and in any order; the total does not depend on
    either.

    Args:
        leaves: number of clients that this process trains.
        policy: which of the clients' buffers the server averages.

    ``changed``: buffers that stay the server's although clients changed them, which nobody was
        told.
    """

    def __init__(self, ledger: Ledger, methods: Methods, leaves: int, policy: BufferPolicy) -> None:
        self.ledger = ledger
        self.methods = methods
        buffers = ledger.round.buffers
        self.averaged = [name for name, value in buffers.items() if policy.averages(name, value)]
        self.untold = [name for name, value in buffers.items() if policy.untold(name, value)]
        self.changed: set[str] = set()
        self.uniform = all(weight == 1 for weight in ledger.round.weights.values())
        # in place of the sum of updates, which follows later
        self.gathers = bool(methods.gathering)
        self.diverged: list[int] = []  # clients of this process whose update is not finite
        self._sum = TreeSum(leaves)
        self._lock = threading.Lock()

    def add(self, leaf: int, clients: Clients) -> None:
        """Add what one client (``clients`` is a group of one) contributes, and stage its rows."""
        (client,) = clients.client_ids
        round = self.ledger.round
        counts = traffic.of_client(clients, round.buffers)
        update = clients.x - round.w
        values: Leaf = {}
        lent: set[str] = set()
        rows: dict[str, Tensor] = {}
        if all_finite(update):
            buffers = self._buffers(clients.buffers, round.weights[client])
        else:
            buffers = None
        finished = buffers is not None
        if buffers is not None:
            lent = self._finish(values, clients, client, update, counts)
            values.update(buffers)
            rows = {key: value[0] for key, value in clients.written()}
            rows = to_host(
                {**rows, **clients.optimizer_rows, **clients.kept_parts(), **self._own(clients)}
            )
        transmitted = values.pop("update") if self.gathers and finished else None
        values["traffic"] = torch.tensor(counts)
        with self._lock:
            if not finished:
                self.diverged.append(client)
            elif clients.metrics is not None:
                self.ledger.metrics[client] = clients.metrics
            read = self.ledger.mean_gradient_read, clients.mean_gradient_read
            # of several the same one, whoever comes first
            self.ledger.mean_gradient_read = max(read)
            if transmitted is not None:
                if "update" in lent:
                    self.ledger.updates[client] = transmitted.clone()
                else:
                    self.ledger.updates[client] = transmitted
            for key, row in rows.items():
                self.ledger.rows.setdefault(key, {})[client] = row
            self._sum.add(leaf, values, lent)

    def total(self) -> tuple[Leaf, list[int]]:
        """The sum over all clients that finished, of all processes, and who diverged; the same
        everywhere.
        """
        everyone = gathered((self.diverged, self.ledger.metrics, self.changed))
        diverged = sorted(client for each, _, _ in everyone for client in each)
        self.ledger.metrics = {
            client: own for _, each, _ in everyone for client, own in each.items()
        }
        self.changed = {name for _, _, each in everyone for name in each}
        return sum_over_processes(self._sum.total) or {}, diverged

    def _finish(
        self, values: Leaf, clients: Clients, client: int, update: Tensor, counts: list[int]
    ) -> set[str]:
        """Put what a client that finished gives into ``values``; the names of those that a method
        may still hold.
        """
        round = self.ledger.round
        weight = self.ledger.round.weights[client]
        lent: set[str] = set()
        values["weight"] = torch.tensor(float(weight), dtype=torch.float64)
        if round.parts is not None:
            values["copies"] = update[0].to(round.wide) * weight
        transmit = self.methods.owner("transmit")
        if transmit is not None:
            update = checked_rows(transmit, transmit(clients, update), update)
            lent |= {"update", "weighted"}
        clients.drop_scratch()
        self._add_row(values, "", update[0].to(round.wide), weight)
        for key, value in clients.uploads.items():
            declared = self.methods.declared[key]
            assert isinstance(declared, Upload)
            self._add_row(values, key, value[0].to(declared.summed_as(update.dtype)), weight)
            lent.add("sum:" + key)
        traffic.add_upload(counts, clients, self.methods.sent_by_clients())
        for name, per_client in clients.logs.items():
            values["log:" + name] = per_client[0].to(torch.float64, copy=True)
            values["num:" + name] = torch.ones((), dtype=torch.float64, device=per_client.device)
        return lent

    def _own(self, clients: Clients) -> dict[str, Tensor]:
        """What else a client keeps: its buffers, where they are its own; its latest round, for its
        personal model.
        """
        round = self.ledger.round
        rows = {}
        if self.methods.owner("personal") is not None:
            rows[FINISHED] = torch.tensor(round.t)
        own = {name: value for name, value in clients.buffers.items() if name in round.own_buffers}
        rows |= {
            BUFFER + name: value.clone() for name, value in own.items() if name in round.buffers
        }
        return rows

    def _buffers(self, trained: dict[str, Tensor], weight: float) -> Leaf | None:
        """Changes of floating-point and complex buffers, values of other ones; None if a change is
        not finite.
        """
        values: Leaf = {}
        before = self.ledger.round.buffers
        unlike = (n for n in self.untold if n in trained and not same_bits(trained[n], before[n]))
        self.changed.update(unlike)
        for name in self.averaged:
            if name not in trained:
                continue
            own = trained[name]
            held = before[name]
            if own.shape != held.shape:
                raise UserError(
                    f"buffers='average': the buffer {name} has shape {tuple(held.shape)} at the "
                    f"server and {tuple(own.shape)} after a client's steps, so there is no "
                    "average. Keep its shape, or use buffers='keep'."
                )
            own = own.to(held.dtype)
            if held.is_floating_point() or held.is_complex():
                kind = torch.promote_types(held.dtype, torch.float32)
                # a mask of -inf stays what it is
                same = (own == held) | (own.isnan() & held.isnan())
                change = torch.where(same, 0, own.to(kind) - held.to(kind))
                if not bool(change.isfinite().all()):
                    return None
                values["buffer:" + name] = change * weight
            else:  # gloo knows no bool
                values["max:" + name] = own.to(
                    torch.uint8 if held.dtype == torch.bool else held.dtype, copy=True
                )
        return values

    def _add_row(self, values: Leaf, key: str, row: Tensor, weight: float) -> None:
        """A row, uniformly and by weight (where these differ); ``key`` "": the update."""
        if key:
            uniform, weighted = ("sum:" + key, "weighted:" + key)
        else:
            uniform, weighted = ("update", "weighted")
        if self.gathers and not key:
            values[uniform] = row
        elif self.uniform:
            values[uniform if key else weighted] = row
        else:
            values[uniform] = row
            values[weighted] = row * weight
