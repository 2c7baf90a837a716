"""Clients' contributions to a round: updates, uploads, buffers and logs are summed in order,
and rows staged.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_lightning.aggregation import traffic
from fl_lightning.aggregation.over_processes import TreeSum, sum_over_processes
from fl_lightning.callback_list import CallbackList, checked_rows
from fl_lightning.errors import UserError
from fl_lightning.learner.buffers import BufferPolicy
from fl_lightning.learner.layout import all_finite, same_bits
from fl_lightning.machine.device_memory import to_host
from fl_lightning.machine.processes import gathered
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.client_sums import Total
from fl_lightning.round.clients import Clients
from fl_lightning.round.context import BUFFER, Round
from fl_lightning.round.transaction import RoundTransaction

# In runs with personal models, the client state of this name holds each client's latest round.
FINISHED = "personal.round"
# The client state in which the server keeps, for clients at sites, their last round that counted.
AT_SITES = "sites.round"


@dataclass
class ClientResult:
    """The results of one client in a round.

    Args:
        counts: counts of its traffic; None: it was not sent anything.
        answered: whether it sent its results; if not, it counts as dropped.
        finished: whether all its results are finite; if not, only its counts are set.
        update: ``(D,)``, as transmitted; ``shared``: a method may still hold and change it.
        before_transmit: ``(D,)``, the update before that, if parts are not averaged; else None.
        uploads, logs: by name, one row and one number each.
        buffers: changes of averaged buffers; ``maxima``: values of buffers that count.
        rows: rows of states, by name; ``exchanged``: those that the client's neighbours get.
        kept: how many numbers the client keeps until its next round; None: its rows show it.
        holds: ``(D,)`` bool, the coordinates that it trained, if clients differ in them; else None.
        withheld: whether its logs and metrics stay at its site.
    """

    client: int
    counts: list[int] | None
    answered: bool = True
    finished: bool = False
    update: Tensor | None = None
    shared: bool = False
    before_transmit: Tensor | None = None
    uploads: dict[str, Tensor] = field(default_factory=dict)
    logs: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    exchanged: dict[str, Tensor] = field(default_factory=dict)
    metrics: Any = None
    kept: int | None = None
    holds: Tensor | None = None
    withheld: bool = False

    def sends(self, round: Round) -> Tensor | None:
        """Return ``(D,)`` bool: the coordinates that the client sends; None: all."""
        return self.holds if round.averaged is None else round.averaged


class UpdateAccumulator:
    """Adds one client at a time, from any thread and in any order.

    The total does not depend on the thread or the order.

    Args:
        leaves: number of clients that this process trains.
        policy: which of the clients' buffers the server averages.

    ``changed``: buffers that clients changed although the server keeps its own, and that no note
    has named yet.
    """

    def __init__(
        self,
        transaction: RoundTransaction,
        methods: CallbackList,
        leaves: int,
        policy: BufferPolicy,
    ) -> None:
        self.transaction = transaction
        self.methods = methods
        buffers = transaction.round.buffers
        self.averaged = [name for name, value in buffers.items() if policy.averages(name, value)]
        self.untold = [name for name, value in buffers.items() if policy.untold(name, value)]
        self.changed: set[str] = set()
        self.uniform = all(weight == 1 for weight in transaction.round.weights.values())
        # A method that gathers all updates may change them, so they are summed after it.
        self.gathers = bool(methods.gathering)
        self.diverged: list[int] = []  # clients of this process whose update is not finite
        self._sum: TreeSum[Total] = TreeSum(leaves)
        self._lock = threading.Lock()

    def __call__(self, leaf: int, group: ClientGroup | ClientResult) -> None:
        """Add one client's results (a group of one, or received ones), and stage its rows."""
        home = group if isinstance(group, ClientResult) else self.result_of(group)
        client = home.client
        values = Total()
        shared = {"uploads", "update", "weighted"} if home.shared else {"uploads"}
        transmitted = None
        if home.finished:
            transmitted = self._finish(values, home, self.transaction.round.weights[client])
        # A client that diverged has communicated nevertheless, so its traffic is summed.
        if home.counts is not None:
            values.traffic = torch.tensor(home.counts)
        # So far only this client's tensors were used. From here on threads share the transaction.
        with self._lock:
            if home.counts is None:
                self.transaction.unsent.append(client)
            if not home.answered:
                self.transaction.dropped.append(client)
            elif not home.finished:
                self.diverged.append(client)
            elif home.metrics is not None:
                self.transaction.metrics[client] = home.metrics
            if home.kept is not None:
                self.transaction.kept[client] = home.kept
            if transmitted is not None:
                # The method may still hold the tensor that it returned from `transmit`.
                if home.shared:
                    self.transaction.updates[client] = transmitted.clone()
                else:
                    self.transaction.updates[client] = transmitted
            for key, row in home.rows.items():
                self.transaction.rows.setdefault(key, {})[client] = row
            for key, row in home.exchanged.items():
                self.transaction.exchanged.setdefault(key, {})[client] = row
            self._sum.add(leaf, None if home.counts is None else values, shared)

    def result_of(self, group: ClientGroup) -> ClientResult:
        (client,) = group.ids
        round = self.transaction.round
        counts = traffic.of_client(group, self.methods)
        home = ClientResult(client, counts)
        if group.untrained is not None and round.trained is None:
            home.holds = ~group.untrained[0]
        where = home.sends(group.round)
        # After a `broadcast`, and in asynchronous runs, `given` is the model that the client was
        # given.
        given = group.round.w
        base = self.transaction.base
        transmits = self.methods.owner("transmit") is not None
        # FedAsync mixes with the server's present model, which a client that compresses does not
        # have.
        # A client does not send coordinates that it did not train, whatever their values are.
        update = group.trained_part(group.x - (given if base is None or transmits else base))
        # A client counts only if everything that it contributes is finite: its update, the models
        # that it keeps, what methods have it send, and its buffers.
        kept = [row for _, row in group.written() if row.shape == update.shape]
        # A finite update may come with a square that overflowed, and a sum over clients would keep
        # that. Uploads that the server could compute from the update itself are not checked.
        for key, value in group.uploads.items():
            if self.methods.declared[key].goes_up({"x", "displacement"}):
                kept.append(value)
        exchanged = dict(group.exchanged())
        kept += exchanged.values()
        finite = all_finite(update) and all(map(all_finite, kept))
        if not finite or not self._take_buffers(home, group):
            # The message would have the usual size, so count its traffic with a finite stand-in,
            # which is then dropped.
            UpdateAccumulator.transmitted(self, group, torch.zeros_like(update))
            traffic.add_upload(counts, group, where, self.methods)
            return home
        home.finished = True
        # Parts that are not averaged are evaluated as the client trained them, not as it sent them.
        # So save them before `transmit` may compress or perturb the update.
        if round.parts is not None:
            home.before_transmit = update[0].to(round.wide, copy=True)
        sent = self.transmitted(group, update)
        home.shared = transmits
        if transmits and base is not None:
            sent = sent + (given - base)
        home.exchanged = to_host({key: value[0] for key, value in exchanged.items()})
        # `transmit` was the last hook that may read scratch, so release its memory before the sum
        # grows.
        group.drop_scratch()
        home.update = sent[0]
        home.uploads = {key: value[0] for key, value in group.uploads.items()}
        traffic.add_upload(counts, group, where, self.methods)
        home.logs = {name: per_client[0] for name, per_client in group.logs.items()}
        home.metrics = group.metrics
        rows = {key: value[0] for key, value in group.written()}
        rows |= {**group.optimizer_rows, **group.kept_parts(), **self._own(group)}
        home.rows = to_host(rows)
        return home

    def transmitted(self, group: ClientGroup, update: Tensor) -> Tensor:
        """Return the update ``(1, D)`` that a client sends, after a method's ``transmit``."""
        transmit = self.methods.owner("transmit")
        if transmit is None:
            return update
        sent = self.methods.call(transmit, Clients(group), update)
        return checked_rows(transmit, sent, update)

    def total(self) -> tuple[Total, list[int]]:
        """Sum over the finished clients of all processes, and the clients that diverged."""
        diverged: list[int] = []
        metrics: dict[int, Any] = {}
        changed: set[str] = set()
        for share in gathered((self.diverged, self.transaction.metrics, self.changed)):
            diverged += share[0]
            metrics.update(share[1])
            changed |= share[2]
        self.transaction.metrics = metrics
        self.changed = changed
        return sum_over_processes(self._sum.total, Total) or Total(), sorted(diverged)

    def _finish(self, values: Total, home: ClientResult, weight: float) -> Tensor | None:
        """Put the values of a client that finished into ``values``.

        Returns:
            The client's update ``(D,)``, if a method gets the updates of all clients; else None.
        """
        assert home.update is not None
        update = home.update.to(self.transaction.round.wide)
        values.weight = torch.tensor(float(weight), dtype=torch.float64)
        if home.before_transmit is not None:
            values.copies = home.before_transmit * weight
        if home.holds is not None:
            values.holders = home.holds.to(torch.float64) * weight
        if not self.gathers:
            values.weighted = update if self.uniform else update * weight
            values.update = None if self.uniform else update
        for key, value in home.uploads.items():
            upload = value.to(self.methods.declared[key].summed_as(home.update.dtype))
            values.uploads[key] = upload
            if not self.uniform:
                values.weighted_uploads[key] = upload * weight
        for name, value in home.buffers.items():
            values.buffers[name] = value * weight
        values.maxima = home.maxima
        for name, value in home.logs.items():
            values.logs[name] = value.to(torch.float64, copy=True)
            values.logged[name] = torch.ones((), dtype=torch.float64, device=value.device)
        return update if self.gathers else None

    def _own(self, group: ClientGroup) -> dict[str, Tensor]:
        """Framework's rows that a client keeps: buffers, and for its personal model its round."""
        round = self.transaction.round
        rows = {}
        if self.methods.owner("personal") is not None:
            rows[FINISHED] = torch.tensor(round.t)
        for name, value in group.buffers.items():
            if name in round.own_buffers and name in round.buffers:
                rows[BUFFER + name] = value.clone()
        return rows

    def _take_buffers(self, home: ClientResult, group: ClientGroup) -> bool:
        """Take the changes of floating-point and complex buffers since the client got them.

        For other buffers the values are taken. Return whether all changes are finite.
        """
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
                # If no step changed a mask of -inf, its change is 0, and not -inf + inf.
                same = (buffer == at_server) | (buffer.isnan() & at_server.isnan())
                change = torch.where(same, 0, buffer.to(wide) - at_server.to(wide))
                if not bool(change.isfinite().all()):
                    return False
                home.buffers[name] = change
            else:
                # Gloo does not support bool, so maxima over processes are taken of bytes.
                dtype = torch.uint8 if at_server.dtype == torch.bool else at_server.dtype
                home.maxima[name] = buffer.to(dtype, copy=True)
        return True
