"""
Your own method
===============

A method is a callback that reads like its algorithm. This one is adaptive clipping (Andrew et al.,
2021): updates longer than a bound are shortened to it, and the bound moves until half of the
clients stay below it. How long updates are need not be known beforehand.
"""

# %%
# State is declared: ``bound``, one number at the server, and ``below``, one number that each client
# sends. Both are checkpointed, resumed and counted as communication without further help.
# A client's numbers are rows: ``update`` is ``(n, D)`` for n clients that train together.
from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl

import fl_lightning
from fl_lightning import (
    Coefficient,
    FederatedCallback,
    FederatedModule,
    MetricsCSV,
    ServerState,
    Upload,
)
from fl_lightning.datamodules import Digits, Dirichlet
from fl_lightning.models import MLP, Classifier


class AdaptiveClipping(FederatedCallback):
    """u_i <- u_i min(1, C / |u_i|), and C <- C exp(-rate (share of |u_i| <= C - target))."""

    rate = Coefficient(above=0)
    bound = ServerState(shape=(), initial=lambda w: 10.0, sent=True)
    below = Upload(shape=())

    def __init__(self, target=0.5, rate=0.5):
        super().__init__()
        self.target = target
        self.rate = rate

    def transmit(self, clients, update):
        norm = clients.norm(update)
        self.below[clients] = (norm <= self.bound).float()[:, 0]
        clients.log("clipping/norm", norm[:, 0])
        return update * (self.bound / norm).clamp(max=1)

    def on_round_end(self, server):
        share = self.below.mean()
        server.log("clipping/bound", self.bound)
        server.log("clipping/below", share)
        self.bound = self.bound * (-self.rate * (share - self.target)).exp()


# %%
# It is given to the Trainer like any other callback.
pl.seed_everything(0)
folder = Path("runs/examples/own_method")
learner = Classifier(MLP([64, 32, 10]), num_classes=10, lr=0.1)
trainer = pl.Trainer(
    max_epochs=30,
    accelerator="cpu",
    callbacks=[AdaptiveClipping(target=0.5)],
    logger=MetricsCSV(folder),
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
data = Digits(num_clients=20, partition=Dirichlet(alpha=0.3), batch_size=20)
trainer.fit(FederatedModule(learner, participation="all", local_epochs=1), data)

# %%
# The bound falls to the middle of the clients' norms, and follows it.
metrics = fl_lightning.load(folder).metrics
rounds = range(1, 31)
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.plot(rounds, metrics["clipping/bound"], label="bound $C$")
axes.plot(rounds, metrics["clipping/norm"], "--", label="mean of the clients' $|u_i|$")
axes.set(title="The bound finds the clients' median", xlabel="round", ylabel="norm", yscale="log")
axes.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["0.25", "0.5", "1", "2", "4", "8"])
axes.minorticks_off()
axes.legend()
axes.grid(alpha=0.3)
figure.savefig(folder / "bound.png", dpi=150)

below = sum(metrics["clipping/below"][-15:]) / 15
print(
    f"From 10 the bound came to {metrics['clipping/bound'][-1]:.2f}; in the last 15 rounds "
    f"{below:.0%} of the updates were below it, of 50% wanted."
)
