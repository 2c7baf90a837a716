"""
Attack and defence
==================

A fifth of the clients send the opposite of what they learned, tenfold. The mean of all updates
follows them; the median of each coordinate does not.
"""

# %%
# Attack and defence are callbacks, and a run takes both.
from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl

import fl_lightning
from fl_lightning import FederatedModule, MetricsCSV
from fl_lightning.callbacks import ByzantineClients, RobustAggregation
from fl_lightning.datamodules import Digits
from fl_lightning.models import MLP, Classifier

folder = Path("runs/examples/attack_and_defence")


def accuracy(name, *callbacks):
    """The test accuracy after each of 15 rounds."""
    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_epochs=15,
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=MetricsCSV(folder / name),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    learner = Classifier(MLP([64, 32, 10]), num_classes=10, lr=0.1)
    module = FederatedModule(learner, participation="all", local_epochs=2)
    trainer.fit(module, Digits(num_clients=10, batch_size=20))
    return fl_lightning.load(folder / name).metrics["val/acc"]


def attack():
    return ByzantineClients("sign_flip", fraction=0.2, scale=10.0)


# %%
# Three runs that differ in nothing else.
curves = {
    "nobody attacks": accuracy("peace"),
    "attack, mean": accuracy("attacked", attack()),
    "attack, median": accuracy("defended", attack(), RobustAggregation("median")),
}
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for (name, curve), style in zip(curves.items(), ("k--", "C3-o", "C0-o"), strict=True):
    axes.plot(range(1, 16), curve, style, ms=4, label=name)
axes.set(title="2 of 10 clients flip signs, tenfold", xlabel="round", ylabel="test accuracy")
axes.set_ylim(0, 1)
axes.legend(loc="center right")
axes.grid(alpha=0.3)
figure.savefig(folder / "accuracy.png", dpi=150)

peace, attacked, defended = (curve[-1] for curve in curves.values())
print(
    f"Under attack the mean ends at {attacked:.1%}, the median at {defended:.1%}; "
    f"without an attack the mean has {peace:.1%}."
)
