"""A partition as an artefact: hash, table, heat map and file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.partitions import Indices, LazyClients, digest
from fl_lightning.storage.files import written_aside

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fl_lightning.datamodules.base import FederatedDataModule

HASHED_BY_CONTENT = 10_000_000  # more indices than this are not drawn for a hash
SHOWN_IN_TABLE, SHOWN_IN_FIGURE = 20, 200


def partition_hash(clients: Sequence[Indices], kept: Indices | None) -> str:
    """A hash of all indices, or of the recipe where there are very many lazy ones."""
    state = hashlib.sha256(b"" if kept is None else kept.tobytes())
    if isinstance(clients, LazyClients) and int(clients.sizes.sum()) > HASHED_BY_CONTENT:
        state.update(clients.recipe.encode())
    else:
        for indices in clients:
            array = np.asarray(indices, np.int64)
            state.update(len(array).to_bytes(8, "little"))
            state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()[:16]


def class_counts(data: FederatedDataModule, limit: int) -> NDArray[np.int64] | None:
    """Samples of the first ``limit`` clients by class ``(clients, classes)``; None without labels."""
    classes, train = data.num_classes, data.train_set
    if classes is None or train is None or train.labels is None:
        return None
    labels = train.labels
    shown = range(min(limit, data.num_clients))
    return np.stack([np.bincount(labels[data.client_indices(i)], minlength=classes) for i in shown])


def partition_table(data: FederatedDataModule) -> str:
    sizes, counts = data.client_sizes(), class_counts(data, SHOWN_IN_TABLE)
    header = ["client", "samples"]
    rows = [[str(i), str(size)] for i, size in enumerate(sizes[:SHOWN_IN_TABLE])]
    if counts is not None and counts.shape[1] <= 20:
        header += [str(c) for c in range(counts.shape[1])]
        rows = [row + [str(k) if k else "·" for k in line] for row, line in zip(rows, counts, strict=True)]
    elif counts is not None:
        header += ["classes"]
        rows = [[*row, str((line > 0).sum())] for row, line in zip(rows, counts, strict=True)]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in [header, *rows]
    ]
    if len(sizes) > SHOWN_IN_TABLE:
        lines.append(f"… and {len(sizes) - SHOWN_IN_TABLE:,} more clients")
    lines.append(f"{len(sizes):,} clients, {sizes.min()} to {sizes.max()} samples, hash {data.partition_hash}")
    return "\n".join(lines)


def partition_figure(data: FederatedDataModule) -> Figure:
    from matplotlib.figure import Figure

    clients = data.num_clients
    counts = class_counts(data, SHOWN_IN_FIGURE)
    has_classes = counts is not None
    if counts is None:
        counts = data.client_sizes()[:SHOWN_IN_FIGURE, None]
    figure = Figure(figsize=(6, min(12.0, 2.5 + 0.06 * len(counts))), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(counts, aspect="auto", interpolation="nearest", cmap="viridis")
    figure.colorbar(image, ax=axes, label="samples")
    axes.set_xlabel("class" if has_classes else "all samples")
    axes.set_ylabel("client")
    shown = f"first {len(counts)} of {clients:,}" if len(counts) < clients else f"{clients}"
    facts = data.card()
    axes.set_title(f"{facts['data']} · {facts['partition']} · {shown} clients", fontsize="medium")
    return figure


def save_partition(path: Path, clients: Sequence[Indices], labels: Indices) -> None:
    """Write clients' indices to ``path``, aside and renamed, so that a file of this name is always whole."""
    arrays = [np.asarray(indices, np.int64) for indices in clients]
    with written_aside(path) as file:
        np.savez_compressed(
            file,
            ends=np.cumsum([len(a) for a in arrays]),
            indices=np.concatenate(arrays),
            labels=np.array(digest(labels)),
        )
