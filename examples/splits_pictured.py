"""
Splits, pictured
================

How unlike each other clients are decides how hard a federated experiment is. Six ways of splitting
the same 1,438 digits over ten clients, each a partition that any data module takes.
"""

# %%
# Nothing is trained here. ``setup`` loads and splits; ``client_indices(i)`` says which samples
# client i has.
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from fl_lightning.datamodules import (
    IID,
    Digits,
    Dirichlet,
    Pathological,
    QuantitySkew,
    SortedShards,
)

partitions = {
    "IID()": IID(),
    "QuantitySkew(sigma=1)": QuantitySkew(sigma=1.0),
    "Dirichlet(alpha=1)": Dirichlet(alpha=1.0),
    "Dirichlet(alpha=0.1)": Dirichlet(alpha=0.1),
    "Pathological(classes=2)": Pathological(classes=2),
    "SortedShards()": SortedShards(),
}


def counts(partition):
    """Samples by client and class ``(10, 10)``."""
    data = Digits(num_clients=10, partition=partition, seed=0)
    data.setup("fit")
    labels = data.train_set.labels
    rows = [np.bincount(labels[data.client_indices(i)], minlength=10) for i in range(10)]
    return np.stack(rows)


# %%
# A bar is a client, a colour a class.
figure, panels = plt.subplots(2, 3, figsize=(9.5, 5), sharex=True, layout="constrained")
classes = {}
for axes, (name, partition) in zip(panels.flat, partitions.items(), strict=True):
    table = counts(partition)
    # The classes that hold nine tenths of a client's samples, in the mean over clients.
    ordered = np.sort(table, axis=1)[:, ::-1].cumsum(axis=1)
    classes[name] = float((ordered < 0.9 * table.sum(axis=1, keepdims=True)).sum(axis=1).mean() + 1)
    below = np.zeros(10)
    for digit in range(10):
        axes.bar(range(10), table[:, digit], bottom=below, color=f"C{digit}", label=str(digit))
        below += table[:, digit]
    axes.set_title(f"{name}\n90% lie in {classes[name]:.1f} classes", fontsize=10)
    axes.set_xticks(range(10))
    axes.set_ylim(0, 1.05 * below.max())
for axes in panels[:, 0]:
    axes.set_ylabel("samples")
for axes in panels[1]:
    axes.set_xlabel("client")
handles, names = panels[0, 0].get_legend_handles_labels()
figure.legend(handles, names, title="digit", loc="outside right center", fontsize=8)
folder = Path("runs/examples/splits_pictured")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "splits.png", dpi=150)

print(
    f"Nine tenths of a client's samples lie in {classes['IID()']:.1f} of ten classes under IID, "
    f"in {classes['Dirichlet(alpha=0.1)']:.1f} under Dirichlet(0.1) and in "
    f"{classes['Pathological(classes=2)']:.1f} under Pathological(2)."
)
