"""A run's state between rounds, besides the model: rounds done, server states, rows and w^0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.machine.processes import gathered
from fl_lightning.storage.client_rows import ClientRows, Rows

# Number of server steps so far → the model (D,) and the buffers by name.
Versions = dict[int, tuple[Tensor, Mapping[str, Tensor]]]


# Frozen weights by name after a round, the sizes of each round's additions, and the additions.
BaseAfter = tuple[dict[str, Tensor], list[int], list[Any]]


@dataclass(frozen=True)
class RoundOutcome:
    """The result of round t besides the model: rows, server states and metrics.

    ``rows``: rows that this process keeps, see :meth:`ClientRows.bring_home`. ``chosen``: the
    participants, if a method chose them. ``versions``: the models from which clients still train.
    ``sent``: the clients that were sent w, if a method depends on it. ``base``: the frozen weights
    that methods change.
    """

    t: int
    rows: Rows
    server: dict[str, Tensor]
    logged: dict[str, float]
    chosen: tuple[int, ...] | None
    versions: Versions
    sent: Sequence[int]
    base: BaseAfter | None


@dataclass
class RunState:
    """The state, which only :meth:`commit` changes, at the end of each round.

    Args:
        rows: client rows of all processes.
        initial_vector: w^0 ``(D,)``, if a method needs it.
        rounds: number of committed rounds.
        logged: the metrics of the last committed round.
        chosen: the participants by round, if a method chose them.
        partition: the hash of the partition to which the rows belong; None: not known yet.
        versions: earlier models and buffers from which clients of an asynchronous run still train,
            by the number of earlier steps of the server.
        sent: the last round in which each client was sent w, if a method depends on it.
        base: the frozen weights that methods change; None: no method does.
    """

    rows: ClientRows
    server: dict[str, Tensor] = field(default_factory=dict)
    initial_vector: Tensor | None = None
    rounds: int = 0
    logged: dict[str, float] = field(default_factory=dict)
    chosen: dict[int, tuple[int, ...]] = field(default_factory=dict)
    partition: str | None = None
    versions: Versions = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    base: Any = None
    _outcome: RoundOutcome | None = None

    def commit(self, outcome: RoundOutcome) -> None:
        # Copying rows needs memory and may fail; then the round has not happened.
        outcome = replace(outcome, rows=self.rows.store.owned(outcome.rows))
        # This one assignment decides: from here on the round counts. If an interrupt follows,
        # `finish_commit` completes it.
        self._outcome = outcome
        self.finish_commit(outcome.t)

    def keep_rows_for(self, data: Any) -> None:
        """From now on treat rows as those of these data's clients.

        Raises:
            UserError: a fit on other data kept rows.
        """
        partition = str(getattr(data, "partition_hash", ""))
        if self.partition is not None and self.partition != partition:
            # Each process has its own rows, and all processes have to refuse together.
            names = sorted(set().union(*gathered(self.rows.names())))
            if names:
                raise UserError(
                    f"data: the last fit by this Trainer kept {', '.join(names)} for each client, "
                    "and these data have other clients. Fit with another Trainer, which begins "
                    "another run from these weights."
                )
        self.partition = partition

    def chosen_in(self, t: int, latest: tuple[int, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the clients of round t, if a method chooses them.

        ``latest``: the round that began last, and its clients.

        Raises:
            UserError: the method has not chosen yet, or the round is not among the stored ones.
        """
        known = dict(self.chosen)
        if latest[0] >= self.rounds:
            known[latest[0]] = latest[1]
        if t not in known:
            rounds = f"rounds {min(known)} to {max(known)}" if known else "no round"
            raise UserError(
                f"participants({t}): a method of this run chooses the participants when a round "
                "begins. So only the participants of present and past rounds are known; so far "
                f"that is {rounds}."
            )
        return known[t]

    def finish_commit(self, t: int) -> bool:
        """Finish a commit that was interrupted; return whether round t is committed."""
        # Each of these steps may be repeated with the same result, so an interrupt between two of
        # them does no harm, nor does one that finishes the commit. The outcome is cleared last.
        outcome = self._outcome
        if outcome is not None:
            self.rows.commit(outcome.rows)
            self.server.update(outcome.server)
            if outcome.chosen is not None:
                self.chosen[outcome.t] = outcome.chosen
            self.versions = outcome.versions
            self.sent.update(dict.fromkeys(outcome.sent, outcome.t))
            if outcome.base is not None:
                self.base.put(outcome.t, *outcome.base)
            self.logged = outcome.logged
            self.rounds = outcome.t + 1
            self._outcome = None
        return t < self.rounds
