"""The exchange of a round without a server: clients mix what they assigned with their neighbours.

It lies between the clients' training and the commit, so no engine knows of it. The values that a
client gets are added up in one process, in the same order on any number of processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fl_lightning.aggregation.over_processes import (
    TreeSum,
    share_of,
    sum_over_processes,
    visiting_order,
)
from fl_lightning.callback_list import CallbackList
from fl_lightning.errors import UserError, WrongKind, refuse_both
from fl_lightning.machine.device_memory import to_host
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.client_sums import Total
from fl_lightning.round.clients import AfterExchange
from fl_lightning.round.declared_state import Exchanged
from fl_lightning.round.neighbourhood import Neighbourhood, mixed
from fl_lightning.round.server import Server
from fl_lightning.round.transaction import RoundTransaction
from fl_lightning.storage.client_rows import ClientRows, Rows


class NeighbourExchange:
    """The exchange of one round, in one of ``world`` processes.

    Args:
        rows: through which processes send rows to each other.
    """

    def __init__(
        self,
        transaction: RoundTransaction,
        methods: CallbackList,
        rows: ClientRows,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.transaction = transaction
        self.methods = methods
        self.rows = rows
        self.rank = rank
        self.world = world
        self.place = {client: j % world for j, client in enumerate(transaction.round.ids)}
        self.share = share_of(transaction.round.ids, rank, world)
        self.finished = set(transaction.finished)
        self.mine = [client for client in self.share if client in self.finished]

    def neighbourhood(self, server: Server) -> Neighbourhood:
        """Return who sends to whom, from the method that decides it."""
        hook = self.methods.owner("neighbours")
        assert hook is not None
        given = self.methods.call(hook, server)
        name = self.methods.name_of_owner("neighbours")
        if not isinstance(given, Neighbourhood):
            raise WrongKind(
                f"{name}.neighbours returned {given!r}; it has to return a Neighbourhood"
            )
        return given.checked(self.transaction.finished, name)

    def run(self, neighbourhood: Neighbourhood) -> None:
        """Mix the clients' values, call ``on_exchange`` for each, and stage what it writes."""
        values = {}
        for key, declared in self.methods.declared.items():
            if isinstance(declared, Exchanged):
                values[key] = self._mixed(key, neighbourhood)
        sums: TreeSum[Total] = TreeSum(len(self.share))
        for leaf in visiting_order(len(self.share)):
            client = self.share[leaf]
            sums.add(leaf, self._end(client, values) if client in self.finished else None)
        total = sum_over_processes(sums.total, Total)
        if total is not None:
            of_round = self.transaction.total
            of_round.uploads |= total.uploads
            of_round.weighted_uploads |= total.weighted_uploads
            of_round.logs |= total.logs
            of_round.logged |= total.logged

    def _end(self, client: int, values: Mapping[str, Mapping[int, Tensor]]) -> Total:
        """Call ``on_exchange`` for a client, stage its rows, and return what the server sums."""
        transaction = self.transaction
        round = replace(transaction.round, read=self._as_left)
        group = ClientGroup(round, [client], transaction.w.view(1, -1))
        for key, of_clients in values.items():
            declared = self.methods.declared[key]
            assert isinstance(declared, Exchanged)
            group.receive(key, declared, of_clients[client])
        self.methods.run("on_exchange", AfterExchange(group, len(transaction.finished)))
        rows = to_host({key: value[0] for key, value in group.written()})
        for key, row in rows.items():
            transaction.rows.setdefault(key, {})[client] = row
        summed = Total()
        weight = round.weights[client]
        for key, value in group.uploads.items():
            upload = value[0].to(self.methods.declared[key].summed_as(value.dtype), copy=True)
            summed.uploads[key] = upload
            summed.weighted_uploads[key] = upload * weight
        for name, per_client in group.logs.items():
            summed.logs[name] = per_client[0].to(torch.float64, copy=True)
            summed.logged[name] = torch.ones((), dtype=torch.float64, device=per_client.device)
        return summed

    def _as_left(self, key: str, client: int) -> Tensor | None:
        """Return a row as the client left it in this round, or else as committed."""
        row = self.transaction.rows.get(key, {}).get(client)
        return self.transaction.round.read(key, client) if row is None else row

    def _mixed(self, key: str, neighbourhood: Neighbourhood) -> dict[int, Tensor]:
        """Return Σ_j V_ij value_j for each client i of this process."""
        given = self.transaction.exchanged.pop(key, {})
        missing = [client for client in self.mine if client not in given]
        if missing:
            name = key.rpartition(".")[2]
            raise UserError(
                f"method: client {missing[0]} did not assign {key} in round {self.transaction.t}, "
                f"which its neighbours need: self.{name}[clients] = … in on_local_end."
            )
        values = given
        if neighbourhood.everyone:
            mean = self._mean(key, given)
            values = dict.fromkeys(self.mine, mean)
        else:
            addends = neighbourhood.addends(self.mine)
            for _ in range(neighbourhood.steps):
                known = {**values, **self._fetched(key, values, neighbourhood)}
                values = {client: mixed(addends[client], known) for client in self.mine}
        shared = neighbourhood.shared
        if shared is None:
            return values
        here = shared.cpu()
        return {
            client: torch.where(here, value, given[client].to(value))
            if value.shape == here.shape
            else value
            for client, value in values.items()
        }

    def _mean(self, key: str, given: Mapping[int, Tensor]) -> Tensor:
        """Return the uniform mean over the clients that finished, of all processes."""
        sums: TreeSum[Total] = TreeSum(len(self.share))
        for leaf in visiting_order(len(self.share)):
            row = given.get(self.share[leaf])
            total = None
            if row is not None:
                wide = torch.promote_types(row.dtype, torch.float32)
                total = Total(uploads={key: row.to(wide, copy=True)})
            sums.add(leaf, total)
        of_all = sum_over_processes(sums.total, Total)
        assert of_all is not None  # a client finished
        return of_all.uploads[key] / len(self.transaction.finished)

    def _fetched(
        self, key: str, values: Mapping[int, Tensor], neighbourhood: Neighbourhood
    ) -> dict[int, Tensor]:
        """Return the values of other processes' clients that this process's clients get."""
        if self.world == 1:
            return {}
        outgoing: list[Rows] = [{} for _ in range(self.world)]
        pairs: Sequence[tuple[int, int]] = list(
            zip(neighbourhood.senders.tolist(), neighbourhood.receivers.tolist(), strict=True)
        )
        for sender, receiver in pairs:
            there = self.place[receiver]
            if self.place[sender] == self.rank and there != self.rank:
                outgoing[there].setdefault(key, {})[sender] = values[sender]
        return self.rows.send(outgoing).get(key, {})


def refuse_other_updates(methods: CallbackList, server: Server) -> None:
    """Call ``on_server_update``, and refuse methods that change ``server.update``.

    Without a server w is the mean of the clients' models, and no method may move it elsewhere.
    """
    owner = methods.name_of_owner("neighbours")
    for call in methods["on_server_update"]:
        update, version = server.update, server.update._version
        methods.call(call, server, *methods.asked(call, server))
        changed = server.update is not update or update._version != version
        name = type(getattr(call, "__self__", call)).__name__
        if changed and name != owner:
            no_server = f"with {owner} there is no server: w is the mean of the clients' models"
            refuse_both(owner, name, f"{name} changes server.update, and {no_server}")
