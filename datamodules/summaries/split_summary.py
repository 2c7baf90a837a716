"""A partition as hash, table, heat map and file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.batches.samples import Samples
from fl_lightning.datamodules.partitions.client_tests import SplitTests
from fl_lightning.datamodules.partitions.partition import Indices, Partition, digest, positions
from fl_lightning.datamodules.partitions.split import Split
from fl_lightning.datamodules.summaries.split_measures import (
    effective_classes,
    gini,
    total_variation,
)
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


class Partitioned(Protocol):
    """A data module whose training samples are split over clients."""

    name: str | None
    batch_size: int | None
    biases: tuple[Any, ...]
    class_names: Sequence[str]
    drop_last: Any
    partition: Partition
    client_names: Sequence[str]

    @property
    def tests_clients(self) -> bool: ...
    @property
    def num_clients(self) -> int: ...
    @property
    def num_classes(self) -> int | None: ...
    @property
    def partition_hash(self) -> str: ...
    @property
    def _mine(self) -> Any: ...
    @property
    def _train(self) -> Samples: ...
    def client_sizes(self) -> NDArray[np.int64]: ...
    def client_indices(self, client: int) -> Indices: ...
    def client_test_indices(self, client: int) -> Indices: ...
    def card(self) -> dict[str, str]: ...


def card(data: Partitioned, split: Split) -> dict[str, str]:
    """Return the entries about the data for a run's card: title → text."""
    sizes = split.sizes
    held = 0 if split.held_out is None else len(split.held_out)
    if sizes.min() == sizes.max():
        spread = f"{sizes.min()}"
    else:
        spread = f"{sizes.min()} to {sizes.max()}"
    facts = {
        "data": data.name or type(data).__name__,
        "training samples": f"{sizes.sum()}",
        "clients": f"{data.num_clients} of {spread} samples",
        "partition": repr(data.partition) if split.by_partition else "given",
        "partition hash": data.partition_hash,
        "batch size": "the whole client"
        if data._mine.batch_size is None
        else str(data._mine.batch_size),
    }
    if getattr(data, "_pooled", False):
        facts["data"] += ", training and test data pooled"
    if data._mine.drop_last:
        facts["batch size"] += ", shorter ones dropped"
    if data.client_names:
        names = ", ".join(data.client_names[:SHOWN_IN_TABLE])
        facts["clients' names"] = f"{names}{', …' * (len(data.client_names) > SHOWN_IN_TABLE)}"
    if held:
        facts["held out for validation"] = f"{held} training samples"
    if split.test is not None:
        what, kind = split.test.described
        facts[what] = kind
    if data.biases:
        facts["biases"] = ", ".join(map(repr, data.biases))
    return facts


def class_counts(data: Partitioned, limit: int) -> NDArray[np.int64] | None:
    """Return samples of the first ``limit`` clients ``(clients, classes)``; None without labels, or
    if there are too many classes to show.
    """
    classes = data._mine.num_classes
    labels = data._train.labels
    if classes is None or labels is None or classes > MOST_CLASSES_SHOWN:
        return None
    shown = range(min(limit, data.num_clients))
    return np.stack([np.bincount(labels[data.client_indices(i)], minlength=classes) for i in shown])


def class_totals(data: Partitioned, clients: int = MANY_CLIENTS) -> NDArray[np.int64] | None:
    """Return samples of all clients by class ``(classes,)``; None without labels, with too many
    classes to show, or if there are more than ``clients`` clients.
    """
    classes = data._mine.num_classes
    labels = data._train.labels
    if classes is None or labels is None or data.num_clients > clients:
        return None
    if classes > MOST_CLASSES_SHOWN:
        return None
    totals = np.zeros(classes, np.int64)
    for i in range(data.num_clients):
        totals += np.bincount(labels[data.client_indices(i)], minlength=classes)
    return totals


def deviation_text(totals: NDArray[np.int64]) -> str:
    """Return the spread of classes' totals, which grows by sampling with replacement."""
    deviation = float(totals.std(ddof=1)) if len(totals) > 1 else 0.0
    share = f" ({100 * deviation / totals.mean():.0f} %)" if totals.any() else ""
    there = int((totals > 0).sum())
    some = f"{there} of {len(totals)} classes occur; " if there < len(totals) else ""
    return (
        f"{some}samples of a class: {totals.min():,} to {totals.max():,}, "
        f"standard deviation {deviation:,.1f}{share}"
    )


