"""Clients' availability, dropouts and amounts of work, and the durations of synchronous rounds.

All of these are functions of (seed, round or version, client), so they are known before training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fl_lightning.sampling import generator


@dataclass(frozen=True)
class Heterogeneity:
    """The settings of ``SystemHeterogeneity``.

    Args:
        seed: the run's.
        m: clients.
        dropout: the share of jobs that end without a delivery.
        min_work: u₀: a client does a share of its steps, uniform between u₀ and 1.
        availability: the probability of being present at a version, or one per client ``(m,)``.
    """

    seed: int
    m: int
    dropout: float = 0.0
    min_work: float = 1.0
    availability: float | NDArray[np.float64] | None = None

    def there(self, version: int) -> NDArray[np.int64] | None:
        """Return the clients that are present, ascending; None: all clients."""
        if self.availability is None:
            return None
        draws = generator(self.seed, "availability", version).random(self.m)
        return np.flatnonzero(draws < self.availability)

    def drops(self, version: int, client: int) -> bool:
        """Return whether the job that ``client`` starts at ``version`` delivers nothing."""
        if self.dropout == 0:
            return False
        return bool(generator(self.seed, "dropout", version, client).random() < self.dropout)

    def steps(self, version: int, client: int, whole: int) -> int:
        """Return K: how many of the ``whole`` K_i steps it takes, at least one."""
        if self.min_work == 1:
            return whole
        draw = float(generator(self.seed, "work", version, client).random())
        share = self.min_work + (1 - self.min_work) * draw
        return max(1, math.ceil(share * whole))


@dataclass(frozen=True)
class Deadline:
    """The settings of ``VirtualClock``, besides its devices.

    Args:
        ticks: the round ends after so many; None: when enough have delivered.
        over_selection: o: the number of drawn clients over that of participants.
    """

    ticks: int | None
    over_selection: float

    def drawn(self, n: int) -> int:
        """Return ⌈o n⌉, computed as an exact decimal."""
        return math.ceil(Fraction(str(self.over_selection)) * n)


@dataclass(frozen=True)
class Outcome:
    """What happened to the participants of a synchronous round, each list ascending.

    ``length``: ticks from the round's start until the server stepped. ``ends``: ticks by client,
    from the round's start.
    ``arrived``: clients whose uploads came before the end, including the accepted ones.
    """

    accepted: tuple[int, ...]
    arrived: tuple[int, ...]
    late: tuple[int, ...]
    dropped: tuple[int, ...]
    length: int
    ends: dict[int, int]


def outcome(
    ids: Sequence[int],
    n: int,
    dropped: Callable[[int], bool],
    ticks: Callable[[int], int],
    deadline: int | None,
) -> Outcome:
    """Return the outcome of a round: ``ids`` are drawn, the first ``n`` to deliver accepted."""
    ends = {client: ticks(client) for client in ids}
    lost = tuple(client for client in ids if dropped(client))
    surviving = [client for client in ids if client not in set(lost)]
    in_time = sorted((ends[client], client) for client in surviving)
    if deadline is not None:
        in_time = [(end, client) for end, client in in_time if end <= deadline]
    accepted = tuple(sorted(client for _, client in in_time[:n]))
    if len(accepted) == n and n:
        length = in_time[n - 1][0]
    elif deadline is not None:
        length = deadline
    else:
        # The server does not know who dropped out, so it waits for the slowest that will answer.
        length = max((ends[client] for client in surviving or ids), default=0)
    arrived = tuple(client for client in surviving if ends[client] <= length)
    late = tuple(client for client in surviving if client not in set(accepted))
    return Outcome(accepted, arrived, late, lost, length, ends)
