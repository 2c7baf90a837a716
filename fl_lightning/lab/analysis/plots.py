"""The pictures of ``analyse``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fl_lightning.evaluation.curvature import Curvature
from fl_lightning.lab.analysis.landscape import Grid, Landscape
from fl_lightning.lab.analysis.opened import Opened
from fl_lightning.lab.report.drawing import COLOURS, figure, plain, saved, styled

COLOURMAP = "viridis"


@styled
def along_eigenvector(
    run: Opened, found: Curvature, steps: Sequence[float], losses: Sequence[float], loss: float
) -> bytes:
    """Draw the loss along the first eigenvector, and its parabola."""
    drawn = figure(6.4, 4.2)
    axes = drawn.add_subplot()
    s = np.array(steps)
    values = np.array(losses)
    # The parabola has the slope of the curve at the middle, estimated from five points.
    middle = slice(18, 23)
    slope = 0.0
    if np.isfinite(values[middle]).all():
        slope = np.polyfit(s[middle], values[middle], 2)[1]
    axes.plot(s, values, color=COLOURS[0], label="loss at w + s v")
    parabola = loss + slope * s + found.top_eigenvalue * s**2 / 2
    axes.plot(s, parabola, "--", color=COLOURS[7], label="parabola with slope and λ at w")
    axes.plot([0], [loss], "o", color=COLOURS[1], label="the model, w")
    axes.set_xlabel("step s along the first eigenvector v of the Hessian (‖v‖ = 1)")
    axes.set_ylabel("loss")
    finite = values[np.isfinite(values)]
    if len(finite):
        spread = max(finite.max() - finite.min(), 1e-9)
        axes.set_ylim(finite.min() - 0.15 * spread, finite.max() + 0.15 * spread)
    axes.set_title(
        f"{run.folder.resolve().name}: λ = {found.top_eigenvalue:.4g}, "
        f"trace {found.trace:.4g} ± {found.trace_stderr:.2g}, ‖w‖ = {found.norm:.4g}"
    )
    plain(axes)
    axes.legend()
    return saved(drawn, "png")


@styled
def landscapes(found: Sequence[Landscape]) -> bytes:
    """Draw each run's surface above its contours, with one scale of losses."""
    n = len(found)
    drawn = figure(5.0 * n + 0.6, 8.4)
    # All runs share one scale: otherwise a flat and a steep landscape would look the same.
    lowest, highest = _limits([one.losses for one in found])
    levels = _levels(lowest, highest)
    colours: dict[str, Any] = {"cmap": COLOURMAP, "vmin": lowest, "vmax": highest}
    image = None
    for k, one in enumerate(found):
        a, b = np.meshgrid(one.steps, one.steps, indexing="ij")
        shown = np.clip(np.nan_to_num(one.losses, nan=highest, posinf=highest), lowest, highest)
        surface = drawn.add_subplot(2, n, k + 1, projection="3d")
        mesh: dict[str, Any] = {"rstride": 1, "cstride": 1, "linewidth": 0.15}
        surface.plot_surface(a, b, shown, edgecolor="#ffffff60", **mesh, **colours)
        surface.set_zlim(lowest, highest)
        surface.view_init(elev=32, azim=-55)
        surface.set_zlabel("loss")
        name = one.run.folder.resolve().name
        surface.set_title(f"{name}\nloss {one.loss:.4g} after {one.run.rounds} rounds")
        flat = drawn.add_subplot(2, n, n + k + 1)
        image = flat.contourf(a, b, shown, levels=levels, cmap=COLOURMAP, extend="max")
        lines = flat.contour(a, b, shown, levels=levels[1::2], colors="white", linewidths=0.6)
        flat.clabel(lines, fontsize=7, fmt="%.3g")
        flat.plot([0], [0], "+", color="white", markersize=11, markeredgewidth=2)
        flat.set_aspect("equal")
        flat.set_xlabel("step along the first direction")
        plain(flat, "")
        for axes in (surface, flat):
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.yaxis.set_major_locator(MaxNLocator(5))
        if k == 0:
            flat.set_ylabel("step along the second direction")
    if image is not None:
        drawn.colorbar(image, ax=drawn.axes[1::2], label="loss", shrink=0.9, format="%.2g")
    return saved(drawn, "png")


def _limits(losses: Sequence[Grid]) -> tuple[float, float]:
    """Return the lowest loss, and the highest loss that is shown.

    If higher losses were shown, the farthest corners would hide everything else.
    """
    every = np.concatenate([grid[np.isfinite(grid)] for grid in losses] or [np.zeros(1)])
    if not len(every):
        every = np.zeros(1)
    lowest = float(every.min())
    highest = float(np.quantile(every, 0.95))
    return lowest, max(highest, lowest + 1e-9)


def _levels(lowest: float, highest: float) -> NDArray[np.float64]:
    """Return levels that are denser at low losses."""
    return lowest + (highest - lowest) * np.linspace(0, 1, 17) ** 1.6
