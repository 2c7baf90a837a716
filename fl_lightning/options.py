"""Checks of options: a value that is not accepted is refused in one sentence."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any

from fl_lightning.errors import UserError, suggest


def one_of(option: str, value: object, accepted: Collection[str | bool]) -> None:
    """Refuse a word that is not known.

    >>> one_of("weighting", "sample", ["uniform", "samples"])
    Traceback (most recent call last):
    fl_lightning.errors.UserError: weighting='sample' is not known; accepted are 'uniform', \
'samples'. Did you mean 'samples'?
    """
    if value not in accepted:
        known = ", ".join(map(repr, accepted))
        hint = suggest(str(value), map(str, accepted))
        raise UserError(f"{option}={value!r} is not known; accepted are {known}.{hint}")


def number(
    option: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    whole: bool = False,
    finite: bool = True,
    beside: str = "",
) -> None:
    """Refuse what is no number, or one out of bounds.

    Args:
        above, least, most, below: the bounds; without ``most`` and ``below`` it has to be finite.
        whole: integers alone.
        finite: False: infinity is accepted.
        beside: what else the option takes, for the text.

    >>> number("trim", 0.7, least=0, below=0.5)
    Traceback (most recent call last):
    fl_lightning.errors.UserError: trim=0.7 is not accepted; it has to be a number from 0 to \
below 0.5.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    fits = is_number and (
        (above is None or value > above)
        and (least is None or value >= least)
        and (most is None or value <= most)
        and (below is None or value < below)
        and (not finite or abs(value) < math.inf)
        and (not whole or isinstance(value, Integral))
    )
    if fits:
        return
    bounds = ""
    if above is not None:
        bounds = f" above {above:g}"
    if least is not None:
        bounds = f" from {least:g}"
    if most is not None:
        bounds += f" up to {most:g}"
    if below is not None:
        bounds += f" to below {below:g}"
    kind = "an integer" if whole else "a number"
    also = f", or {beside}" if beside else ""
    raise UserError(f"{option}={value!r} is not accepted; it has to be {kind}{bounds}{also}.")


def positive(option: str, value: object, whole: bool = False, or_auto: bool = False) -> None:
    """Refuse all but None and numbers above 0 (``or_auto``: and ``"auto"``)."""
    if value is None or (or_auto and value == "auto"):
        return
    if whole and isinstance(value, float) and value.is_integer():
        value = int(value)
    number(option, value, above=0, whole=whole, beside="auto" if or_auto else "")


def flag(option: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise UserError(f"{option}={value!r} is not accepted; it is true or false.")
