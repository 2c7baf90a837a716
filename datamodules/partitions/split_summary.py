"""A partition as hash, table, heat map and file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.partitions.client_tests import SplitTests
from fl_lightning.datamodules.partitions.partition import Indices, digest, positions
from fl_lightning.datamodules.partitions.split import Split
from fl_lightning.machine.escaping import plain
from fl_lightning.storage.atomic_files import written_aside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_IN_TABLE = 20
SHOWN_IN_FIGURE = 200
SHOWN_NAMES = 40
SHOWN_CLASSES = 10
# With more classes (whole numbers that are measurements, perhaps) tables would not fit in memory.
MOST_CLASSES_SHOWN = 10_000
WIDE_TITLE = 55
MANY_CLIENTS = 100_000  # with more clients, computing totals takes too long


def card(data: Any, split: Split) -> dict[str, str]:
    """Return the entries about the data for a run's card: title → text."""
    sizes = split.sizes
    spread = " to ".join(map(str, dict.fromkeys([sizes.min(), sizes.max()])))
    facts = {
        "data": data.name or type(data).__name__,
        "training samples": f"{sizes.sum()}",
        "clients": f"{data.num_clients} of {spread} samples",
        "partition": repr(data.partition) if split.by_partition else "given",
        "partition hash": data.partition_hash,
        "batch size": str(data._mine.batch_size or "the whole client"),
    }
    if data._pooled:
        facts["data"] += ", training and test data pooled"
    if data._mine.drop_last:
        facts["batch size"] += ", shorter ones dropped"
    if data.client_names:
        names = ", ".join(data.client_names[:SHOWN_IN_TABLE])
        facts["clients' names"] = f"{names}{', …' * (len(data.client_names) > SHOWN_IN_TABLE)}"
    if split.held_out is not None:
        facts["held out for validation"] = f"{len(split.held_out)} training samples"
    if split.test is not None:
        what, kind = split.test.described
        facts[what] = kind
    if data.biases:
        facts["biases"] = ", ".join(map(repr, data.biases))
    return facts


def class_counts(data: Any, limit: int) -> NDArray[np.int64] | None:
    """Return samples of the first ``limit`` clients ``(clients, classes)``; None without labels, or
    if there are too many classes to show.
    """
    classes = data._mine.num_classes
    if classes is None or data._train.labels is None or classes > MOST_CLASSES_SHOWN:
        return None
    clients = range(min(limit, data.num_clients))
    return np.stack([
        np.bincount(data._train.labels[data.client_indices(i)], minlength=classes) for i in clients
    ])  # fmt: skip


def partition_measures(data: Any) -> dict[str, float]:
    """Return measures of the split by name; measures of labels only if there are labels."""
    found: dict[str, float] = {}
    counts = class_counts(data, MANY_CLIENTS) if data.num_clients <= MANY_CLIENTS else None
    if counts is not None:
        found["total_variation"] = total_variation(counts)
        found["effective_classes"] = effective_classes(counts)
    found["gini"] = gini(data.client_sizes())
    return found


def measures_text(data: Any) -> str:
    """Return the measures in one line."""
    found = partition_measures(data)
    words = []
    if "total_variation" in found:
        words.append(f"mean total variation to the global labels: {found['total_variation']:.3f}")
        of = f"{found['effective_classes']:.2f} of {data._mine.num_classes}"
        words.append(f"effective number of classes: {of}")
    words.append(f"Gini of sizes: {found['gini']:.3f}")
    return ", ".join(words)


def partition_table(data: Any) -> str:
    sizes = data.client_sizes()
    counts = class_counts(data, SHOWN_IN_TABLE)
    every = class_counts(data, MANY_CLIENTS) if len(sizes) <= MANY_CLIENTS else None
    header = ["client", "samples"]
    rows = [[str(i), str(size)] for i, size in enumerate(sizes[:SHOWN_IN_TABLE])]
    if data.client_names:
        header.append("name")
        rows = [[*row, data.client_names[i]] for i, row in enumerate(rows)]
    if data.tests_clients:
        header.append("test")
        rows = [[*row, str(len(data.client_test_indices(i)))] for i, row in enumerate(rows)]
    if counts is not None and counts.shape[1] <= 20:
        names = list(data._mine.class_names)
        header += names if len(names) == counts.shape[1] else map(str, range(counts.shape[1]))
        for row, line in zip(rows, counts, strict=True):
            row += [str(k) if k else "·" for k in line]
        if every is not None:
            empty = [""] * (len(header) - 2 - every.shape[1])
            rows.append(["all", str(sizes.sum()), *empty, *map(str, every.sum(axis=0))])
    elif counts is not None:
        header += ["classes"]
        rows = [[*row, str((line > 0).sum())] for row, line in zip(rows, counts, strict=True)]
    table = [[*map(plain, row)] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(f"{cell:>{width}}" for cell, width in cells))
    if len(sizes) > SHOWN_IN_TABLE:
        more = f"… and {len(sizes) - SHOWN_IN_TABLE:,} more clients"
        lines.insert(1 + SHOWN_IN_TABLE, more)
    lines.append(measures_text(data))
    lines.append(
        f"{len(sizes):,} clients, {sizes.min()} to {sizes.max()} samples, hash "
        f"{data.partition_hash}"
    )
    return "\n".join(lines)


