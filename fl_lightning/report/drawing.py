"""What all figures share: colours, lines, and their files; without pyplot and its global state."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

INK, GRID = "#1f2430", "#d9dce3"  # on the page these two follow its light or dark theme
COLOURS = ("#2f7ed8", "#e4572e", "#2a9d5c", "#a35bd6", "#c98a00", "#17a2b8", "#d6457e", "#8a93a0")
DASHES = ("-", "--", ":", "-.")
VERDICT_COLOURS = {
    "reproduced": "#2a9d5c",
    "contradicted": "#d9363e",
    "not reproduced": "#8a93a0",
    "inconclusive": "#c98a00",
}
_SETTINGS: Any = {
    "font.size": 10, "axes.titlesize": 10.5, "axes.labelsize": 10, "legend.fontsize": 9.5, "xtick.labelsize": 9,
    "ytick.labelsize": 9, "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.color": INK,
    "ytick.color": INK, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.edgecolor": INK, "axes.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7,
    "axes.axisbelow": True, "axes.titlelocation": "left", "legend.frameon": False, "lines.linewidth": 1.8,
    "svg.fonttype": "none", "svg.hashsalt": "fl-lightning", "font.family": "sans-serif", "figure.facecolor": "white",
    "axes.facecolor": "none", "axes.formatter.useoffset": False, "legend.edgecolor": GRID,
    "text.parse_math": False,
}  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """A figure with its place on the page: ``group`` holds those that are looked at one instead of the other."""

    key: str
    title: str
    caption: str
    figure: Figure
    group: str = ""


Made = TypeVar("Made")


def styled(make: Callable[..., Made]) -> Callable[..., Made]:
    """Draw under the report's settings."""

    def drawn(*args: Any, **kwargs: Any) -> Made:
        with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
            # names in other scripts: a browser has them
            warnings.filterwarnings("ignore", "Glyph .* missing")
            return make(*args, **kwargs)

    return drawn


def figure(width: float, height: float) -> Figure:
    """A figure whose parts find their room."""
    return Figure(figsize=(width, height), layout="constrained")


def look(number: int) -> dict[str, Any]:
    """Colour and dashes of the arm with this number: 32 that can be told apart."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
    }


def plain(axes: Axes, grid: Literal["x", "y", "both", ""] = "y") -> None:
    """Grid lines along one axis only ("": none)."""
    axes.grid(False)
    if grid:
        axes.grid(True, axis=grid)
    axes.tick_params(length=3)


def logarithmic(axes: Axes) -> None:
    """A logarithmic y axis whose ticks are plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(
            FuncFormatter(lambda value, _: f"{value:.4g}" if 1e-4 < value < 1e5 else f"{value:.0e}")
        )
    axes.tick_params(which="minor", length=2)


def legend(drawn: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """One legend beside everything, or below where names are many or long."""
    if len(labels) > 12 or max(map(len, labels), default=0) > 28:
        columns = max(1, min(4, 110 // (6 + max(map(len, labels)))))
        drawn.set_figheight(drawn.get_figheight() + 0.2 * -(-len(labels) // columns))
        drawn.legend(handles, labels, loc="outside lower left", ncols=columns)
    else:
        drawn.legend(handles, labels, loc="outside right upper")


@styled
def png(drawn: Figure) -> bytes:
    """The figure as PNG."""
    file = io.BytesIO()
    FigureCanvasAgg(drawn)
    drawn.savefig(file, format="png", dpi=150)
    return file.getvalue()


@styled
def svg(drawn: Figure, transparent: bool = False) -> str:
    """The figure as SVG, the same bytes for the same figure."""
    file = io.BytesIO()
    FigureCanvasSVG(drawn)
    drawn.savefig(
        file, format="svg", metadata={"Date": None, "Creator": None}, transparent=transparent
    )
    return file.getvalue().decode()


def inline(drawn: Figure, key: str, label: str) -> str:
    """The figure as part of an HTML page: follows its theme, its own ids, named for who cannot see it."""
    text = svg(drawn, transparent=True)
    text = text[text.index("<svg") :]
    text = re.sub(
        r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL
    )
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{key}-", text)
    text = text.replace(INK, "currentColor").replace(GRID, "var(--line)")
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    size = re.search(r'<svg[^>]*?width="([\d.]+)pt"', text)
    width = f' style="max-width: {float(size[1]) * 4 / 3:.0f}px"' if size else ""
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"{width}', 1).strip()
