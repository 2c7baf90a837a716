"""The facts of one round: fixed before the first client trains, the same until the round ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.learner import Layout
from fl_lightning.round.partial import Parts
from fl_lightning.state import Initial


@dataclass(frozen=True)
class ClientRates:
    """The client optimizer's settings in a round.

    Args:
        factor: what every group's learning rate is multiplied by, this round.
        lr: the first group's learning rate, ``factor`` included, a scalar tensor.
        plain_sgd: whether a step is lr times the gradient, weight decay included.
        several: the setting in which parameter groups differ, with its values; empty where they agree.
    """

    factor: float
    lr: Tensor
    momentum: float = 0.0
    weight_decay: float = 0.0
    plain_sgd: bool = True
    several: str = ""

    def decayed(self, factor: float) -> ClientRates:
        """The same with learning rates × ``factor``."""
        return replace(self, factor=factor, lr=self.lr * factor)

    def require_one(self) -> None:
        """Refuse a method that reads the client learning rate where there are several."""
        if self.several:
            raise UserError(
                f"the client optimizer has parameter groups of several values of {self.several}, and a method of "
                "this run reads the client learning rate, which has to be one. Use one group, or another method."
            )


@dataclass(frozen=True)
class Round:
    """Round t: who takes part, from which model, at which rates.

    Args:
        ids: the participants, ascending.
        steps, sizes, weights: K_i, N_i and the aggregation weights (not normalised), by client.
        num_clients: registered clients m.
        w, w0, evaluated: w^t, w^0 (where a method needs it) and what was evaluated last, each ``(D,)``.
        buffers: the server's, by name.
        read: ``(key, client)`` → a committed row, or None.
        server_states: committed, by key.
        optimizer_rows: keys of the rows in which client optimizers are kept.
        parts: parts with averaging periods of their own, or None.
    """

    t: int
    ids: list[int]
    steps: dict[int, int]
    sizes: dict[int, int]
    weights: dict[int, float]
    num_clients: int
    w: Tensor
    w0: Tensor
    evaluated: Tensor
    buffers: Mapping[str, Tensor]
    layout: Layout
    rates: ClientRates
    read: Callable[[str, int], Tensor | None]
    server_states: Mapping[str, Tensor]
    optimizer_rows: list[str] = field(default_factory=list)
    parts: Parts | None = None

    @property
    def wide(self) -> torch.dtype:
        """The dtype of sums and per-client scalars: the learner's, at least float32."""
        return torch.promote_types(self.w.dtype, torch.float32)

    @cached_property
    def averaged(self) -> Tensor | None:
        """``(D,)`` bool: coordinates averaged at the end of this round; None: all."""
        return None if self.parts is None else self.parts.averaged(self.t)

    def initial(self, initial: Initial, shape: tuple[int, ...] | None, dtype: torch.dtype | None) -> Tensor:
        """A state's value before it was ever written."""
        size = self.w.shape if shape is None else torch.Size(shape)
        kind = self.w.dtype if dtype is None else dtype
        if initial == "zeros":
            return torch.zeros(size, dtype=kind, device=self.w.device)
        value = initial(self.w) if callable(initial) else self.w0 if initial == "initial_model" else self.w
        return value.to(kind).expand(size)
