"""
Submodels (HeteroFL)
====================

Weak devices train narrow submodels of one network: a client of width 1/2 trains the first half of
each hidden layer's units. Coordinates outside of its submodel are 0 for it and are not sent. The
server averages each coordinate over the clients that trained it.

The method is HeteroFL (E. Diao, J. Ding, V. Tarokh: ICLR 2021, arXiv:2010.01264), without its
scaling and its masked cross-entropy. One hook of fl-lightning, ``trained``, is all that it takes.
"""

# %%
# The hook returns which coordinates each client trains: of a matrix its first rows and columns.
from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning import FederatedCallback, FederatedModule, MetricsCSV
from fl_lightning.callbacks import CommunicationLogger
from fl_lightning.datamodules import Digits, Dirichlet


class Submodels(FederatedCallback):
    """Client i trains a network of width ``widths[i % len(widths)]``."""

    untrained = "zero"
    averaged_over = "holders"

    def __init__(self, widths=(1.0, 0.5, 0.25), classes=10):
        super().__init__()
        self.widths, self.classes = widths, classes

    def trained(self, clients):
        masks = []
        for client in clients.client_ids:
            width = self.widths[client % len(self.widths)]
            parts = []
            for name, (_, shape) in clients.layout.items():
                kept = torch.ones(shape, dtype=torch.bool)
                if shape[0] != self.classes:  # a hidden layer's units
                    kept[int(width * shape[0]) :] = False
                if len(shape) == 2 and name != "net.0.weight":  # what the layer before gives
                    kept[:, int(width * shape[1]) :] = False
                parts.append(kept.flatten())
            masks.append(torch.cat(parts))
        return torch.stack(masks).to(clients.x.device)


# %%
# A network of two hidden layers, trained by clients of width 1, 1/2 and 1/4.
class MLP(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x.flatten(1)), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/acc", (self.net(x.flatten(1)).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


folder = Path("runs/examples/submodels")


def run(name, widths):
    """Accuracy after 20 rounds, and the megabytes sent."""
    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_epochs=20,
        accelerator="cpu",
        logger=MetricsCSV(folder / name),
        callbacks=[Submodels(widths), CommunicationLogger()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Digits(num_clients=9, partition=Dirichlet(1.0), batch_size=20)
    trainer.fit(FederatedModule(MLP(), participation="all", local_epochs=1), data)
    logged = trainer.callback_metrics
    return float(logged["val/acc"]), float(logged["communication/total_bytes"]) / 1e6


whole = run("whole", (1.0,))
narrow = run("narrow", (1.0, 0.5, 0.25))

# %%
# Two thirds of the clients compute and send a part of what the others do.
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained")
names = ["width 1", "1, 1/2, 1/4"]
left.bar(names, [whole[0], narrow[0]])
left.set_title("accuracy")
right.bar(names, [whole[1], narrow[1]])
right.set_title("MB sent")
figure.savefig(folder / "submodels.png", dpi=150)
print(
    f"Clients of widths 1, 1/2 and 1/4 reach an accuracy of {narrow[0]:.1%} with "
    f"{narrow[1]:.1f} MB sent; if all train the whole network it is {whole[0]:.1%} with "
    f"{whole[1]:.1f} MB."
)
