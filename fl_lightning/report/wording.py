"""Numbers as a reader meets them: accuracies in percent, bytes and seconds in fitting units."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fl_lightning.metrics import is_accuracy

NONE = "–"


@dataclass(frozen=True)
class Unit:
    """How values of a metric are shown: ``factor`` times the value, in ``name``.

    Differences are shown in ``of_difference``.
    """

    factor: float = 1.0
    name: str = ""
    of_difference: str = ""
    percent: bool = False

    def value(self, value: float | None, sd: float | None = None) -> str:
        """``75.95 ± 0.19``.

        >>> PERCENT.value(0.75951, 0.0019), Unit().value(0.123456, 0.0123), PERCENT.value(None)
        ('75.95 ± 0.19', '0.123 ± 0.012', '–')
        """
        if value is None or not math.isfinite(value):
            return NONE
        shown = value * self.factor
        if sd is None:
            return f"{shown:.2f}" if self.percent else f"{shown:.4g}"
        spread = sd * self.factor
        if self.percent:
            return f"{shown:.2f} ± {spread:.2f}"
        if not spread:
            return f"{shown:.4g} ± 0"
        # The deviation is shown by two digits, and the value by as many places.
        places = max(0, 1 - math.floor(math.log10(spread)))
        if places > 6 or abs(shown) >= 1e6:
            return f"{shown:.4g} ± {spread:.2g}"
        return f"{shown:.{places}f} ± {spread:.{places}f}"

    def difference(self, value: float | None) -> str:
        """With its sign: ``+2.10``."""
        if value is None:
            return NONE
        text = f"{value * self.factor:{'+.2f' if self.percent else '+#.3g'}}"
        # What rounds to 0 has no sign.
        return text.replace("-", "−", 1) if float(text) else text.lstrip("+-")


PERCENT = Unit(100.0, "%", "points", percent=True)


def unit(metric: str, highest: float = 1.0) -> Unit:
    """Accuracies that stay within 0 and 1 are shown in percent, all else as it is."""
    return PERCENT if is_accuracy(metric) and highest <= 1.0 else Unit()


def p_value(p: float | None) -> str:
    """
    >>> p_value(0.0312), p_value(0.00001), p_value(None)
    ('0.031', '< 0.001', '–')
    """
    if p is None:
        return NONE
    if p < 0.001:
        return "< 0.001"
    if p < 0.1:
        return f"{p:.3f}"
    return f"{p:.2f}"


def size(count: float | None, of: str = "B") -> str:
    """
    >>> size(1234567), size(20), size(3.4e9, "")
    ('1.23 MB', '20 B', '3.4 G')
    """
    if count is None:
        return NONE
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.3g} {prefix}{of}"
    return f"{count:.0f} {of}".rstrip()


def seconds(value: float | None) -> str:
    """
    >>> seconds(0.1234), seconds(83.0), seconds(7300.0)
    ('0.123 s', '83.0 s', '2 h 02 min')
    """
    if value is None:
        return NONE
    if value < 10:
        return f"{value:.3g} s"
    if value < 600:
        return f"{value:.1f} s"
    minutes = round(value / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def times(ratio: float | None) -> str:
    """
    >>> times(1.5)
    '1.50 ×'
    """
    if ratio is None:
        return NONE
    return f"{ratio:.2f} ×"


SCORE_TITLES = {
    "tail": "last third of gradients",
    "last10": "mean of last 10",
    "smoothed": "smoothed, best of last 50",
    "last": "last round",
    "max": "highest round",
}
