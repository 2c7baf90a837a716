"""``clients.evaluate``: what hooks may ask of clients' own samples in the middle of a round."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fl_lightning.evaluation.evaluator import Evaluator
from fl_lightning.learner import IN_STEPS, lightning_modules, overrides
from fl_lightning.metrics import without_prefix
from fl_lightning.round.clients import Clients
from fl_lightning.round.context import Round


class OwnMetrics(dict[str, Tensor]):
    """Columns ``(n, 1)`` by name; NaN under any name where no client of the group has samples."""

    def __init__(self, columns: dict[str, Tensor], empty: bool) -> None:
        super().__init__(columns)
        self._empty = empty

    def __missing__(self, name: str) -> Tensor:
        if not self._empty:
            given = ", ".join(map(repr, sorted(self)))
            raise KeyError(f"{name!r}: clients.evaluate gives {given}, as the learner logs it")
        return torch.full_like(self["loss"], math.nan)


class ClientEvaluation:
    """Evaluates clients' own samples, a group at a time, on one copy of the learner, made when it
    is first asked for.

    Args:
        run: that trains, a FederatedRun; ``trainer``: the Trainer that fits it.
    """

    def __init__(self, run: Any, trainer: Any) -> None:
        # of engines with threads
        self._run = run
        self._trainer = trainer
        self._lock = threading.Lock()
        self._evaluator: Evaluator | None = None
        self._round: Round | None = None

    def __call__(self, clients: Clients, x: Tensor, what: str) -> dict[str, Tensor]:
        """As :meth:`Clients.evaluate`."""
        if what not in ("train", "test"):
            raise ValueError(
                f"clients.evaluate: what={what!r} is not known; it is 'train' or 'test'"
            )
        data = self._trainer.datamodule
        learner = self._run.model.learner
        indices = data.client_indices if what == "train" else data.client_test_indices
        if overrides(learner, "validation_step"):
            step = "validation_step"
        else:
            step = "training_step"
        found: list[dict[str, float]] = []
        with self._lock:
            evaluator = self._of_round(clients._round)
            for row, client in enumerate(clients.client_ids):
                own = evaluator.client(x if x.ndim == 1 else x[row], client, indices(client), step)
                if step[0] == "v":
                    logged = {without_prefix(name): value for name, value in own.items()}
                else:
                    logged = {}
                found.append({**logged, "loss": own["loss"], "samples": own["samples"]})
        empty = not any(own.pop("samples") for own in found)
        names = dict.fromkeys(name for own in found for name in own)
        wide = clients._round.wide
        columns = {
            name: torch.tensor(
                [[own.get(name, math.nan)] for own in found], dtype=wide, device=clients.x.device
            )
            for name in names
        }
        return OwnMetrics(columns, empty)

    def _of_round(self, round: Round) -> Evaluator:
        """The evaluator, with the round's buffers and what the learner's hooks changed since the
        last one.
        """
        learner = self._run.model.learner
        if self._evaluator is None:
            with _shims_put_aside(learner):
                self._evaluator = Evaluator.of_run(self._run, self._trainer)
        if self._round is not round:
            self._evaluator.follow(learner, round.buffers)
            self._round = round
        return self._evaluator


@contextmanager
def _shims_put_aside(learner: Any) -> Iterator[None]:
    """Within, the learner can be copied without the engine that trains in it."""
    before = [
        (part, {name: vars(part).pop(name) for name in IN_STEPS if name in vars(part)})
        for part in lightning_modules(learner)
    ]
    try:
        yield
    finally:
        for part, shims in before:
            vars(part).update(shims)
