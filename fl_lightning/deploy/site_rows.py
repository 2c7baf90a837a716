"""The rows of a site's clients on its disk, from before and after its last round.

A round's rows are staged on disk before the server gets the site's answer. The staged rows become
the clients' state when the server's next message says that the round counted. Until then both
versions exist, and the site can continue with either.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.client.run_optimizers import state_fits
from fl_lightning.errors import UserError
from fl_lightning.storage import lock, site_journal
from fl_lightning.storage.atomic_files import written_aside
from fl_lightning.storage.client_store import ClientStore
from fl_lightning.storage.site_journal import JOURNAL, STAGED

PLACE = "site.id"


class SiteRows:
    """The rows in a site's folder, which this process has locked.

    Args:
        store: the store from which clients' state is read.
        optimizer: the account of the client optimizer; empty: clients do not keep its state.

    Raises:
        UserError: another process has locked the folder, its journal is damaged, or its rows do not
            fit the client optimizer.
    """

    def __init__(self, folder: Path, store: ClientStore, optimizer: str = "") -> None:
        self.folder = folder
        self.store = store
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock.hold(folder)
        self.lock.use()
        self.place = self._place(folder / PLACE)
        journal = site_journal.read(folder)
        if not state_fits(journal.optimizer or optimizer, optimizer or journal.optimizer):
            self.lock.release()
            raise UserError(
                f"site folder {folder}: {JOURNAL} has states of another client_optimizer "
                f"({journal.optimizer[:100]} then, {optimizer[:100]} now). Use the optimizer of "
                "before, or begin another run with another folder."
            )
        self.optimizer = optimizer or journal.optimizer
        self.run = journal.run
        self.committed = journal.committed
        self.staged = journal.staged
        if journal.rows:
            self.store.load(journal.rows, folder)

    def _place(self, path: Path) -> int:
        """Return a number that identifies the folder, whichever process and node serve it."""
        with suppress(OSError, ValueError):
            place = int(path.read_text("ascii"))
            if 0 <= place < 2**53:
                return place
        place = secrets.randbelow(2**53)
        with written_aside(path) as file:
            file.write(str(place).encode())
        return place

    def check(self, run: int) -> None:
        """Refuse another run than the one whose rows the folder holds."""
        if self.run is not None and self.run != run:
            raise UserError(
                f"site folder {self.folder}: it holds the clients' rows of another run "
                f"({self.run:x}), and the server runs {run:x}. Give the site another folder."
            )

    def settle(self, counted: dict[int, int]) -> None:
        """Make the staged rows the clients' state if their round counted, or drop them.

        If a client has neither version, the rows of the others do not change.

        Args:
            counted: by client the last of its rounds that counted at the server; -1: none.

        Raises:
            UserError: neither version belongs to that round.
        """
        staged = {client: self._staged_in(client, t) for client, t in counted.items()}
        for client, names in staged.items():
            if names is not None:
                self._adopt(client, counted[client], names)
            else:
                self.staged.pop(client, None)

    def reading(self, counted: dict[int, int]) -> Callable[[str, int], Tensor | None]:
        """Return clients' rows as of these rounds, from either version; nothing is settled.

        If a server is killed before its next checkpoint, it may continue from the round before.

        Args:
            counted: as in :meth:`settle`.

        Returns:
            ``(name, client)`` → the row, or None.
        """
        wrote = {client: self._staged_in(client, t) or () for client, t in counted.items()}

        def read(name: str, client: int) -> Tensor | None:
            return self.store.read(STAGED + name if name in wrote[client] else name, client)

        return read

    def _staged_in(self, client: int, t: int) -> list[str] | None:
        """Return the names of the rows that a client wrote in round t, if they are staged; None:
        committed.

        Raises:
            UserError: they are neither staged nor committed.
        """
        here, names = self.staged.get(client, (-2, []))
        committed = self.committed.get(client, -1)
        if here == t:
            return names
        if committed == t:
            return None
        raise UserError(
            f"site folder {self.folder}: the server resumes client {client} after round {t}, but "
            f"the site has this client's rows only of rounds {sorted({committed, here} - {-2})} "
            "(-1: none yet). Resume from the last checkpoint of the run that this folder belongs "
            "to, or begin another run."
        )

    def _adopt(self, client: int, t: int, names: list[str]) -> None:
        rows: dict[str, dict[int, Tensor]] = {}
        for name in names:
            row = self.store.read(STAGED + name, client)
            assert row is not None  # the journal names only rows that have been flushed
            rows[name] = {client: row.clone()}
        self.store.commit(rows)
        self.committed[client] = t
        del self.staged[client]

    def stage(
        self, run: int, t: int, rows: dict[str, dict[int, Tensor]], finished: list[int]
    ) -> None:
        """Store round t's rows in addition to the clients' state; they are on disk when this
        returns.
        """
        self.run = run
        names: dict[int, list[str]] = {client: [] for client in finished}
        for name, by_client in rows.items():
            for client in by_client:
                names[client].append(name)
        self.store.commit({STAGED + name: by_client for name, by_client in rows.items()})
        self.staged |= {client: (t, of) for client, of in names.items()}
        self.store.flush(self.folder)
        self._write()

    def _write(self) -> None:
        index = self.store.index()
        rows: dict[str, Any] = {}
        for name, entry in index.items():
            rows[name] = {key: values.tolist() for key, values in entry.items()}
        held = {
            "run": self.run,
            "optimizer": self.optimizer,
            "committed": self.committed,
            "staged": [[client, staged] for client, staged in self.staged.items()],
            "rows": rows,
        }
        # The journal names only segments that are on disk. Segments that it no longer names are
        # deleted after it is written.
        with written_aside(self.folder / JOURNAL) as file:
            file.write(json.dumps(held).encode())
        self.store.collect(self.folder, [index])
