"""A round stages rows, server states and sums here; the commit makes them the run's state."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.learner.layout import Layout
from fl_lightning.round.base_weights import Addition, BaseWeights
from fl_lightning.round.client_sums import Total
from fl_lightning.round.context import Round
from fl_lightning.round.declared_state import Declaration, Upload
from fl_lightning.round.neighbourhood import Neighbourhood
from fl_lightning.storage.client_rows import Rows
from fl_lightning.virtual.planned_round import Planned

NOT_ASSIGNED = "no client of the round assigned it"


class RoundTransaction:
    """The values that a round stages until its commit, and that its server hooks may read.

    - ``rows``, ``server``: clients' rows and server states, if hooks wrote them.
    - ``total``: the sums over clients.
    - ``finished``, ``dropped``: the clients that count, and those that sent nothing; ``unsent``:
      those of the latter that were not sent the model.
    - ``metrics``: by client, the states that its steps left in the learner's metrics.
    - ``logs``, ``notes``: logs and notes of server hooks.
    - ``gathered``: all updates ``(n, D)``; None: no method asks for them.
    - ``exchanged``: what clients assigned for their neighbours, by state and client;
      ``neighbourhood``: who sent to whom; None: the round has a server.
    - ``broadcast``: the model that clients get as w ``(D,)``; None: w itself.
    - ``sent``: how many parameters and bytes of it each participant is sent; None: D numbers.
    - ``planned``: facts of the round that are known beforehand, on simulated devices; None: the
      server waits for all participants.
    - ``base``: the vector ``(D,)`` from which updates are measured; None: the vector that each
      client was given.
    - ``base_weights``: the frozen weights that methods change; None: no method does. ``additions``:
      additions to them in this round; ``takes_additions``: whether additions are allowed now.
    - ``rows_elsewhere``: whether clients' rows are at sites. ``kept``: how many numbers each client
      keeps there.
    - ``measuring``: the names of callbacks that only measure.
    """

    def __init__(self, round: Round) -> None:
        self.round = round
        self.rows: Rows = {}
        self.server: dict[str, Tensor] = {}
        self.total = Total()
        self.planned: Planned | None = None
        self.base: Tensor | None = None
        self.finished: list[int] = []
        self.dropped: list[int] = []
        self.unsent: list[int] = []
        self.kept: dict[int, int] = {}
        self.rows_elsewhere = False
        self.measuring: Collection[str] = ()
        self.metrics: dict[int, Any] = {}
        self.logs: dict[str, Tensor | float] = {}
        self.notes: list[str] = []
        # client → update, for this process's clients, until all are gathered
        self.updates: dict[int, Tensor] = {}
        self.gathered: Tensor | None = None
        self.exchanged: Rows = {}
        self.neighbourhood: Neighbourhood | None = None
        self.broadcast: Tensor | None = None
        self.base_weights: BaseWeights | None = None
        self.takes_additions = False
        self.additions: list[Addition] = []
        self.sent: tuple[float | None, float | None] | None = None
        self._at_server = False
        self._version: int | None = None
        self._initial: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}  # copies of server states that a server hook has read
        # Server states that a hook of clients has read, with their version counters.
        self._lent: dict[str, tuple[Tensor, int]] = {}

    @property
    def scale(self) -> float:
        """Return Σ p σ / Σ p over the clients that finished; it is 1 in synchronous runs."""
        discounts = {} if self.planned is None else self.planned.discounts
        weights = {i: self.round.weights[i] for i in self.finished if i in discounts}
        if not weights or (self.planned is not None and self.planned.normalised):
            return 1.0
        return sum(weights.values()) / sum(w / discounts[i] for i, w in weights.items())

    @property
    def t(self) -> int:
        """The round whose schedules hooks read: this, or one from which clients still train."""
        return self.round.t if self._version is None else self._version

    @contextmanager
    def clients_at(self, version: int) -> Iterator[None]:
        """Within this context hooks read schedules of this round: clients train from it."""
        self._version = version
        try:
            yield
        finally:
            self._version = None

    @property
    def for_clients(self) -> Round:
        return self.round if self.broadcast is None else replace(self.round, w=self.broadcast)

    @property
    def w(self) -> Tensor:
        return self.round.w

    @property
    def layout(self) -> Layout:
        return self.round.layout

    @contextmanager
    def server_hooks(self) -> Iterator[None]:
        """Within this context server hooks get copies of server states, which they may change."""
        self._lent.clear()
        self._at_server = True
        try:
            yield
        finally:
            self._at_server = False

    def server_state(self, key: str, declaration: Declaration) -> Tensor:
        """Present value; in server hooks it is a copy, which the commit makes the state."""
        value = self._present(key, declaration)
        if not self._at_server and self._lent.get(key, (None,))[0] is not value:
            self._lent[key] = value, value._version
        return value

    def make_server_states(self, declared: Mapping[str, Declaration]) -> None:
        """Make the server states that were never written, before clients train.

        On a GPU clients read them on several streams, which wait only for what was there before.
        """
        for key, declaration in declared.items():
            if declaration.at_server:
                self._present(key, declaration)

    def changed_by_clients(self) -> str:
        """Server state that a hook of clients changed in place; empty if there is none."""
        for key, (value, version) in list(self._lent.items()):  # threads read states
            if value._version != version:
                return key
        return ""

    def _present(self, key: str, declaration: Declaration) -> Tensor:
        # A value that a hook assigned takes precedence over one that it only read, and both over
        # the start of the round.
        if key in self.server:
            return self.server[key]
        if key in self._copies:
            return self._copies[key]
        value = self.round.server_states.get(key)
        if value is None:
            if key not in self._initial:
                self._initial[key] = declaration.first(self.round)
            value = self._initial[key]
        if self._at_server:
            value = self._copies[key] = value.clone()
        return value

    def written_server(self, key: str) -> Tensor | None:
        """Return a server state with this round's changes so far; None: it was never written."""
        copy = self._copies.get(key)
        # A hook may have changed its copy in place. The tensor's version counter shows that.
        if key not in self.server and copy is not None and copy._version > 0:
            return copy
        return self.server.get(key, self.round.server_states.get(key))

    def set_server_state(self, key: str, declaration: Declaration, value: Tensor) -> None:
        if not self._at_server:
            raise RuntimeError(
                f"{key} was assigned in a hook that takes clients. Assign a server state only in a "
                "hook that takes server"
            )
        current = self.server_state(key, declaration)
        if value is not current:
            # Fill the copy in place, because a hook may hold it from an earlier read.
            current.copy_(torch.as_tensor(value))
        self.server[key] = current

    def uploaded(self, key: str, declaration: Upload) -> tuple[Tensor, int]:
        """Return the sum over the clients that finished, and their number."""
        self.refuse_outsiders(f"the sums of {key}")
        # A hook may change its result in place, and other hooks read the sum, too.
        return self._uploaded(key, declaration).clone(), len(self.finished)

    def uploaded_weighted(self, key: str, declaration: Upload) -> Tensor:
        self.refuse_outsiders(f"the sums of {key}")
        # With uniform weights the plain sum is the weighted one, so only one is stored.
        weighted = self.total.weighted_uploads.get(key)
        if weighted is None:
            weighted = self._uploaded(key, declaration)
        return self.total.mean(weighted, self.round.wide)

    def refuse_outsiders(self, what: str) -> None:
        if self.round.noise is not None:
            refuse_outsiders(what)

    def _uploaded(self, key: str, declaration: Upload) -> Tensor:
        if key in self.total.uploads:
            return self.total.uploads[key]
        if self.finished:
            self.notes.append(
                f"the server reads {key}, but {NOT_ASSIGNED}, so its sums are 0. Assign it in a "
                f"hook that takes clients: self.{declaration.name}[clients] = …"
            )
        zeros = declaration.zeros(self.round.w)
        return zeros.to(declaration.summed_as(zeros.dtype))

    def server_states_to_commit(self, declared: Mapping[str, Declaration]) -> dict[str, Tensor]:
        """The states to commit; synchronised ones stay on parts that are not averaged."""
        for key, copy in self._copies.items():
            if self.written_server(key) is copy:
                self.server[key] = copy
        round = self.round
        return {
            key: declared[key].settled(value, round.server_states.get(key), round, round.averaged)
            for key, value in self.server.items()
        }

    def rows_to_commit(self, declared: Mapping[str, Declaration]) -> Rows:
        """The rows to commit; synchronised ones stay on parts that are not averaged."""
        settled: Rows = {key: dict(by_client) for key, by_client in self.rows.items()}
        if self.round.averaged is None:
            return settled
        mask = self.round.averaged.cpu()
        for key, by_client in settled.items():
            # No method declares the rows that the framework itself keeps.
            if key in declared:
                for client, row in by_client.items():
                    old = self.round.read(key, client)
                    by_client[client] = declared[key].settled(row, old, self.round, mask)
        return settled


# A hook reads through these modules, so their frames lie between the hook and the refusal.
_BETWEEN = ("fl_lightning.round.", "fl_lightning.callback.")


def refuse_outsiders(what: str, caller: str = "", hint: str = "") -> None:
    """Refuse code from outside this package that reads ``what``, because it would reach w without
    noise.

    Raises:
        UserError: it names ``caller``, the class whose hook it is; if empty, the class is found
            from the code.
    """
    frame = sys._getframe(1)
    # The first frame outside these modules belongs to the hook that reads the state.
    while frame.f_back is not None and f"{_module(frame)}.".startswith(_BETWEEN):
        frame = frame.f_back
    if not _module(frame).startswith("fl_lightning."):
        raise UserError(
            f"method: {caller or _reader(frame)} reads {what} in a private run "
            "(DifferentialPrivacy), and the results would be published without noise. Read "
            "server.update and server.w, which have noise, or use only one of the two methods."
            f"{hint}"
        )


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _reader(frame: FrameType) -> str:
    if "self" in frame.f_locals:
        return type(frame.f_locals["self"]).__name__
    return frame.f_code.co_name
