"""Rows of client state: in memory up to a budget, on disk as segments that checkpoints share.

A commit is all or nothing. A flush writes all rows that changed since the last flush as one new
segment. An index gives the segment of each row, and is all that a checkpoint holds. So the cost of
a checkpoint depends only on the changed rows, and an older one can be loaded as long as its
segments exist.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.storage import segments
from fl_lightning.storage.held_rows import HeldRows, shared
from fl_lightning.storage.segments import RANKS, Index, segment_name, segment_number

IntArray = np.ndarray[Any, np.dtype[np.int64]]
Placed = tuple[IntArray, IntArray]  # clients, ascending, and the segment that holds each one's row

GONE = "the file is missing (a run that goes on removes what no checkpoint beside it needs)"
_NEW = 1 / 32  # all segments are checked again if this share of them is new


class ClientStore:
    """Client state rows by (name, client).

    ``budget_bytes``: memory for rows; rows beyond it lie on disk. ``rank``, ``world_size``: each of
    several processes has its own store, writes its own files and, after ``load``, owns the clients
    with ``client % world_size == rank``. Several threads may read, also while another one writes.
    """

    def __init__(self, budget_bytes: int = 2 << 30, rank: int = 0, world_size: int = 1) -> None:
        self.budget_bytes = budget_bytes
        self.rank = rank
        self.world_size = world_size
        self._lock = threading.RLock()
        self._header = lru_cache(maxsize=64)(segments.read_header)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._reset()

    def _reset(self) -> None:
        # Dirty rows are not on disk yet. Clean ones are copies of rows on disk, ordered by latest
        # use.
        self._dirty = HeldRows()
        self._clean = HeldRows()
        self._where: dict[str, Placed] = {}
        # After a load the segments lie in a folder that another run may continue. So only read in
        # this folder, and write after our first flush.
        self._home: Path | None = None
        self._flushed = False
        self._spilled: set[int] = set()  # segments in the temporary folder
        self._number = 0  # number of the newest segment
        self._scanned: Path | None = None
        # The last clean-up: its folder, the newest segment then, and the number of needed segments.
        self._collected: tuple[Path, int, int] | None = None
        self._header.cache_clear()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy, which holds all rows."""
        with self._lock:
            rows: dict[str, dict[int, Tensor | None]] = {}
            for name in self.names():
                rows[name] = {int(i): self.read(name, int(i)) for i in self.clients(name)}
            return {"made": (self.budget_bytes, self.rank, self.world_size), "rows": rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ClientStore.__init__(self, *state["made"])
        self.commit(state["rows"])

    def read(self, name: str, client: int) -> Tensor | None:
        """Return the client's row on the CPU, which must not be changed; None if it has none.

        Raises:
            UserError: it is damaged.
        """
        key = (name, int(client))
        # Read the disk outside of the lock, so that threads read in parallel. A flush may move the
        # row meanwhile, so check its place again.
        while True:
            with self._lock:
                row = self._dirty.get(key)
                if row is None and (row := self._clean.get(key)) is not None:
                    self._clean.move_to_end(key)
                segment = self._locate(key)
                if row is not None or segment is None:
                    return row
                path = self._path(segment)
            try:
                header = self._open(path, key)
                row = segments.read_row(path, header, *key)
                names = segments.names_of(header, *key, row)
            except UserError:
                with self._lock:
                    if self._locate(key) == segment and self._path(segment) == path:
                        raise
                continue
            with self._lock:
                for each in ((name, key[1]) for name in names):
                    if self._locate(each) == segment and each not in self._dirty:
                        self._remember(each, row)
                self._shrink()
            return row

    def _open(self, path: Path, key: tuple[str, int]) -> segments.Header:
        try:
            return self._header(path)
        except UserError as error:
            raise UserError(f"Cannot read {key[0]!r} of client {key[1]}. {error}") from error

    def commit(self, rows: Mapping[str, Mapping[int, Tensor]], make_room: bool = True) -> None:
        """Make {name: {client: row}} the clients' state, all or nothing.

        The store owns the tensors from now on. A row that is a view of a larger tensor, or not on
        the CPU, is copied. Without ``make_room`` nothing is written to disk until :meth:`make_room`
        is called, so nothing can fail.
        """
        new: dict[tuple[str, int], Tensor] = {}
        for name, by_client in self.owned(rows).items():
            for client, row in by_client.items():
                new[name, int(client)] = row
        with self._lock:
            self._dirty.hold(new)
            # Cached copies of rows on disk are out of date now.
            for key in new:
                self._clean.drop(key)
            if make_room:
                self._shrink()

    @staticmethod
    def owned(rows: Mapping[str, Mapping[int, Tensor]]) -> dict[str, dict[int, Tensor]]:
        """Return the rows ready for a commit: on the CPU, in memory that no other tensor needs.

        Rows of a client with the same bytes are one tensor.
        """
        owned: dict[str, dict[int, Tensor]] = {}
        of_client: dict[int, list[Tensor]] = {}
        for name, by_client in rows.items():
            owned[name] = {}
            for client, row in by_client.items():
                others = of_client.setdefault(int(client), [])
                owned[name][client] = shared(_owned(name, int(client), row), others)
        return owned

    def make_room(self) -> None:
        with self._lock:
            self._shrink()

    def clients(self, name: str) -> IntArray:
        with self._lock:
            on_disk = self._where[name][0] if name in self._where else np.empty(0, np.int64)
            dirty = [client for key, client in self._dirty if key == name]
        return np.union1d(on_disk, np.asarray(dirty, dtype=np.int64))

    def names(self) -> list[str]:
        with self._lock:
            return sorted({*self._where, *(name for name, _ in self._dirty)})

    def flush(self, folder: Path | str) -> Path | None:
        """Write the rows that changed since the last flush as one segment in ``folder``.

        A flush to a new folder also copies the segments that this store needs from the old folder.

        Returns:
            The segment's path; None if no row has changed.
        """
        folder = Path(folder)
        with self._lock:
            elsewhere = self._home is not None and self._home.resolve() != folder.resolve()
            if elsewhere or self._spilled:
                moving = self._segments()
                self._bring(moving if elsewhere else moving & self._spilled, folder)
            self._home = folder
            self._flushed = True
            path = self._write(folder, durable=True) if self._dirty else None
            self._shrink()
            return path

    def index(self) -> Index:
        """Segment of each row, as plain tensors for a checkpoint; call ``flush`` before."""
        with self._lock:
            assert not self._dirty and not self._spilled  # they are on disk
            return {
                name: {"clients": torch.from_numpy(clients), "segments": torch.from_numpy(where)}
                for name, (clients, where) in sorted(self._where.items())
            }

    def load(self, index: Index, folder: Path | str) -> None:
        """Forget all rows; later reads take the rows of ``index`` from ``folder``, as needed."""
        folder = Path(folder)
        present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        where: dict[str, Placed] = {}
        for name, entry in index.items():
            clients = entry["clients"].numpy().copy()
            numbers = entry["segments"].numpy().copy()
            mine = clients % self.world_size == self.rank
            clients = clients[mine]
            numbers = numbers[mine]
            if len(clients):
                where[name] = clients, numbers
            # Report a missing file now, and not in the round that needs one of its rows.
            for segment, first in zip(*np.unique(numbers, return_index=True), strict=True):
                if segment_name(int(segment)) not in present:
                    path = folder / segment_name(int(segment))
                    raise segments.damaged(path, name, int(clients[first]), GONE)
        with self._lock:
            self._reset()
            self._where = where
            self._home = folder
            # A spill before the first flush must not reuse the numbers of loaded segments.
            self._number = max(self._segments(), default=0) // RANKS

    def collect(self, folder: Path | str, keep: Iterable[Index], last: bool = False) -> None:
        """Delete segments that neither this store nor an index of ``keep`` needs.

        ``keep``: the (merged) indices of all checkpoints that must stay loadable. With many
        segments, this does nothing, and does not read ``keep``, until one in 32 is new, so that the
        cost of a checkpoint does not grow with their number. With ``last`` the clean-up happens at
        once.
        """
        with self._lock:
            if self._collected is not None and not last:
                last_folder, newest_then, needed_then = self._collected
                new = self._number - newest_then + 1
                if Path(folder) == last_folder and new < _NEW * needed_then:
                    return
            needed = self._segments()
            for index in keep:
                for entry in index.values():
                    needed.update(entry["segments"].unique().tolist())
            for path in Path(folder).iterdir() if Path(folder).is_dir() else ():
                number = segment_number(path.name.removeprefix(".").removesuffix(".tmp"))
                if number is None or not self._may_delete(number):
                    continue
                # A temporary file is left from a write that was killed: we hold the lock, so no
                # process is writing it.
                if path.name.endswith(".tmp") or number not in needed:
                    path.unlink(missing_ok=True)
            self._collected = Path(folder), self._number, len(needed)

    def _may_delete(self, segment: int) -> bool:
        # Each process deletes its own files. The first process also deletes the files of processes
        # that a resumed run no longer has.
        writer = segment % RANKS
        return writer == self.rank or (self.rank == 0 and writer >= self.world_size)

    def _locate(self, key: tuple[str, int]) -> int | None:
        clients, where = self._where.get(key[0], (None, None))
        if clients is None or where is None:
            return None
        position = int(np.searchsorted(clients, key[1]))
        if position < len(clients) and clients[position] == key[1]:
            return int(where[position])
        return None

    def _path(self, segment: int) -> Path:
        folder = self._temporary_folder() if segment in self._spilled else self._home
        assert folder is not None
        return folder / segment_name(segment)

    def _segments(self) -> set[int]:
        numbers: set[int] = set()
        for _, where in self._where.values():
            numbers.update(np.unique(where).tolist())
        return numbers

    def _temporary_folder(self) -> Path:
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="fl-lightning-rows-")
        return Path(self._temporary.name)

    def _new_segment(self, folder: Path) -> int:
        if self._scanned != folder:
            if folder.is_dir():
                for path in folder.iterdir():
                    number = segment_number(path.name)
                    if number is not None:
                        self._number = max(self._number, number // RANKS)
            # Start numbering at random: a checkpoint copied into another run's folder must not take
            # that run's rows for its own.
            self._number = self._number or secrets.randbelow(10**7)
            self._scanned = folder
        self._number += 1
        return self._number * RANKS + self.rank

    def _write(self, folder: Path, durable: bool) -> Path:
        """Write the changed rows as one segment; if that fails, nothing has changed in memory."""
        segment = self._new_segment(folder)
        path = folder / segment_name(segment)
        segments.write(path, self._dirty, durable)
        clients: dict[str, list[int]] = {}
        for name, client in self._dirty:
            clients.setdefault(name, []).append(client)
        if not durable:
            self._spilled.add(segment)
        placed = {name: self._placed(name, ids, segment) for name, ids in clients.items()}
        self._where = {**self._where, **placed}
        written = self._dirty
        self._dirty = HeldRows()
        for key, row in written.items():
            self._remember(key, row)
        return path

    def _placed(self, name: str, ids: list[int], segment: int) -> tuple[IntArray, IntArray]:
        clients, where = self._where.get(name, (np.empty(0, np.int64), np.empty(0, np.int64)))
        new = np.sort(np.asarray(ids, dtype=np.int64))
        at = np.searchsorted(clients, new)
        there = np.searchsorted(clients, new, side="right") > at
        where = where.copy()
        where[at[there]] = segment
        return np.insert(clients, at[~there], new[~there]), np.insert(where, at[~there], segment)

    def _bring(self, moving: set[int], folder: Path) -> None:
        renamed: dict[int, int] = {}
        # Copy the files: hard links would tie two runs together.
        for segment in sorted(moving):
            renamed[segment] = self._new_segment(folder)
            segments.copy(self._path(segment), folder / segment_name(renamed[segment]))
        if renamed:
            old = np.asarray(sorted(renamed), dtype=np.int64)
            new = np.asarray([renamed[segment] for segment in sorted(renamed)], dtype=np.int64)
            for name, (clients, where) in self._where.items():
                at = np.minimum(np.searchsorted(old, where), len(old) - 1)
                self._where[name] = clients, np.where(old[at] == where, new[at], where)
        self._spilled = set()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _remember(self, key: tuple[str, int], row: Tensor) -> None:
        self._clean.drop(key)  # the latest use comes last
        self._clean.hold({key: row})

    def _shrink(self) -> None:
        """Write changed rows beyond the budget, and forget unchanged ones, longest unused first."""
        if self._dirty.bytes > self.budget_bytes:
            if self._flushed and self._home is not None:
                self._write(self._home, durable=True)
            else:
                self._write(self._temporary_folder(), durable=False)
        while self._clean and self._dirty.bytes + self._clean.bytes > self.budget_bytes:
            self._clean.drop(next(iter(self._clean)))


def _owned(name: str, client: int, row: Tensor) -> Tensor:
    if client < 0 or not segments.storable(row.dtype):
        raise ValueError(f"row {name!r} of client {client} cannot be stored (dtype {row.dtype})")
    row = row.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    # A view would keep the whole tensor in memory.
    return row.clone() if row.untyped_storage().nbytes() != row.nbytes else row
