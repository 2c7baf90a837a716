"""A run's state between rounds, besides the model: rounds done, server states, client rows and w^0."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fl_lightning.storage.rows import ClientRows, Rows


@dataclass
class RunState:
    """Only :meth:`commit` changes it, at the end of each round.

    Args:
        rows: client rows, of all processes.
        server: server states by key.
        initial_vector: w^0 ``(D,)``, where a method needs it.
        rounds: how many are committed.
    """

    rows: ClientRows
    server: dict[str, Tensor] = field(default_factory=dict)
    initial_vector: Tensor | None = None
    rounds: int = 0

    def commit(self, t: int, rows: Rows, server: dict[str, Tensor]) -> None:
        """Round t is over: its rows (at home, see :meth:`ClientRows.bring_home`) and server states become the state."""
        self.rows.commit(rows)
        self.server.update(server)
        self.rounds = t + 1
