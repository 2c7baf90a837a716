"""The numbers a learner logs, reduced over a client's steps as Lightning reduces an epoch's."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection

from fl_lightning.errors import UserError

LAST = "last"  # the last step's value, which Lightning calls <name>_step
START = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf, LAST: 0.0}
WORDS = {LAST: LAST, "mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}
FUNCTIONS = {torch.mean: "mean", torch.sum: "sum", torch.max: "max", torch.min: "min"}
FUNCTIONS |= {sum: "sum", max: "max", min: "min"}


def reduction(learner: str, name: str, reduce_fx: Any) -> str:
    """How ``self.log(name, …, reduce_fx=reduce_fx)`` reduces: mean, sum, max, min or last.

    Raises:
        UserError: the reduction is a function of the user's own.
    """
    word = reduce_fx.lower() if isinstance(reduce_fx, str) else ""
    kind = WORDS.get(word) or FUNCTIONS.get(reduce_fx)
    if kind is None:
        raise UserError(
            f"learner {learner}: self.log({name!r}, reduce_fx={reduce_fx!r}) is not accepted; as "
            "in plain Lightning it is 'mean', 'sum', 'max' or 'min'. For another reduction log a "
            "metric of torchmetrics."
        )
    return kind


def items_of(dictionary: Any) -> Iterable[tuple[str, Any]]:
    """Return the names and values that ``self.log_dict`` logs; a collection's with its prefix."""
    if isinstance(dictionary, MetricCollection):
        return dictionary.items(keep_base=False)
    items: Iterable[tuple[str, Any]] = dictionary.items()
    return items


class StepLogs:
    """Numbers by name over a client's steps; ``kinds``: how each is reduced.

    They are always the same tensors, since a recorded step adds to them.
    """

    def __init__(self, learner: Any, device: torch.device) -> None:
        self.learner = type(learner).__name__
        self.device = device
        self.totals: dict[str, Tensor] = {}
        self.numbers: dict[str, int] = {}
        self.kinds: dict[str, str] = {}
        # If a step takes several batches: the weight of the present batch, and the means so far.
        self.count: Tensor | None = None
        self.of_step: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def declare(self, name: str, reduce_fx: Any) -> None:
        """Note how ``self.log`` is asked to reduce a number.

        Raises:
            UserError: the reduction is a function of the user's own, or another than before.
        """
        kind = reduction(self.learner, name, reduce_fx)
        if self.kinds.setdefault(name, kind) != kind:
            raise UserError(
                f"learner {self.learner}: self.log({name!r}, reduce_fx={reduce_fx!r}), but another "
                f"call gave reduce_fx={self.kinds[name]!r}. Each name has one reduction, so log "
                "the values under two names."
            )

    def add(self, name: str, values: list[Tensor]) -> None:
        """Add what one step, or one of its batches, logged."""
        kind = self.kinds.get(name, "mean")
        if self.count is not None and kind == "mean":
            held = self.of_step.setdefault(name, [])
            held += [(value.reshape(()).double(), self.count) for value in values]
            return
        if name not in self.totals:
            self.totals[name] = torch.full((), START[kind], dtype=torch.float64, device=self.device)
        total = self.totals[name]
        for value in values:
            reduce_into(total, value.reshape(()), kind)
        self.numbers[name] = self.numbers.get(name, 0) + len(values)

    def step_done(self) -> None:
        """A step over several batches is over: their means become one, weighed by what counts."""
        self.count = None
        for name, held in self.of_step.items():
            number = torch.stack([count for _, count in held]).sum()
            total = torch.stack([value * count for value, count in held]).sum()
            self.add(name, [total / (number + (number == 0))])
        self.of_step = {}

    def clear(self) -> None:
        """Begin anew, for another client."""
        self.count = None
        self.of_step = {}
        for name, total in self.totals.items():
            total.fill_(START[self.kinds.get(name, "mean")])
        self.numbers.clear()

    def take(self) -> dict[str, Tensor]:
        """Numbers over the steps since the last call, float64 scalars."""
        logs = {
            name: of_steps(self.totals[name], number, self.kinds.get(name))
            for name, number in self.numbers.items()
        }
        self.clear()
        return logs


def reduce_into(total: Tensor, value: Tensor, kind: str) -> None:
    """Take a value into a total, in place; several at once, each into its own."""
    if kind in ("mean", "sum"):
        total.add_(value)
    elif kind == LAST:
        total.copy_(value)
    else:
        larger = torch.maximum if kind == "max" else torch.minimum
        total.copy_(larger(total, value.to(total.dtype)))


def of_steps(total: Tensor, number: int | Tensor, kind: str | None) -> Tensor:
    """The value of a total over so many values, as a tensor of its own."""
    return total / number if kind in (None, "mean") else total.clone()


def in_one_step(values: list[Tensor], kind: str | None) -> Tensor:
    """The values that one step logged under one name as one, float64."""
    together = torch.stack([value.reshape(()) for value in values]).double()
    if kind in (None, "mean", "sum"):
        return together.sum()
    if kind == LAST:
        return together[-1]
    if kind == "max":
        return together.amax()
    return together.amin()
