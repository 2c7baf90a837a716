"""``clients.evaluate``: hooks measure clients' own samples in the middle of a round."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fl_lightning.evaluation.evaluator import Evaluator
from fl_lightning.learner.modules import REPLACED_IN_STEPS, lightning_modules, overrides
from fl_lightning.metrics import without_prefix
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.context import Round


class OwnMetrics(dict[str, Tensor]):
    """Columns ``(n, 1)`` by name; NaN under any name if no client of the group has samples."""

    def __init__(self, columns: dict[str, Tensor], empty: bool) -> None:
        super().__init__(columns)
        self._empty = empty

    def __missing__(self, name: str) -> Tensor:
        if not self._empty:
            names = ", ".join(map(repr, sorted(self)))
            raise KeyError(f"{name!r}: clients.evaluate gives {names}, as the learner logs it")
        return torch.full_like(self["loss"], math.nan)


class ClientEvaluation:
    """Evaluates clients' own samples on one copy of the learner, made when it is first needed.

    Args:
        learner: learner whose steps measure; ``data``: a federated data module.
        make: function that makes the evaluator.
    """

    def __init__(self, learner: Any, data: Any, make: Callable[[], Evaluator]) -> None:
        self._learner = learner
        self._data = data
        self._make = make
        # Threads may ask for several clients at once, but there is only one copy.
        self._lock = threading.Lock()
        self._evaluator: Evaluator | None = None
        self._round: Round | None = None

    def __call__(self, group: ClientGroup, x: Tensor, what: str) -> dict[str, Tensor]:
        data = self._data
        learner = self._learner
        indices = {"train": data.client_indices, "test": data.client_test_indices}[what]
        validates = overrides(learner, "validation_step")
        step = "validation_step" if validates else "training_step"
        rows: list[dict[str, float]] = []
        with self._lock:
            evaluator = self._of_round(group.round)
            for j, client in enumerate(group.ids):
                point = x if x.ndim == 1 else x[j]
                means = evaluator.client(point, client, indices(client), step)
                # The loss is always that of training_step, even if validation logs one as val/loss.
                row = {"loss": means["loss"], "samples": means["samples"]}
                if validates:
                    logged = {without_prefix(name): value for name, value in means.items()}
                    row = {**logged, **row}
                rows.append(row)
        empty = not any(row.pop("samples") for row in rows)
        names: dict[str, None] = {}
        for row in rows:
            names.update(dict.fromkeys(row))
        columns: dict[str, Tensor] = {}
        for name in names:
            column = [[row.get(name, math.nan)] for row in rows]
            columns[name] = torch.tensor(column, dtype=group.round.wide, device=group.x.device)
        return OwnMetrics(columns, empty)

    def _of_round(self, round: Round) -> Evaluator:
        """Evaluator with the round's buffers, and with changes by the learner's hooks."""
        learner = self._learner
        if self._evaluator is None:
            with _shims_put_aside(learner):
                self._evaluator = self._make()
        if self._round is not round:
            self._evaluator.follow(learner, round.buffers)
            self._round = round
        return self._evaluator


@contextmanager
def _shims_put_aside(learner: Any) -> Iterator[None]:
    """Within this context the learner can be copied, because the engine's shims are removed."""
    put_aside: list[tuple[Any, dict[str, Any]]] = []
    for part in lightning_modules(learner):
        names = [name for name in REPLACED_IN_STEPS if name in vars(part)]
        put_aside.append((part, {name: vars(part).pop(name) for name in names}))
    try:
        yield
    finally:
        for part, shims in put_aside:
            vars(part).update(shims)
