"""Who takes part in a round, and how many steps each client takes: functions of (seed, round),
known beforehand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.random import Generator

from fl_lightning.checks import count_participants
from fl_lightning.storage.secret import Key, drawn_from


class Cohort:
    """The registered clients, which of them take part in a round, and how many steps each takes.

    Args:
        data: the run's: ``num_clients``, ``batches_per_epoch(client)``, ``client_sizes()``.
        seed: the run's.
        coins: what decides who takes part is drawn from this; None: the seed.
        quick: the Trainer's ``fast_dev_run``: one client takes part, with so many of its batches;
            0: all that is asked.

    The other arguments are those of :class:`~fl_lightning.FederatedModule`.
    """

    def __init__(
        self,
        data: Any,
        seed: int,
        participation: int | float | str,
        sampling: str,
        local_epochs: float | None,
        local_steps: int | None,
        coins: Key | None = None,
        quick: int = 0,
    ) -> None:
        self.data = data
        self.seed = seed
        self.quick = quick
        self.coins: Key = seed if coins is None else coins
        self.participation = participation
        self.sampling = sampling
        self.local_epochs = local_epochs
        self.local_steps = local_steps

    @property
    def n(self) -> int:
        """Clients a round; on average, where each has a coin."""
        return count_participants(self.participation, self.m)

    @property
    def m(self) -> int:
        """Registered clients."""
        return int(self.data.num_clients)

    @property
    def most(self) -> int:
        """The most clients that a round can have."""
        if self.quick:
            return 1
        return self.n if self.sampling == "uniform" else self.m

    def participants(self, t: int) -> tuple[int, ...]:
        """Who is sampled in round t, ascending; the same in every process and after every resume."""
        return (self._sampled(t) or (0,))[:1] if self.quick else self._sampled(t)

    def _sampled(self, t: int) -> tuple[int, ...]:
        m = self.m
        if self.n == m and self.sampling == "uniform":
            return tuple(range(m))
        draw = drawn_from(self.coins, "participants", t)
        n = self._number(draw)
        if n == m:
            return tuple(range(m))
        return tuple(sorted(draw.choice(m, n, replace=False, shuffle=False).tolist()))

    def tried(self, t: int) -> tuple[int, ...]:
        """Clients to try the steps of round t on, before the first: those that are sampled, but
        never nobody.
        """
        return self.participants(t) or (0,)

    def number(self, t: int) -> int:
        """How many take part in round t, where a method chooses them."""
        return 1 if self.quick else self._number(drawn_from(self.coins, "participants", t))

    def _number(self, draw: Generator) -> int:
        n = self.n
        m = self.m
        if self.sampling == "uniform":
            return n
        heads = int(
            draw.binomial(m, self.participation if isinstance(self.participation, float) else n / m)
        )
        return heads if self.sampling == "poisson" else max(1, heads)

    def steps(self, i: int) -> int:
        """K_i: local steps of client i in a round."""
        steps = self.local_steps
        if steps is None:
            steps = self.steps_of(i, 5 if self.local_epochs is None else self.local_epochs)
        return min(steps, self.quick) if self.quick else steps

    def steps_of(self, i: int, local_epochs: float) -> int:
        """Steps of so many local epochs of client i, taken exactly from their decimal form: a
        started batch counts.
        """
        epochs = Fraction(str(local_epochs))
        batches = int(self.data.batches_per_epoch(i))
        whole = int(epochs)
        return whole * batches + -int(-((epochs - whole) * batches) // 1)

    def smallest_batch(self, clients: Sequence[int] | None = None) -> tuple[int, int] | None:
        """Samples of the smallest batch of these clients (None: of all), and the first such client:
        O(m), no draw.

        None where the data do not tell.
        """
        if not hasattr(self.data, "smallest_batch"):
            return None
        steps: Any = self.local_steps
        # of no client a whole epoch
        if steps is None and self.local_epochs is not None and self.local_epochs < 1:
            _, first, of = np.unique(
                self.data.client_sizes(), return_index=True, return_inverse=True
            )
            steps = np.array([self.steps(int(i)) for i in first])[of]
        found: tuple[int, int] | None = self.data.smallest_batch(steps, clients)
        return found

    def sizes(self, ids: Iterable[int]) -> dict[int, int]:
        """N_i: samples of each of these clients."""
        sizes = self.data.client_sizes()
        return {i: int(sizes[i]) for i in ids}

    def describe(self) -> str:
        """Such as ``10 of 100 clients · 5 epochs``."""
        if self.quick:
            return f"1 of {self.m} clients · {self.quick} steps at most (fast_dev_run)"
        if self.local_steps:
            work = f"{self.local_steps} steps"
        else:
            work = f"{self.local_epochs or 5:g} epochs"
        return f"{self.n} of {self.m} clients · {work}"
