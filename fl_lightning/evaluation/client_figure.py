"""A picture of how well each client is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def draw_clients(
    file: Any, name: str, values: Mapping[int, float], tuned: Mapping[int, float]
) -> None:
    """Draw the clients' values of a metric in ascending order, before and after fine-tuning, as
    PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for column, label in ((values, "as it is"), (tuned, "after fine-tuning")):
        ordered = sorted(column.values())
        if ordered:
            share = [100 * (j + 0.5) / len(ordered) for j in range(len(ordered))]
            axes.step(
                share,
                ordered,
                where="mid",
                label=f"{label}, mean {sum(ordered) / len(ordered):.4g}",
            )
    axes.set_xlabel(f"{len(values)} clients in the order of their values, %")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.print_png(file)
