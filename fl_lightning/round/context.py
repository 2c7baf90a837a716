"""The facts of one round: fixed before the first client trains, and unchanged until the round
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.learner.layout import Layout
from fl_lightning.round.client_schedule import ClientSchedule, Groups
from fl_lightning.round.model_parts import Parts
from fl_lightning.storage.secret import Key

# Prefix of the names of the rows in which clients keep their own buffers.
BUFFER = "buffer."


@dataclass(frozen=True)
class ClientRates:
    """The client optimizer's settings in a round.

    Args:
        factor: factor of every group's learning rate in this round.
        lr: the first group's learning rate, including ``factor``, a scalar tensor.
        optimizer: its class, as text.
        plain_sgd: whether a step is lr times the gradient, including weight decay.
        coupled: whether weight decay is part of the gradient.
        other_momentum: why steps with gradient 1 do not add up as with momentum that starts at 0 in
            each round; empty if they do.
        several: the setting in which the groups differ, with the values; empty if they do not
            differ.
        schedule: the learner's lr scheduler, if it is stepped; ``entry``: its entry in this round.
    """

    factor: float
    lr: Tensor
    momentum: float = 0.0
    weight_decay: float = 0.0
    coupled: bool = True
    other_momentum: str = ""
    plain_sgd: bool = True
    optimizer: str = "SGD"
    several: str = ""
    schedule: ClientSchedule | None = None
    entry: int = 0

    @property
    def by_step(self) -> bool:
        return self.schedule is not None and self.schedule.by_step

    def in_round(self, t: int, factor: float, steps: Collection[int]) -> ClientRates:
        """Return the rates of round t, multiplied by ``factor``; ``steps`` are the numbers of
        steps that its clients take.
        """
        schedule = self.schedule
        # Fill the table here, on the main thread, as far as this round's clients may read it.
        if schedule is None or schedule.by_step:
            if schedule is not None:
                schedule.reach_each(steps)
            return replace(self, factor=factor, lr=self.lr * factor)
        schedule.reach(t + 1)
        groups = schedule[t]
        lr = torch.tensor(groups[0]["lr"] * factor, dtype=torch.float64, device=self.lr.device)
        momentum = float(groups[0].get("momentum", self.momentum))
        weight_decay = float(groups[0].get("weight_decay", 0)) if self.coupled else 0.0
        return replace(
            self,
            factor=factor,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            several=several_in(groups),
            entry=t,
        )

    def groups(self, step: int) -> Groups | None:
        """Return the settings of the parameter groups at a local step, before ``factor``.

        None: the groups keep the settings with which they were built.
        """
        if self.schedule is None:
            return None
        return self.schedule[step if self.schedule.by_step else self.entry]

    def of_client(self, steps: int) -> ClientRates:
        if self.schedule is None or self.schedule.another is None:
            return self
        return replace(self, schedule=self.schedule.of_client(steps))

    def elapsed(self, steps: Tensor) -> Tensor:
        """Return Σ η over the first K local steps, for each K of ``steps``."""
        if self.schedule is None or not self.schedule.by_step:
            return steps * self.lr.to(steps.dtype)
        sums = []
        for k in map(int, steps.flatten().tolist()):
            sums.append(self.factor * self.schedule.of_client(k).elapsed(k))
        return torch.tensor(sums, dtype=steps.dtype, device=steps.device).view_as(steps)

    def require_one(self, caller: str) -> None:
        """Refuse several rates or weight decays if ``caller``, a method, takes a single one."""
        if self.several:
            raise UserError(
                "the client optimizer has parameter groups with several values of "
                f"{self.several}, and {caller} needs a single learning rate and weight decay for "
                "all parameters. Use one group, or another method."
            )

    def require_known_momentum(self, caller: str) -> None:
        """Refuse momentum of another kind if ``caller``, a method, computes with ρ."""
        self.require_constant(caller)
        if self.momentum and self.other_momentum:
            raise UserError(
                f"the client optimizer has momentum with {self.other_momentum}, and {caller} "
                f"needs plain momentum: μ ← {self.momentum:g} μ + g, with μ = 0 at the start of "
                f"each round. Leave {self.other_momentum} out, or use another method."
            )

    def require_constant(self, caller: str) -> None:
        """Refuse changing rates if a method takes a single one for a client's whole round.

        ``clients.elapsed`` and ``clients.mean_gradient`` are exempt, because they add up the rates
        of the steps.
        """
        self.require_one(caller)
        if self.by_step:
            raise UserError(
                "client_scheduler='local_steps' changes the learning rate in each local step, "
                f"but {caller} needs one rate for the whole round. Use client_scheduler='rounds' "
                "or "
                "'ignore', or another method."
            )


def several_in(groups: list[dict[str, Any]]) -> str:
    """Setting in which parameter groups differ, with its values; empty if there is none."""
    for setting in ("lr", "weight_decay"):
        values = sorted({float(group.get(setting, 0)) for group in groups})
        if len(values) > 1:
            return f"{setting} ({', '.join(f'{value:g}' for value in values)})"
    return ""


# (group, x, which samples) -> columns (n, 1) by name
Evaluate = Callable[[Any, Tensor, str], dict[str, Tensor]]


@dataclass(frozen=True)
class Round:
    """Round t: its participants, the model from which they train, and their rates.

    Args:
        ids: the participants, ascending; none until they are chosen.
        steps, sizes, weights: K_i, N_i and the aggregation weights (not normalised), by client.
        w, w0, evaluated: w^t, w^0 (None if no state starts from it) and the model evaluated last,
            each ``(D,)``.
        read: ``(key, client)`` → a committed row, or None.
        server_states: committed states, by key.
        optimizer_rows: keys of the rows that hold client optimizers.
        parts: parts with their own averaging periods, or None.
        all_sizes: numbers of samples ``(m,)`` of all clients.
        steps_of: ``(client, epochs)`` → local steps of so many epochs.
        steps_in: clients → K_i of each in this round, whether or not it takes part.
        epoch_batches: client → batches of an epoch.
        home: ``(key, client)`` → a committed row of a client whose rows this process keeps, or
            None.
        own_buffers: buffers that each client keeps as its own, by name.
        noise: the source of noise that nobody else may compute; None: no method needs it.
        noise_of_clients: the same, for noise that clients add.
        trained: ``(D,)`` bool, the coordinates that every client of the round trains; None: all, or
            clients differ.
        server_moves: whether the server may change coordinates that clients do not train.
        sent: the last round in which each client was sent w, if a method depends on it.
        base_due: ``(round, last round)`` → how many numbers of the base a client lacks; None: no
            method changes the base.
        current_w: the server's model ``(D,)`` in this round, if these clients begin at an earlier
            one.
        outputs: ``(vector, x)`` → the learner's outputs at the server; None: not at the server.
    """

    t: int
    num_clients: int
    w: Tensor
    w0: Tensor | None
    evaluated: Tensor
    buffers: Mapping[str, Tensor]
    layout: Layout
    rates: ClientRates
    read: Callable[[str, int], Tensor | None]
    server_states: Mapping[str, Tensor]
    ids: list[int] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)
    optimizer_rows: list[str] = field(default_factory=list)
    parts: Parts | None = None
    seed: int = 0
    all_sizes: Callable[[], Any] | None = None
    steps_of: Callable[[int, float], int] | None = None
    steps_in: Callable[[Collection[int]], dict[int, int]] | None = None
    epoch_batches: Callable[[int], int] | None = None
    home: Callable[[str, int], Tensor | None] | None = None
    own_buffers: Collection[str] = ()
    noise: Key | None = None
    noise_of_clients: Key | None = None
    trained: Tensor | None = None
    server_moves: bool = False
    sent: Mapping[int, int] = field(default_factory=dict)
    base_due: Callable[[int, int | None], int] | None = None
    current_w: Tensor | None = None
    outputs: Callable[[Tensor, Any], Any] | None = None

    def buffers_of(self, client: int) -> Mapping[str, Tensor]:
        """Buffers with which a client starts: the server's, or its own if it kept some."""
        if not self.own_buffers:
            return self.buffers
        buffers = dict(self.buffers)
        for name, buffer in self.buffers.items():
            if name in self.own_buffers:
                # A client that never trained has no row yet, and starts from the server's buffer.
                row = self.read(BUFFER + name, client)
                if row is not None:
                    buffers[name] = row.to(buffer)
        return buffers

    @property
    def initial_model(self) -> Tensor:
        """w^0 ``(D,)``.

        Raises:
            UserError: it was not kept.
        """
        if self.w0 is None:
            raise UserError(
                "initial_model: w^0 is kept only where a state starts from it. Declare one in the "
                "method: first = ServerState(initial='initial_model')."
            )
        return self.w0

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of sums and per-client scalars: the learner's, at least float32."""
        return torch.promote_types(self.w.dtype, torch.float32)

    @cached_property
    def lent(self) -> list[tuple[str, Tensor]]:
        """The run's vectors that hooks of clients get without a copy, by their names in hooks."""
        lent = [
            ("clients.w", self.w),
            ("clients.evaluated", self.evaluated),
            ("clients.lr", self.rates.lr),
        ]
        return lent if self.w0 is None else [*lent, ("clients.initial_model", self.w0)]

    @cached_property
    def averaged(self) -> Tensor | None:
        """Return ``(D,)`` bool: coordinates averaged at the end of this round; None: all."""
        return self.trained if self.parts is None else self.parts.averaged(self.t)
