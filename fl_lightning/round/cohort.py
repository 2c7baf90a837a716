"""Decides who takes part in a round, and how many steps each client takes.

Both decisions are functions of (seed, round), so any process knows them beforehand, also after a
resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.random import Generator

from fl_lightning.checks.refusals import count_participants
from fl_lightning.storage.secret import Key, drawn_from
from fl_lightning.virtual.conditions import Deadline, Heterogeneity


class Cohort:
    """The registered clients, which of them take part in a round, and how many steps each takes.

    Args:
        data: the run's data: ``num_clients``, ``batches_per_epoch(client)``, ``client_sizes()``.
        seed: the run's.
        key: a private run's secret, from which participants are drawn; None: they are drawn from
            the seed.
        quick: the Trainer's ``fast_dev_run``: only one client takes part, with so many of its
            batches; 0: no such limit.

    ``own_steps``: ``(t, ids)`` → K_i of each, if the method ``steps_by`` decides on them; None: the
    settings decide. ``heterogeneity``: which clients are present, and which share of its steps each
    takes; None: all are present and take all steps. ``over_selection``: ⌈o n⌉ clients are drawn
    instead of n; None: n. ``running``: in an asynchronous run, how many clients train at a time, as
    text.

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
        accumulate: int = 1,
        key: Key | None = None,
        quick: int = 0,
    ) -> None:
        self.data = data
        self.seed = seed
        self.quick = quick
        self.key: Key = seed if key is None else key
        self.participation = participation
        self.sampling = sampling
        self.local_epochs = local_epochs
        self.local_steps = local_steps
        self.accumulate = accumulate
        self.own_steps: Callable[[int, Sequence[int]], list[int]] | None = None
        self.steps_by = ""
        self.heterogeneity: Heterogeneity | None = None
        self.over_selection: Deadline | None = None
        self.running = ""

    @property
    def n(self) -> int:
        """Return the number of clients per round; with independent participation its mean."""
        return count_participants(self.participation, self.m)

    @property
    def m(self) -> int:
        return int(self.data.num_clients)

    @property
    def most(self) -> int:
        if self.quick:
            return 1
        return self.n if self.sampling == "uniform" else self.m

    def participants(self, t: int) -> tuple[int, ...]:
        """Clients sampled in round t, ascending; the same in every process and after a resume."""
        sampled = self._sampled(t)
        if not self.quick:
            return sampled
        # A trial run has one client, even if no client was drawn in this round.
        return (sampled or (0,))[:1]

    def there(self, t: int) -> Sequence[int]:
        there = None if self.heterogeneity is None else self.heterogeneity.there(t)
        return range(self.m) if there is None else there.tolist()

    def _sampled(self, t: int) -> tuple[int, ...]:
        there = self.there(t)
        # If every client takes part, nothing is drawn. Drawing nothing is faster and changes no
        # other draw.
        if self.n >= len(there) and self.sampling == "uniform":
            return tuple(there)
        draw = drawn_from(self.key, "participants", t)
        n = self._number(draw, len(there))
        if self.over_selection is not None:
            n = self.over_selection.drawn(n)
        if n >= len(there):
            return tuple(there)
        chosen = draw.choice(len(there), n, replace=False, shuffle=False)
        return tuple(there[place] for place in sorted(chosen.tolist()))

    def tried(self, t: int) -> tuple[int, ...]:
        """Return clients for trials of the steps of round t; at least one."""
        return self.participants(t) or (0,)

    def number(self, t: int) -> int:
        """Return how many clients take part in round t, if a method chooses them."""
        if self.quick:
            return 1
        return self._number(drawn_from(self.key, "participants", t), len(self.there(t)))

    def _number(self, draw: Generator, m: int) -> int:
        n = self.n
        if self.sampling == "uniform":
            return n
        share = self.participation if isinstance(self.participation, float) else n / self.m
        # Drawing the number of heads first and then the clients has the same distribution as m
        # coins, and costs n draws instead of m.
        heads = int(draw.binomial(m, share))
        return heads if self.sampling == "poisson" else max(min(1, m), heads)

    def steps(self, i: int, t: int = 0) -> int:
        return self.steps_in(t, [i])[i]

    def steps_in(self, t: int, ids: Sequence[int]) -> dict[int, int]:
        if self.own_steps is not None:
            steps = dict(zip(ids, self.own_steps(t, ids), strict=True))
        else:
            steps = {i: self._steps_as_set(i) for i in ids}
        if self.heterogeneity is not None:
            steps = {i: self.heterogeneity.steps(t, i, k) for i, k in steps.items()}
        return {i: min(k, self.quick) if self.quick else k for i, k in steps.items()}

    @property
    def equal_steps(self) -> bool:
        set_for_all = self.local_steps is not None and self.own_steps is None
        return set_for_all and self.heterogeneity is None

    def steps_tried(self, i: int) -> int:
        """Steps for a trial before round 0: K_i, and a few if a method may give more later."""
        if self.own_steps is None:
            return self.steps(i)
        return max(self.steps(i), 2 * int(self.data.batches_per_epoch(i)) + 1)

    def _steps_as_set(self, i: int) -> int:
        if self.local_steps is not None:
            return self.local_steps
        return self.steps_of(i, 5 if self.local_epochs is None else self.local_epochs)

    def steps_of(self, i: int, local_epochs: float) -> int:
        """Return the steps of so many local epochs of client i; a step that was begun counts."""
        # The float 0.3 is slightly less than 0.3, which would round some steps differently. So use
        # the decimal form that you wrote.
        epochs = Fraction(str(local_epochs))
        # The last step of an epoch takes the remaining batches.
        steps = -(-int(self.data.batches_per_epoch(i)) // self.accumulate)
        whole = int(epochs)
        return whole * steps + -int(-((epochs - whole) * steps) // 1)

    def smallest_batch(self, clients: Sequence[int] | None = None) -> tuple[int, int] | None:
        """Return the smallest batch size of these clients (None: of all), and the first client with
        it.

        The search costs O(m) and draws nothing. None if the data do not show it.
        """
        if not hasattr(self.data, "smallest_batch"):
            return None
        steps: Any = self.local_steps
        # With less than an epoch, a client may stop before its last, shorter batch. Clients of
        # equal size take equal numbers of steps, so compute these once per size.
        if steps is None and self.local_epochs is not None and self.local_epochs < 1:
            sizes = self.data.client_sizes()
            _, first, of = np.unique(sizes, return_index=True, return_inverse=True)
            steps = np.array([self.steps(int(i)) for i in first])[of]
        # If a method decides the steps, any batch of a client may come in some round.
        if self.own_steps is not None:
            steps = None
        if steps is not None:
            steps = steps * self.accumulate
        smallest: tuple[int, int] | None = self.data.smallest_batch(steps, clients)
        return smallest

    def sizes(self, ids: Iterable[int]) -> dict[int, int]:
        sizes = self.data.client_sizes()
        return {i: int(sizes[i]) for i in ids}

    @staticmethod
    def weights(sizes: dict[int, int], weighting: str) -> dict[int, float]:
        """Return each client's weight in the mean over clients, before it is divided by their sum.

        Args:
            sizes: N_i, the number of samples of each participant.
            weighting: ``"samples"``: N_i; ``"uniform"``: 1.
        """
        if weighting == "samples":
            return {i: float(size) for i, size in sizes.items()}
        return dict.fromkeys(sizes, 1.0)

    def describe(self) -> str:
        """Return text such as ``10 of 100 clients · 5 epochs``."""
        if self.quick:
            return f"1 of {self.m} clients · {self.quick} steps at most (fast_dev_run)"
        if self.own_steps is not None:
            work = f"steps by {self.steps_by}"
        elif self.local_steps:
            work = f"{self.local_steps} steps"
        else:
            work = f"{self.local_epochs or 5:g} epochs"
        if self.accumulate > 1:
            work += f", {self.accumulate} batches per step"
        return f"{self.running or f'{self.n} of {self.m} clients'} · {work}"