def partition_measures(data: Partitioned) -> dict[str, float]:
    """Return measures of the split by name; measures of labels only if there are labels."""
    found: dict[str, float] = {}
    counts = class_counts(data, MANY_CLIENTS) if data.num_clients <= MANY_CLIENTS else None
    if counts is not None:
        found["total_variation"] = total_variation(counts)
        found["effective_classes"] = effective_classes(counts)
    found["gini"] = gini(data.client_sizes())
    return found


def measures_text(data: Partitioned, short: bool = False) -> str:
    """Return the measures in one line."""
    found = partition_measures(data)
    words = []
    if short and "total_variation" in found:
        classes = found["effective_classes"]
        words = [f"total variation {found['total_variation']:.2f}", f"{classes:.1f} classes each"]
    elif "total_variation" in found:
        words.append(f"mean total variation to the global labels: {found['total_variation']:.3f}")
        of = f"{found['effective_classes']:.2f} of {data._mine.num_classes}"
        words.append(f"effective number of classes: {of}")
    words.append(f"Gini of sizes: {found['gini']:.3f}")
    return ", ".join(words)


def partition_table(data: Partitioned) -> str:
    sizes = data.client_sizes()
    counts = class_counts(data, SHOWN_IN_TABLE)
    totals = class_totals(data)
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
        if totals is not None:
            empty = [""] * (len(header) - 2 - len(totals))
            rows.append(["all", str(sizes.sum()), *empty, *map(str, totals)])
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
    if totals is not None:
        lines.append(deviation_text(totals))
    lines.append(measures_text(data))
    lines.append(
        f"{len(sizes):,} clients, {sizes.min()} to {sizes.max()} samples, hash "
        f"{data.partition_hash}"
    )
    return "\n".join(lines)


def partition_figure(data: Partitioned) -> Figure:
    from matplotlib.figure import Figure

    clients = data.num_clients
    counts = class_counts(data, SHOWN_IN_FIGURE)
    has_classes = counts is not None
    if counts is None:
        counts = data.client_sizes()[:SHOWN_IN_FIGURE, None]
    totals = class_totals(data, 1000)
    height = min(12.0, 2.5 + 0.06 * len(counts))
    whole = height if totals is None else height + 1
    figure = Figure(figsize=(6, whole))
    ratios = [height - 0.8] if totals is None else [1, height - 0.8]
    # Every run draws this picture, and computed margins (layout="constrained") take twice the time.
    grid = figure.add_gridspec(
        len(ratios),
        3,
        height_ratios=ratios,
        width_ratios=[20, 4, 1],
        left=0.14,
        right=0.87,
        bottom=0.5 / whole,
        top=1 - 0.3 / whole,
        wspace=0.06,
        hspace=0.7 / (sum(ratios) / len(ratios)),
    )
    axes = figure.add_subplot(grid[-1, 0])
    image = axes.imshow(counts, aspect="auto", interpolation="nearest", cmap="viridis")
    figure.colorbar(image, cax=figure.add_subplot(grid[-1, 2]), label="samples")
    beside = figure.add_subplot(grid[-1, 1], sharey=axes)
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
    if totals is not None:
        above = figure.add_subplot(grid[0, 0], sharex=axes)
        above.bar(np.arange(len(totals)), totals, color="#2f7ed8")
        told = f"{measures_text(data, short=True)}\n{deviation_text(totals)}"
        above.set_title(told, fontsize="x-small", y=1.0, loc="left")
        above.set_ylabel("all clients")
        above.tick_params(labelbottom=False)
    return figure


def _named(axes: Any, data: Partitioned, shown: int) -> None:
    """Write the clients' names next to the picture, if they have names and these are readable."""
    names = list(data.client_names[:shown])
    domains = list(getattr(data, "client_domains", ()))[:shown]
    # A client's name may already be its domain, or its domain and a number.
    if domains and not names:
        names = domains
    if not names and shown <= SHOWN_NAMES:
        axes.set_yticks(range(0, shown, 1 + shown // 20))
    elif shown <= SHOWN_NAMES:
        axes.set_yticks(range(shown), _short(names), fontsize="x-small", parse_math=False)


def _classes_named(axes: Any, data: Partitioned, classes: int) -> None:
    """Write the classes below the picture: their names, or numbers where these are too many."""
    axes.set_xlabel("class" if classes else "all samples")
    names = _short(getattr(data, "class_names", ()))
    if 0 < classes <= SHOWN_CLASSES and len(names) == classes:
        axes.set_xticks(range(classes), names, fontsize="x-small", parse_math=False)
    else:
        axes.set_xticks(range(0, classes, 1 + classes // 20))


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
