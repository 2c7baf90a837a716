"""The common part of all figures: styles, lines, and their files; without pyplot and its global
state.
"""

from __future__ import annotations

import base64
import html
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

INK = "#1f2430"
GRID = "#d9dce3"
COLOURS = ("#2f7ed8", "#e4572e", "#2a9d5c", "#a35bd6", "#c98a00", "#17a2b8", "#d6457e", "#8a93a0")
DASHES = ("-", "--", ":", "-.")
VERDICT_COLOURS = {
    "reproduced": "#2a9d5c",
    "contradicted": "#d9363e",
    "not reproduced": "#8a93a0",
    "inconclusive": "#c98a00",
}
_SETTINGS: Any = {
    "text.parse_math": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    # Keep text as text, and give the same figure the same bytes.
    "svg.fonttype": "none",
    "svg.hashsalt": "fl-lightning",
    # Journals ask for fonts that can be edited.
    "pdf.fonttype": 42,
}


@dataclass(frozen=True)
class Style:
    """How figures look: on a page, or in a column of a paper.

    ``markers``: markers of arms, in addition to colours and dashes; none on a page, which has
    colours. ``width``, ``text_width``: widths of a figure in one column and of a wide one, in
    inches; None: each figure's own. ``scale``: factor of heights and fonts.
    """

    colours: tuple[str, ...]
    dashes: tuple[Any, ...]
    markers: str = ""
    width: float | None = None
    text_width: float | None = None
    scale: float = 1.0
    dpi: int = 150
    settings: Mapping[str, Any] = field(default_factory=dict)

    def look(self, number: int) -> dict[str, Any]:
        """Return the style of the arm with this number: 32 styles differ, 8 of them without
        colour.
        """
        turn = number // len(self.colours)
        look: dict[str, Any] = {"color": self.colours[number % len(self.colours)]}
        if not self.markers:
            return {**look, "linestyle": self.dashes[turn % len(self.dashes)]}
        look["linestyle"] = self.dashes[number % len(self.dashes)]
        marker = self.markers[(number + turn) % len(self.markers)]
        return {**look, "marker": marker, "markersize": 3.5, "linewidth": 1.0}


STYLES = {
    "page": Style(COLOURS, DASHES),
    # Colours of Okabe and Ito, in an order in which their greys differ; dashes and markers show the
    # same.
    "paper": Style(
        ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777"),
        ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)), (0, (7, 2))),
        markers="osD^vXP*",
        width=3.4,
        text_width=6.9,
        scale=0.75,
        dpi=300,
        settings={
            "font.size": 8,
            "axes.labelsize": 8,
            "axes.titlesize": 8,
            "axes.linewidth": 0.6,
            "grid.linewidth": 0.4,
            "legend.fontsize": 7,
            "legend.handlelength": 2.6,
            "xtick.labelsize": 7,
            "ytick.labelsize": 7,
        },
    ),
}
_style: ContextVar[Style] = ContextVar("style", default=STYLES["page"])


def style() -> Style:
    """Return the drawing style that is set now."""
    return _style.get()


@contextmanager
def in_style(name: str) -> Iterator[None]:
    """Draw in this style."""
    token = _style.set(STYLES[name])
    try:
        yield
    finally:
        _style.reset(token)


@dataclass(frozen=True)
class Drawing:
    """A figure; a page shows one at a time of those whose keys begin with the same word."""

    key: str
    title: str
    caption: str
    figure: Figure


Made = TypeVar("Made")


def styled(make: Callable[..., Made]) -> Callable[..., Made]:
    """Draw with the report's settings."""

    def drawn(*args: Any, **kwargs: Any) -> Made:
        settings = {**_SETTINGS, **style().settings}
        with matplotlib.rc_context(settings), warnings.catch_warnings():
            # A name may use a script that the font lacks, but that a browser has.
            warnings.filterwarnings("ignore", "Glyph .* missing")
            return make(*args, **kwargs)

    return drawn


