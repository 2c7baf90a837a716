"""Parts of the model with their own averaging periods.

FedALS (Gholami & Seferoglu 2024) averages some layers less often; FedPer never averages the head.

A part with period P is averaged at the end of round t when (t + 1) mod P = 0. In other rounds each
client keeps its own copy, and starts from it if it was written since the part was last averaged. If
no client finishes a round in which a part is due, the part is not averaged, and the copies stay
valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce

import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import PositiveInt, check

COPY = "parts.x"
ORIGIN = "parts.origin"
ELAPSED = "parts.elapsed"
WRITTEN = "parts.round"
# The server state with the round in which each part was last averaged. A run has it from the first
# round on in which a part was due and no client finished; until then the periods give the rounds.
AVERAGED = "parts.averaged"


class Parts:
    """The run's parts: disjoint ``masks`` ``(D,)`` bool, each with its period in rounds.

    A part whose period is None is never averaged.

    Raises:
        UserError: a period is below 1, or masks overlap or have another shape.
    """

    def __init__(
        self, parts: list[tuple[Tensor, int | None]], size: int, device: torch.device
    ) -> None:
        covered = torch.zeros(size, dtype=torch.bool)
        self.masks: list[Tensor] = []
        self.periods: list[int | None] = []
        for mask, period in parts:
            check("periods", period, PositiveInt | None)
            if mask.shape != (size,) or bool((covered & mask.cpu()).any()):
                raise UserError(
                    "parts: each part is a (D,) bool mask, and no coordinate lies in two of them."
                )
            covered |= mask.cpu()
            if period != 1 and bool(mask.any()):
                self.masks.append(mask.to(device))
                self.periods.append(period)
        self.none = torch.zeros(size, dtype=torch.bool, device=device)
        self.kept = self.union([True] * len(self.masks))

    def union(self, wanted: Iterable[bool]) -> Tensor:
        """Return ``(D,)`` bool: the coordinates of the wanted parts."""
        chosen = [mask for mask, counts in zip(self.masks, wanted, strict=True) if counts]
        return reduce(torch.bitwise_or, chosen, self.none)

    def due(self, t: int, period: int | None) -> bool:
        return period is not None and (t + 1) % period == 0

    def averaged(self, t: int) -> Tensor:
        """Return ``(D,)`` bool: coordinates averaged at the end of round t."""
        return ~self.union(not self.due(t, period) for period in self.periods)

    def last_averaged(self, t: int, states: Mapping[str, Tensor]) -> list[int]:
        """For each part the last round before t in which it was averaged; -1: none."""
        if AVERAGED in states:
            return [int(round) for round in states[AVERAGED]]
        return [-1 if period is None else t // period * period - 1 for period in self.periods]

    def pending(self, t: int, states: Mapping[str, Tensor]) -> Tensor:
        """``(D,)`` bool: coordinates not averaged in round t; ``states``: after round t."""
        return self.union(last != t for last in self.last_averaged(t + 1, states))

    def after(self, t: int, states: Mapping[str, Tensor], finished: bool) -> dict[str, Tensor]:
        """The state of last averages after round t; ``finished``: whether a client finished."""
        due = [self.due(t, period) for period in self.periods]
        if not any(due) or (finished and AVERAGED not in states):
            return {}
        last = self.last_averaged(t, states)
        if finished:
            last = [t if now else before for now, before in zip(due, last, strict=True)]
        return {AVERAGED: torch.tensor(last)}

    def taken(
        self,
        t: int,
        states: Mapping[str, Tensor],
        read: Callable[[str, int], Tensor | None],
        ids: list[int],
        x: Tensor,
        wide: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Put the clients' own copies into ``x`` ``(n, D)`` if they are newer than the last
        average.

        Returns:
            The points at which their displacement began, Σ η K since then, and the coordinates for
            which this holds, each ``(n, D)``.
        """
        origin = torch.zeros_like(x)
        mask = torch.zeros_like(x, dtype=torch.bool)
        last = self.last_averaged(t, states)
        elapsed = torch.zeros(x.shape, dtype=wide, device=x.device)
        for row, client in enumerate(ids):
            written = read(WRITTEN, client)
            if written is None:
                continue
            copy, start, since = (read(key, client) for key in (COPY, ORIGIN, ELAPSED))
            assert copy is not None and start is not None and since is not None
            for p, part in enumerate(self.masks):
                if int(written) > last[p]:
                    mask[row] |= part
                    elapsed[row][part] = since[p].to(elapsed)
            # A client saves all its parts in one row, and some may be older than the last average.
            # The mask shows which coordinates of the row are still valid.
            full = torch.zeros_like(x[row])
            full[self.kept] = copy.to(x)
            x[row] = torch.where(mask[row], full, x[row])
            origin[row][self.kept] = start.to(x)
        return origin, elapsed, mask