def partition_figure(data: Any) -> Figure:
    from matplotlib.figure import Figure

    clients = data.num_clients
    counts = class_counts(data, SHOWN_IN_FIGURE)
    has_classes = counts is not None
    if counts is None:
        counts = data.client_sizes()[:SHOWN_IN_FIGURE, None]
    height = min(12.0, 2.5 + 0.06 * len(counts))
    figure = Figure(figsize=(6, height))
    # Every run draws this picture, and computed margins (layout="constrained") take twice the time.
    grid = figure.add_gridspec(
        1,
        3,
        width_ratios=[20, 4, 1],
        left=0.14,
        right=0.87,
        bottom=0.5 / height,
        top=1 - 0.3 / height,
        wspace=0.06,
    )
    axes = figure.add_subplot(grid[0, 0])
    image = axes.imshow(counts, aspect="auto", interpolation="nearest", cmap="viridis")
    figure.colorbar(image, cax=figure.add_subplot(grid[0, 2]), label="samples")
    beside = figure.add_subplot(grid[0, 1], sharey=axes)
    beside.barh(np.arange(len(counts)), data.client_sizes()[: len(counts)], color="#2f7ed8")
    beside.tick_params(labelleft=False, labelsize="x-small")
    beside.set_xlabel("size", fontsize="small")
    _named(axes, data, len(counts))
    _classes_named(axes, data, counts.shape[1] if has_classes else 0)
    axes.set_ylabel("client")
    shown = f"{clients}"
    if len(counts) < clients:
        shown = f"first {len(counts)} of {clients:,}"
    facts = data.card()
    # A title with a fixed place is not moved away from the ticks, which would take a quarter of the
    # time.
    title = f"{facts['data']} · {facts['partition']} · {shown} clients"
    small = len(title) > WIDE_TITLE
    axes.set_title(title, fontsize="x-small" if small else "medium", y=1.0, loc="left")
    return figure


def _named(axes: Any, data: Any, shown: int) -> None:
    # A client's name may already be its domain, or its domain and a number.
    names = list(data.client_names or getattr(data, "client_domains", ()))[:shown]
    if names and shown <= SHOWN_NAMES:
        axes.set_yticks(range(shown), _short(names), fontsize="x-small", parse_math=False)


def _classes_named(axes: Any, data: Any, classes: int) -> None:
    axes.set_xlabel("class" if classes else "all samples")
    names = _short(getattr(data, "class_names", ()))
    if 0 < classes <= SHOWN_CLASSES and len(names) == classes:
        axes.set_xticks(range(classes), names, fontsize="x-small", parse_math=False)


def _short(names: Iterable[object]) -> list[str]:
    return [plain(str(name)[:12]) for name in names]


def save_partition(path: Path, split: Split, labels: Indices | None) -> None:
    """Write clients' indices to ``path``; a file of this name is always complete.

    ``labels`` ``(N,)``: labels of all training samples; None: they have none.
    """
    labels = np.zeros(split.total, np.int64) if labels is None else labels
    clients = split.clients
    kept = np.arange(split.total) if split.kept is None else split.kept
    arrays = [positions(clients[i]).astype(np.int64, copy=False) for i in range(len(clients))]
    content = {
        "ends": np.cumsum([len(a) for a in arrays]),
        "indices": np.concatenate(arrays),
        "labels": np.array(digest(labels[kept])),
        "kept": np.array(digest(kept)),
    }
    if isinstance(split.test, SplitTests):
        tests = [np.searchsorted(kept, test) for test in split.test.tests]
        content["test_ends"] = np.cumsum([len(test) for test in tests])
        content["test_indices"] = np.concatenate(tests)
    with written_aside(path) as file:
        np.savez_compressed(file, **content)  # type: ignore[arg-type]


def total_variation(counts: NDArray[np.int64]) -> float:
    """Return the mean over clients of the total variation distance between the client's class
    shares and those of all clients together; from 0 (all alike) to 1.

    Args:
        counts: samples by client and class ``(m, C)``.

    >>> total_variation(np.array([[5, 5], [10, 0]]))
    0.25
    """
    shares = counts / counts.sum(axis=1, keepdims=True)
    common = counts.sum(axis=0) / counts.sum()
    return float((np.abs(shares - common).sum(axis=1) / 2).mean())


def effective_classes(counts: NDArray[np.int64]) -> float:
    """Return the mean over clients of exp(entropy of the class shares): classes of equal share.

    >>> effective_classes(np.array([[5, 5], [10, 0]]))
    1.5
    """
    shares = counts / counts.sum(axis=1, keepdims=True)
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    return float(np.round(np.exp(-(shares * logs).sum(axis=1)).mean(), 12))


def gini(sizes: NDArray[np.int64]) -> float:
    """Return the Gini coefficient of sizes ``(m,)``: 0 if all are equal, near 1 if one has all.

    >>> gini(np.array([5, 5])), gini(np.array([0, 10]))
    (0.0, 0.5)
    """
    ordered = np.sort(sizes).astype(np.float64)
    m = len(ordered)
    ranks = np.arange(1, m + 1)
    return float(abs((2 * ranks - m - 1) @ ordered) / (m * ordered.sum()))
