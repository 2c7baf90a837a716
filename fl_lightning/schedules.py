"""Values that change from round to round: for learning rates and for every method's coefficient."""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import (
    AtLeast,
    AtMost,
    Checked,
    FiniteFloat,
    NonNegativeInt,
)
from fl_lightning.introspection.init_args import stored

# A number of rounds that is no integer is no mistake.
Rounds = Annotated[int | float, AtLeast(1)]
LARGEST = (2 - 2**-23) * 2.0**127  # the largest number in single precision
Rate = Annotated[float, AtLeast(0), AtMost(LARGEST)]


class Schedule(Checked, ABC):
    """A function of the round t = 0, 1, …: the factor of a learning rate, or the value of a
    coefficient.

    >>> [Exponential(0.5)(t) for t in range(3)]
    [1.0, 0.5, 0.25]
    """

    @abstractmethod
    def __call__(self, round: int) -> float: ...

    def __repr__(self) -> str:
        # What changes nothing is left out of the text.
        neutral = (("scale", 1.0), ("warmup", 0))
        shown = {k: v for k, v in vars(self).items() if (k, v) not in neutral}
        return f"{type(self).__name__}({texts_of(shown)})"


class Exponential(Schedule):
    """``scale * gamma ** t``: a learning rate's decay, or a coefficient that starts at ``scale``.

    >>> [Exponential(0.5, scale=0.1)(t) for t in range(3)]
    [0.1, 0.05, 0.025]
    """

    def __init__(self, gamma: FiniteFloat, scale: FiniteFloat = 1.0) -> None:
        self.gamma = gamma
        self.scale = scale

    def __call__(self, round: int) -> float:
        try:
            return float(self.scale * self.gamma**round)
        except OverflowError:
            return math.copysign(math.inf, self.scale) if self.scale else 0.0


class Cosine(Schedule):
    """``scale`` times half a cosine from 1 to ``end`` over ``rounds`` rounds, and then ``end``.

    With ``warmup`` the first of these rounds rise in equal steps, 1/warmup, 2/warmup, …, 1, and the
    cosine takes the others.

    >>> [round(Cosine(2, end=0.5, scale=0.1)(t), 3) for t in range(4)]
    [0.1, 0.075, 0.05, 0.05]
    >>> [Cosine(4, warmup=2)(t) for t in range(5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """

    def __init__(
        self,
        rounds: Rounds,
        end: FiniteFloat = 0.0,
        scale: FiniteFloat = 1.0,
        warmup: NonNegativeInt = 0,
    ) -> None:
        if warmup >= rounds:
            raise UserError(
                f"Cosine: warmup={warmup} rounds of rounds={rounds} leave none for the cosine. "
                "Give fewer."
            )
        self.rounds = rounds
        self.end = end
        self.scale = scale
        self.warmup = warmup

    def __call__(self, round: int) -> float:
        if round >= self.rounds:
            return self.scale * self.end
        if round < self.warmup:
            return self.scale * (round + 1) / self.warmup
        share = (1 + math.cos(math.pi * (round - self.warmup) / (self.rounds - self.warmup))) / 2
        return self.scale * (self.end + (1 - self.end) * share)


class Linear(Schedule):
    """``start + (end - start) t / rounds`` for rounds t before ``rounds``, then ``end``.

    >>> [Linear(0.0, 1.0, rounds=4)(t) for t in (0, 1, 2, 4, 5)]
    [0.0, 0.25, 0.5, 1.0, 1.0]
    """

    def __init__(self, start: FiniteFloat, end: FiniteFloat, rounds: Rounds) -> None:
        self.start = start
        self.end = end
        self.rounds = rounds

    def __call__(self, round: int) -> float:
        if round >= self.rounds:
            return self.end
        return self.start + (self.end - self.start) * round / self.rounds


class Steps(Schedule):
    """The value of the latest of the given rounds; 1 before the first one.

    >>> [Steps({0: 1.0, 2: 0.1})(t) for t in range(4)]
    [1.0, 1.0, 0.1, 0.1]
    """

    def __init__(self, values: dict[int, FiniteFloat]) -> None:
        self.values: dict[int, float] = {}
        for t, value in values.items():
            self.values[int(t)] = float(value)

    def __call__(self, round: int) -> float:
        past = [t for t in self.values if t <= round]
        return self.values[max(past)] if past else 1.0


def decay_factor(decay: float | Schedule, t: int) -> float:
    """Return the factor of a learning rate in round t."""
    return float(decay(t) if isinstance(decay, Schedule) else decay**t)


def decay_text(decay: float | Schedule) -> str:
    """Return a decay in the form that follows a learning rate; empty if there is none.

    >>> decay_text(0.998), decay_text(1.0)
    (' × 0.998^t', '')
    """
    if decay == 1.0:
        return ""
    return f" × {decay!r}" if isinstance(decay, Schedule) else f" × {decay:g}^t"


def arguments(of: object) -> str:
    """Return the arguments with which an object was made and that it stores, as text.

    >>> arguments(Cosine(100))
    'rounds=100, end=0.0, scale=1.0, warmup=0'
    """
    return texts_of(stored(of)[0])


def texts_of(values: Mapping[str, object]) -> str:
    """Return values by name as text, without those that have none."""
    texts = {name: text_of(value) for name, value in values.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items() if text)


def text_of(value: object) -> str:
    """Return a value as text that is the same in every process; empty: it has none.

    The repr of a function, or of an object without its own repr, contains its address. The repr of
    a long array or tensor leaves out numbers, so its text is a checksum.
    """
    text = repr(value)
    if "..." in text and hasattr(value, "tolist"):
        checksum = hashlib.sha256(repr(value.tolist()).encode()).hexdigest()
        text = f"{type(value).__name__} {checksum[:16]}"
    function = callable(value) and not isinstance(value, Schedule)
    return "" if function or re.search(r"<.+ at 0x\w+>", text) else text
