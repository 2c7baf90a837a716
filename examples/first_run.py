"""
A first run
===========

Ten clients hold images of digits, each mostly of a few classes. FedAvg trains one network for all
of them: in a round five clients train it on their own images, and the server averages what comes
back.
"""

# %%
# The images come with scikit-learn. A Dirichlet split gives each client a share of each class; the
# smaller ``alpha``, the more clients differ.
from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl

import fl_lightning
from fl_lightning import FederatedModule, MetricsCSV
from fl_lightning.datamodules import Digits, Dirichlet
from fl_lightning.models import MLP, Classifier

pl.seed_everything(0)
folder = Path("runs/examples/first_run")
data = Digits(num_clients=10, partition=Dirichlet(alpha=0.3), batch_size=20)

# %%
# ``FederatedModule`` wraps any LightningModule. One ``fit`` is one run, and one epoch is one round.
learner = Classifier(MLP([64, 32, 10]), num_classes=10, lr=0.1)
module = FederatedModule(learner, participation=0.5, local_epochs=2)
trainer = pl.Trainer(
    max_epochs=20,
    accelerator="cpu",
    logger=MetricsCSV(folder),
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, data)

# %%
# ``val/acc`` is the accuracy of the server's network on 360 images that no client has.
accuracy = fl_lightning.load(folder).metrics["val/acc"]
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
axes.plot(range(1, 21), accuracy, marker="o")
axes.set(title="FedAvg on the digits, ten clients", xlabel="round", ylabel="test accuracy")
axes.set_xticks(range(0, 21, 5))
axes.grid(alpha=0.3)
figure.savefig(folder / "accuracy.png", dpi=150)

print(
    f"The network is right on {accuracy[0]:.1%} of the test images after the first round, and on "
    f"{accuracy[-1]:.1%} after 20 rounds with 5 of 10 clients each."
)
