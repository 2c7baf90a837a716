"""A run's state between rounds, besides the model: rounds done, server states, client rows and w^0."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.processes import gathered
from fl_lightning.storage.rows import ClientRows, Rows


@dataclass(frozen=True)
class Outcome:
    """What round t leaves besides the model: rows at home (see :meth:`ClientRows.bring_home`),
    states, metrics.

    ``chosen``: who took part, where a method chose.
    """

    t: int
    rows: Rows
    server: dict[str, Tensor]
    logged: dict[str, float]
    chosen: tuple[int, ...] | None


@dataclass
class RunState:
    """Only :meth:`commit` changes it, at the end of each round; a resume from a checkpoint of
    before sets ``rounds``.

    Args:
        rows: client rows, of all processes.
        server: server states by key.
        initial_vector: w^0 ``(D,)``, where a method needs it.
        rounds: how many are committed.
        logged: the metrics of the last of them.
        chosen: who took part, by round, where a method chose.
        partition: the hash of whose rows these are; None: no fit has said.
    """

    rows: ClientRows
    server: dict[str, Tensor] = field(default_factory=dict)
    initial_vector: Tensor | None = None
    rounds: int = 0
    logged: dict[str, float] = field(default_factory=dict)
    chosen: dict[int, tuple[int, ...]] = field(default_factory=dict)
    partition: str | None = None
    _outcome: Outcome | None = None

    def commit(
        self,
        t: int,
        rows: Rows,
        server: dict[str, Tensor],
        logged: dict[str, float],
        chosen: tuple[int, ...] | None = None,
    ) -> None:
        """Round t is over: what it leaves becomes the state."""
        rows = self.rows.store.owned(rows)  # may fail
        # from here on the round counts, whatever happens
        self._outcome = Outcome(t, rows, server, logged, chosen)
        self.settle(t)

    def keep_rows_for(self, data: Any) -> None:
        """Rows are of these data's clients from here on; refused where a fit on others kept some.

        Raises:
            UserError: with what is kept.
        """
        now = str(getattr(data, "partition_hash", ""))
        if self.partition is not None and self.partition != now:
            kept = ", ".join(
                sorted({name for names in gathered(self.rows.names()) for name in names})
            )
            if kept:
                raise UserError(
                    f"data: the last fit by this Trainer kept {kept} for each client, and these "
                    "data have other clients. Fit with another Trainer, which begins another run "
                    "from these weights."
                )
        self.partition = now

    def chosen_in(self, t: int, present: tuple[int, tuple[int, ...]]) -> tuple[int, ...]:
        """Who takes part in round t, where a method chooses; ``present``: the round that began
        last, and its clients.

        Raises:
            UserError: nobody has chosen yet, or an older checkpoint does not say.
        """
        known = {**self.chosen, **dict([present] if present[0] >= self.rounds else [])}
        if t not in known:
            told = f"rounds {min(known)} to {max(known)}" if known else "no round"
            raise UserError(
                f"participants({t}): a method of this run chooses who takes part when a round "
                "begins, from what the server knows then, so that present and past rounds alone "
                f"can be told; so far that is {told}."
            )
        return known[t]

    def progress(self) -> dict[str, Any]:
        """For a checkpoint: rounds done, the last one's metrics, and who was chosen."""
        return {"rounds": self.rounds, "logged": self.logged, "chosen": packed(self.chosen)}

    def settle(self, t: int) -> bool:
        """Finish the commit of round t where it was interrupted; whether the round is committed."""
        if self._outcome is not None:
            done = self._outcome
            self.rows.commit(done.rows)
            self.server.update(done.server)
            if done.chosen is not None:
                self.chosen[done.t] = done.chosen
            self.logged = done.logged
            self.rounds = done.t + 1
            self._outcome = None
        return t < self.rounds


def packed(chosen: dict[int, tuple[int, ...]]) -> dict[str, Tensor]:
    """Choices as three tensors for a checkpoint: rounds, how many, and who."""
    who = [client for ids in chosen.values() for client in ids]
    columns = {
        "rounds": list(chosen),
        "numbers": [len(ids) for ids in chosen.values()],
        "clients": who,
    }
    return {name: torch.tensor(column, dtype=torch.int64) for name, column in columns.items()}


def unpacked(held: dict[str, Tensor]) -> dict[int, tuple[int, ...]]:
    """What :func:`packed` took."""
    each = torch.split(held["clients"], held["numbers"].tolist())
    return {t: tuple(ids.tolist()) for t, ids in zip(held["rounds"].tolist(), each, strict=True)}
