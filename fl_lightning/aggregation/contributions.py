"""Clients' contributions: updates, uploads, buffers and logs are summed in order, rows staged."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from fl_lightning.aggregation import traffic
from fl_lightning.aggregation.tree_sum import Leaf, TreeSum, sum_over_processes
from fl_lightning.errors import UserError
from fl_lightning.learner.buffers import BufferPolicy
from fl_lightning.learner.layout import all_finite, same_bits
from fl_lightning.machine.devices import to_host
from fl_lightning.machine.processes import gathered
from fl_lightning.methods import Methods, checked_rows
from fl_lightning.round.clients import Clients
from fl_lightning.round.context import BUFFER
from fl_lightning.round.group import ClientGroup
from fl_lightning.round.ledger import Ledger
from fl_lightning.round.state import Upload

# In runs with personal models a client's latest round is a row of it, under this name.
FINISHED = "personal.round"


class Contributions:
    """Adds one client at a time, from any thread and in any order.

    The total depends on neither.

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
        # A method may change the updates once all are gathered, so these are summed later then.
        self.gathers = bool(methods.gathering)
        self.diverged: list[int] = []  # clients of this process whose update is not finite
        self._sum = TreeSum(leaves)
        self._lock = threading.Lock()

    def add(self, leaf: int, group: ClientGroup) -> None:
        """Add what one client contributes, a group of one, and stage its rows."""
        (client,) = group.ids
        round = self.ledger.round
        counts = traffic.of_client(group, round.buffers)
        # Under a `broadcast`, and where it is asynchronous, that is what the client was given.
        given = group.round.w if self.ledger.base is None else self.ledger.base
        update = group.x - given
        values: Leaf = {}
        lent: set[str] = set()
        rows: dict[str, Tensor] = {}
        buffers: Leaf | None = None
        # A client counts only if all it would bring is finite: its update, then its buffers.
        if all_finite(update):
            buffers = self._buffers(group, round.weights[client])
        finished = buffers is not None
        if buffers is not None:
            lent = self._finish(values, group, client, update, counts)
            values.update(buffers)
            rows = {key: value[0] for key, value in group.written()}
            rows |= {**group.optimizer_rows, **group.kept_parts(), **self._own(group)}
            rows = to_host(rows)
        transmitted = values.pop("update") if self.gathers and finished else None
        # A client that diverged has communicated all the same, so its traffic is summed.
        values["traffic"] = torch.tensor(counts)
        # All above works on this client's own tensors, from here on threads share the ledger.
        with self._lock:
            if not finished:
                self.diverged.append(client)
            elif group.metrics is not None:
                self.ledger.metrics[client] = group.metrics
            # Of several readers the largest name is told, whichever thread comes first.
            readers = (self.ledger.mean_gradient_read, group.mean_gradient_read)
            self.ledger.mean_gradient_read = max(readers)
            if transmitted is not None:
                # The method may still hold what it returned from `transmit`.
                if "update" in lent:
                    self.ledger.updates[client] = transmitted.clone()
                else:
                    self.ledger.updates[client] = transmitted
            for key, row in rows.items():
                self.ledger.rows.setdefault(key, {})[client] = row
            self._sum.add(leaf, values, lent)

    def total(self) -> tuple[Leaf, list[int]]:
        """The sum over the clients of all processes that finished, and who diverged."""
        diverged: list[int] = []
        metrics: dict[int, Any] = {}
        changed: set[str] = set()
        for share in gathered((self.diverged, self.ledger.metrics, self.changed)):
            diverged += share[0]
            metrics.update(share[1])
            changed |= share[2]
        self.ledger.metrics = metrics
        self.changed = changed
        return sum_over_processes(self._sum.total) or {}, sorted(diverged)

    def _finish(
        self, values: Leaf, group: ClientGroup, client: int, update: Tensor, counts: list[int]
    ) -> set[str]:
        """Put the values of a client that finished into ``values``.

        Returns:
            the names of those that a method may still hold.
        """
        round = self.ledger.round
        weight = self.ledger.round.weights[client]
        lent: set[str] = set()
        values["weight"] = torch.tensor(float(weight), dtype=torch.float64)
        # What clients keep of parts that are not averaged is evaluated as trained, not as sent:
        # so it is added before `transmit` may compress or perturb the update.
        if round.parts is not None:
            values["copies"] = update[0].to(round.wide) * weight
        transmit = self.methods.owner("transmit")
        if transmit is not None:
            update = checked_rows(
                transmit, self.methods.call(transmit, Clients(group), update), update
            )
            lent |= {"update", "weighted"}
        # `transmit` was the last hook that may read scratch; its memory goes before the sum grows.
        group.drop_scratch()
        self._add_row(values, "", update[0].to(round.wide), weight)
        for key, value in group.uploads.items():
            declared = self.methods.declared[key]
            assert isinstance(declared, Upload)
            self._add_row(values, key, value[0].to(declared.summed_as(update.dtype)), weight)
            lent.add("sum:" + key)
        traffic.add_upload(counts, group, self.methods.sent_by_clients())
        for name, per_client in group.logs.items():
            values["log:" + name] = per_client[0].to(torch.float64, copy=True)
            values["num:" + name] = torch.ones((), dtype=torch.float64, device=per_client.device)
        return lent

    def _own(self, group: ClientGroup) -> dict[str, Tensor]:
        """Rows of its own that a client keeps: buffers, and for its personal model its round."""
        round = self.ledger.round
        rows = {}
        if self.methods.owner("personal") is not None:
            rows[FINISHED] = torch.tensor(round.t)
        for name, value in group.buffers.items():
            if name in round.own_buffers and name in round.buffers:
                rows[BUFFER + name] = value.clone()
        return rows

    def _buffers(self, group: ClientGroup, weight: float) -> Leaf | None:
        """Changes of floating-point and complex buffers since the client was given them.

        Of other ones it is their values.

        Returns:
            None if a change is not finite.
        """
        values: Leaf = {}
        trained = group.buffers
        buffers = group.round.buffers
        for name in self.untold:
            if name in trained and not same_bits(trained[name], buffers[name]):
                self.changed.add(name)
        for name in self.averaged:
            if name not in trained:
                continue
            buffer = trained[name]
            at_server = buffers[name]
            if buffer.shape != at_server.shape:
                raise UserError(
                    f"buffers='average': the buffer {name} has shape {tuple(at_server.shape)} at "
                    f"the server and {tuple(buffer.shape)} after a client's steps, so there is no "
                    "average. Keep its shape, or use buffers='keep'."
                )
            buffer = buffer.to(at_server.dtype)
            if at_server.is_floating_point() or at_server.is_complex():
                wide = torch.promote_types(at_server.dtype, torch.float32)
                # A mask of -inf that no step changed has the change 0, not -inf + inf.
                same = (buffer == at_server) | (buffer.isnan() & at_server.isnan())
                change = torch.where(same, 0, buffer.to(wide) - at_server.to(wide))
                if not bool(change.isfinite().all()):
                    return None
                values["buffer:" + name] = change * weight
            else:
                # Gloo knows no bool, so that maxima over processes are taken of bytes.
                dtype = torch.uint8 if at_server.dtype == torch.bool else at_server.dtype
                values["max:" + name] = buffer.to(dtype, copy=True)
        return values

    def _add_row(self, values: Leaf, key: str, row: Tensor, weight: float) -> None:
        """Put in a row, uniformly and by weight (where these differ); ``key`` "": the update."""
        uniform = "sum:" + key if key else "update"
        weighted = "weighted:" + key if key else "weighted"
        if self.gathers and not key:
            values[uniform] = row
        elif self.uniform:
            values[uniform if key else weighted] = row
        else:
            values[uniform] = row
            values[weighted] = row * weight
