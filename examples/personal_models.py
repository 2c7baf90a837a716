"""
Personal models
===============

Where clients differ much, one model for all serves some of them badly. FedPer shares the body of
the network and leaves each client a last layer of its own. Both are measured client by client, on
samples that each client holds out.
"""

# %%
# ``client_test_fraction`` has each client keep a quarter of its samples to be tested on, and
# ``PerClientEvaluation`` tests the model that the client would use itself.
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytorch_lightning as pl

from fl_lightning import FederatedModule
from fl_lightning.callbacks import PartialAveraging, PerClientEvaluation
from fl_lightning.datamodules import Digits, Dirichlet
from fl_lightning.models import MLP, Classifier


def accuracies(*method):
    """The accuracy of each client's model on the client's own test samples, ascending."""
    pl.seed_everything(0)
    by_client = PerClientEvaluation()
    trainer = pl.Trainer(
        max_epochs=15,
        accelerator="cpu",
        callbacks=[by_client, *method],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Digits(
        num_clients=20, partition=Dirichlet(alpha=0.1), batch_size=10, client_test_fraction=0.25
    )
    learner = Classifier(MLP([64, 32, 10]), num_classes=10, lr=0.1)
    trainer.fit(FederatedModule(learner, participation=0.5, local_epochs=2), data)
    return np.sort(list(by_client.table["acc"].values()))


# %%
# FedPer is FedAvg whose last layer is never averaged.
one_for_all = accuracies()
personal = accuracies(PartialAveraging(periods={"last": "never"}))

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
clients = np.arange(1, 21)
axes.plot(clients, one_for_all, "o-", label=f"one model for all: mean {one_for_all.mean():.1%}")
axes.plot(clients, personal, "s-", label=f"last layer of one's own: mean {personal.mean():.1%}")
axes.set(title="How well each client is served", ylabel="accuracy on own test samples")
axes.set_xlabel("clients, from the worst served to the best")
axes.set_xticks(range(2, 21, 2))
axes.legend()
axes.grid(alpha=0.3)
folder = Path("runs/examples/personal_models")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "clients.png", dpi=150)

print(
    f"With a last layer of their own clients are right on {personal.mean():.1%} of their test "
    f"samples, with one model for all on {one_for_all.mean():.1%}; the five worst served on "
    f"{personal[:5].mean():.1%} and {one_for_all[:5].mean():.1%}."
)
