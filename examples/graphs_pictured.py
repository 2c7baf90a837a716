"""
Without a server: four graphs
=============================

Twelve clients mix their models with their neighbours on a graph. The more messages a graph has, the
closer the clients stay to their mean.
"""

# %%
# The learner is a usual one. Each client has few of the digits' classes.
from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn

from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.callbacks import Gossip
from fl_lightning.datamodules import Dirichlet
from fl_lightning.topologies import ExponentialGraph, FullyConnected, Ring, Torus


class Learner(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


x, y = load_digits(return_X_y=True)
samples = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)


# %%
# What a run logs in each round is kept by a callback of Lightning.
class Kept(pl.Callback):
    def __init__(self):
        self.rounds = []

    def on_train_epoch_end(self, trainer, module):
        self.rounds.append(float(trainer.callback_metrics["gossip/consensus"]))


found = {}
for topology in (Ring(), Torus(), ExponentialGraph(), FullyConnected()):
    kept = Kept()
    data = InMemoryDataModule(samples, partition=Dirichlet(0.3), num_clients=12, batch_size=20)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=30, callbacks=[Gossip(topology), kept], **quiet)
    trainer.fit(FederatedModule(Learner(), participation="all", local_epochs=2, seed=1), data)
    found[topology] = kept.rounds

# %%
# With all others as neighbours, every client has the mean itself, so the distance is 0.
for topology, rounds in found.items():
    plt.plot(range(1, len(rounds) + 1), rounds, label=str(topology))
plt.xlabel("round")
plt.ylabel("mean squared distance from w")
plt.legend()
folder = Path("runs/examples/graphs_pictured")
folder.mkdir(parents=True, exist_ok=True)
plt.savefig(folder / "consensus.png", dpi=120)
plt.show()

print(
    "After 30 rounds clients are this far from their mean: "
    + ", ".join(f"{topology} {rounds[-1]:.3f}" for topology, rounds in found.items())
)
