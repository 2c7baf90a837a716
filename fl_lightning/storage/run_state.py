"""A run's state between rounds, besides the model: rounds done, server states, client rows and w^0."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fl_lightning.storage.rows import ClientRows, Rows


@dataclass(frozen=True)
class Outcome:
    """What round t leaves besides the model: rows at home (see :meth:`ClientRows.bring_home`), states, metrics."""

    t: int
    rows: Rows
    server: dict[str, Tensor]
    logged: dict[str, float]


@dataclass
class RunState:
    """Only :meth:`commit` changes it, at the end of each round.

    Args:
        rows: client rows, of all processes.
        server: server states by key.
        initial_vector: w^0 ``(D,)``, where a method needs it.
        rounds: how many are committed.
        logged: the metrics of the last of them.
    """

    rows: ClientRows
    server: dict[str, Tensor] = field(default_factory=dict)
    initial_vector: Tensor | None = None
    rounds: int = 0
    logged: dict[str, float] = field(default_factory=dict)
    _outcome: Outcome | None = None

    def commit(self, t: int, rows: Rows, server: dict[str, Tensor], logged: dict[str, float]) -> None:
        """Round t is over: what it leaves becomes the state."""
        rows = self.rows.store.owned(rows)  # may fail
        self._outcome = Outcome(t, rows, server, logged)  # from here on the round counts, whatever happens
        self.settle(t)

    def settle(self, t: int) -> bool:
        """Finish the commit of round t where it was interrupted; whether the round is committed."""
        if self._outcome is not None:
            done = self._outcome
            self.rows.commit(done.rows)
            self.server.update(done.server)
            self.logged, self.rounds, self._outcome = done.logged, done.t + 1, None
        return t < self.rounds
