"""Rows of client state over processes.

Process i mod W keeps the rows of client i, and sends them to the process that trains client i.
"""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.machine.processes import timeout
from fl_lightning.storage.client_store import ClientStore

Rows = dict[str, dict[int, Tensor]]  # name of a state -> client -> row


class ClientRows:
    """The store of this process, and rows of other processes, fetched for the present round."""

    def __init__(self, store: ClientStore, rank: int = 0, world: int = 1) -> None:
        self.store = store
        self.rank = rank
        self.world = world
        self._fetched: Rows = {}
        self._group: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which is outside of any round and any group of processes."""
        return {**vars(self), "_fetched": {}, "_group": None}

    def read(self, key: str, client: int) -> Tensor | None:
        """A committed row, or None; in a round, of clients that this process trains or owns."""
        if client % self.world == self.rank:
            return self.store.read(key, client)
        return self._fetched.get(key, {}).get(client)

    def at_home(self, key: str, client: int) -> Tensor | None:
        """Return a committed row of a client whose rows this process keeps; None for others."""
        return self.store.read(key, client) if client % self.world == self.rank else None

    def names(self) -> list[str]:
        """Return the names of states of which this process can read rows at present."""
        return sorted({*self.store.names(), *self._fetched})

    def fetch(self, ids: list[int]) -> None:
        """Before a round: send rows to process j mod W, which trains participant j."""
        if self.world == 1:
            return
        outgoing: list[Rows] = [{} for _ in range(self.world)]
        for j, client in enumerate(ids):
            trainer = j % self.world
            if client % self.world == self.rank and trainer != self.rank:
                for key in self.store.names():
                    row = self.store.read(key, client)
                    if row is not None:
                        outgoing[trainer].setdefault(key, {})[client] = row
        self._fetched = self.send(outgoing)

    def bring_home(self, rows: Rows) -> Rows:
        """After a round, send rows to the processes that own them, and return this process's.

        Nothing is committed yet, so if a process ends, all others are unchanged.
        """
        if self.world == 1:
            return rows
        outgoing: list[Rows] = [{} for _ in range(self.world)]
        for key, by_client in rows.items():
            for client, row in by_client.items():
                outgoing[client % self.world].setdefault(key, {})[client] = row
        own_rows = outgoing[self.rank]
        outgoing[self.rank] = {}
        return merged([own_rows, self.send(outgoing)])

    def commit(self, rows: Rows) -> None:
        """Make these rows the clients' state, all at once; a second call changes nothing."""
        self._fetched = {}
        if rows:
            self.store.commit(rows, make_room=False)

    def send(self, outgoing: list[Rows]) -> Rows:
        """Send rows to other processes, ``outgoing[rank]`` each, and return those that came."""
        return merged(self._exchange(outgoing))

    def _exchange(self, outgoing: list[Rows]) -> list[Rows]:
        # Rows are on the CPU, wherever the run trains, so they are sent over gloo.
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timeout())
        blobs = [_pack(rows) for rows in outgoing]
        sizes = torch.tensor([len(b) for b in blobs])
        table = [torch.empty_like(sizes) for _ in range(self.world)]
        dist.all_gather(table, sizes, group=self._group)
        incoming: dict[int, Tensor] = {}
        # Start all transfers before waiting for one: two processes that both send first would wait
        # for each other.
        jobs = []
        for other in range(self.world):
            if other == self.rank:
                continue
            if len(blobs[other]):
                jobs.append(dist.isend(blobs[other], other, group=self._group))
            size = int(table[other][self.rank])
            if size:
                incoming[other] = torch.empty(size, dtype=torch.uint8)
                jobs.append(dist.irecv(incoming[other], other, group=self._group))
        for job in jobs:
            if job is not None:
                job.wait(timeout())
        return [_unpack(incoming[other]) for other in sorted(incoming)]


def merged(several: list[Rows]) -> Rows:
    rows: Rows = {}
    for one in several:
        for key, by_client in one.items():
            rows.setdefault(key, {}).update(by_client)
    return rows


def _pack(rows: Rows) -> Tensor:
    if not rows:
        return torch.empty(0, dtype=torch.uint8)
    buffer = io.BytesIO()
    torch.save(rows, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _unpack(blob: Tensor) -> Rows:
    rows: Rows = torch.load(io.BytesIO(blob.numpy().tobytes()), weights_only=True)
    return rows
