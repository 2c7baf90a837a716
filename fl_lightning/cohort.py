"""Who takes part in a round and how much each client does: functions of (seed, round), known before the round."""

from __future__ import annotations

import os
import secrets
from fractions import Fraction
from typing import Any

from pytorch_lightning.utilities import rank_zero_warn
from torch.optim import Optimizer

from fl_lightning import checks
from fl_lightning.global_model import GlobalModel
from fl_lightning.methods import Methods
from fl_lightning.sampling import generator
from fl_lightning.schedules import Schedule


class Cohort(GlobalModel):
    """Base of FederatedModule: participants, local steps, the seed, and the line that says what runs."""

    participation: int | float | str
    sampling: str
    local_epochs: float | None
    local_steps: int | None
    lr_decay: float | Schedule
    seed: int | None
    methods: Methods
    notes: list[str]
    engine_facts: dict[str, str]
    _client: Optimizer
    _server: Optimizer
    _server_rates: list[float]
    _drawn_seed: int | None = None

    @property
    def data(self) -> Any:
        return self.trainer.datamodule  # type: ignore[attr-defined]

    @property
    def run_seed(self) -> int:
        """The seed that all draws of this run are functions of."""
        if self.seed is not None:
            return self.seed
        if os.environ.get("PL_GLOBAL_SEED"):
            return int(os.environ["PL_GLOBAL_SEED"])
        if self._drawn_seed is None:
            self._drawn_seed = secrets.randbelow(2**31)
            if self._trainer is not None:
                self._drawn_seed = self.trainer.strategy.broadcast(self._drawn_seed)
            self.note(f"no seed was given: seed={self._drawn_seed} was drawn; give it to repeat or resume this run")
        return self._drawn_seed

    @property
    def cohort(self) -> tuple[int, int]:
        """(n, m): clients a round, and registered."""
        m = int(self.data.num_clients)
        return checks.count_participants(self.participation, m), m

    def participants(self, t: int) -> tuple[int, ...]:
        """Who is sampled in round t, ascending; the same in every process and after every resume."""
        n, m = self.cohort
        draw = generator(self.run_seed, "participants", t)
        if self.sampling == "bernoulli":
            n = max(
                1,
                int(draw.binomial(m, self.participation if isinstance(self.participation, float) else n / m)),
            )
        return tuple(range(m)) if n == m else tuple(sorted(draw.choice(m, n, replace=False, shuffle=False).tolist()))

    def steps(self, t: int, i: int) -> int:
        """K_i: local steps of client i in round t."""
        if self.local_steps is not None:
            return self.local_steps
        epochs = Fraction(str(5 if self.local_epochs is None else self.local_epochs))
        batches, whole = int(self.data.batches_per_epoch(i)), int(epochs)
        return whole * batches + -int(-((epochs - whole) * batches) // 1)

    def describe(self) -> str:
        """What runs, in one line."""
        n, m = self.cohort
        group = self._client.param_groups[0]
        local = f"{self.local_steps} steps" if self.local_steps else f"{self.local_epochs or 5:g} epochs"
        facts = self.engine_facts
        workers = facts.get("workers")
        decay = "" if self.lr_decay == 1.0 else f" × {_decay(self.lr_decay)}"
        return " · ".join(
            [
                self.methods.title(),
                f"{n} of {m} clients",
                local,
                f"{type(self._client).__name__} {group['lr']:g}{decay}",
                f"server {type(self._server).__name__} {self._server_rates[0]:g}",
                *([f"{facts['engine']} × {workers}" if workers else facts["engine"]] if facts else []),
            ]
        )

    def note(self, text: str) -> None:
        """Warn now, and again in the run card and the closing table."""
        if text not in self.notes:
            self.notes.append(text)
            rank_zero_warn(text)


def decay_factor(decay: float | Schedule, t: int) -> float:
    """What a learning rate is multiplied by in round t."""
    return float(decay(t) if isinstance(decay, Schedule) else decay**t)


def _decay(decay: float | Schedule) -> str:
    return repr(decay) if isinstance(decay, Schedule) else f"{decay:g}^t"