def figure(width: float, height: float, wide: bool = False) -> Figure:
    """Make a figure that lays out its parts; ``wide``: over both columns of a paper."""
    drawn_in = style()
    fixed = drawn_in.text_width if wide else drawn_in.width
    size = (fixed or width, height * drawn_in.scale)
    return Figure(figsize=size, layout="constrained")


def points(size: float) -> float:
    """Return the size of a font that has this size on a page."""
    return size * (0.8 if style().markers else 1.0)


def whole_rounds(axes: Axes) -> None:
    """Leave ticks only at whole numbers, because there is no half of a round."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def plain(axes: Axes, grid: Literal["x", "y", "both", ""] = "y") -> None:
    """Leave grid lines along only one axis ("": no lines)."""
    axes.grid(False)
    if grid:
        axes.grid(True, axis=grid)
    axes.tick_params(length=3)


def logarithmic(axes: Axes, along: Literal["x", "y"] = "y") -> None:
    """Make an axis logarithmic, with plain numbers at its ticks."""
    axis = axes.yaxis if along == "y" else axes.xaxis

    def number(value: float, _: Any) -> str:
        return f"{value:.4g}" if 1e-4 < value < 1e5 else f"{value:.0e}"

    def between(value: float, place: Any) -> str:
        low, high = sorted(axis.get_view_interval())
        # Labels over more than two powers of ten would overlap.
        return number(value, place) if high <= 100 * low else ""

    axes.set(**{f"{along}scale": "log"})
    axis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(number))
    axis.set_minor_formatter(FuncFormatter(between))
    axes.tick_params(which="minor", length=2)


def legend(drawn: Figure, handles: Mapping[str, Any]) -> None:
    """Draw one legend of lines by name next to the axes, or below them if names are many or
    long.
    """
    longest = max(map(len, handles), default=0)
    place: dict[str, Any] = {"loc": "outside right upper"}
    # With many or long names, a legend beside the axes would leave no room for the curves.
    if len(handles) > 12 or longest > 28 or style().width:
        letters = 110 if not style().width else int(drawn.get_figwidth() * 17)
        columns = max(1, min(4, letters // (6 + longest)))
        lines = -(-len(handles) // columns)
        drawn.set_figheight(drawn.get_figheight() + 0.2 * points(1) * lines)
        place = {"loc": "outside lower left", "ncols": columns}
    drawn.legend(list(handles.values()), list(handles), **place)


def beside(axes: Axes, handles: Mapping[str, Any]) -> None:
    """Draw a legend of lines by name next to axes that share their figure with others."""
    axes.legend(
        list(handles.values()),
        list(handles),
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        fontsize=points(8),
        labelspacing=0.3,
    )


FORMATS = ("png", "svg", "pdf")
# A date in the file would give the same figure other bytes.
_METADATA: dict[str, Any] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


@styled
def saved(drawn: Figure, form: str) -> bytes:
    """Return the figure in one of the formats; the same figure gives the same bytes."""
    # Lay out the figure's parts once, and not again for each format.
    if drawn.get_layout_engine() is not None:
        drawn.draw_without_rendering()
        drawn.set_layout_engine(None)
    file = io.BytesIO()
    dpi: Any = style().dpi if form == "png" else "figure"
    metadata = _METADATA.get(form)
    drawn.savefig(file, format=form, dpi=dpi, metadata=metadata)
    return file.getvalue()


def inline(drawing: Drawing) -> str:
    """Return the figure as part of an HTML page, with a label for readers who cannot see it."""
    data = base64.b64encode(saved(drawing.figure, "svg")).decode()
    # The figure is as wide as the page allows, up to its own width (in px of 1/96 inch).
    width = f"max-width: {drawing.figure.get_figwidth() * 96:.0f}px"
    label = html.escape(drawing.title)
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{label}" style="{width}">'
