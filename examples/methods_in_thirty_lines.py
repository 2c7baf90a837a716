"""
A paper's method in thirty lines
================================

A method is a file of its own that reads like the paper. FedGMT, which is not packaged, is written
out here. It has one model for all clients. FedBABU, APFL and FedProto, which give each client a
model of its own, are packaged as ``FixedHead``, ``MixedPersonalModel`` and ``PrototypePull``, and
run beside it.
"""

# %%
# The data are the digits on 20 clients, and each holds out a quarter of its samples to be tested
# on.
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytorch_lightning as pl
from torch.nn.functional import kl_div, log_softmax

from fl_lightning import (
    ClientState,
    Coefficient,
    FederatedCallback,
    FederatedModule,
    ServerState,
)
from fl_lightning.callbacks import (
    FixedHead,
    MixedPersonalModel,
    PerClientEvaluation,
    PrototypePull,
)
from fl_lightning.datamodules import Digits, Dirichlet
from fl_lightning.models import MLP, ImageClassifier

# %%
# FedGMT (Li et al., ICML 2025): the server sends an average of all its models beside the latest,
# and clients distil from it. Their duals are FedDyn's, without its pull to w.


class FedGMT(FederatedCallback):
    """grad(CE + strength T^2 KL(e || x)) - dual; w = mean(x - dual/a); e <- b e + (1 - b) w."""

    taps = {"logits": "last"}
    strength = Coefficient()
    e = ServerState(initial="initial_model", sent=True)
    dual = ClientState()

    def __init__(self, strength=1.0, temperature=3.0, average=0.95, penalty=0.1):
        super().__init__()
        self.strength = strength
        self.temperature = temperature
        self.average = average
        self.penalty = penalty

    def local_loss(self, clients, loss, seen, batch):
        teacher = log_softmax(clients.seen_at(self.e)["logits"] / self.temperature, 1)
        student = log_softmax(seen["logits"] / self.temperature, 1)
        apart = kl_div(student, teacher, log_target=True, reduction="batchmean")
        return loss + self.strength * self.temperature**2 * apart

    def on_local_gradient(self, clients, gradient):
        return gradient - self.dual[clients]

    def on_local_end(self, clients):
        self.dual[clients] -= self.penalty * (clients.x - clients.w)

    def transmit(self, clients, update):
        return update - self.dual[clients] / self.penalty

    def on_round_end(self, server):
        self.e = self.average * self.e + (1 - self.average) * server.w


# %%
# Each runs like any other callback of the Trainer.


def accuracies(method, finetuned=False):
    """The accuracy of each client's model on the client's own test samples, ascending."""
    pl.seed_everything(0)
    by_client = PerClientEvaluation(every_n_rounds=10, finetune_epochs=int(finetuned))
    trainer = pl.Trainer(
        max_epochs=10,
        accelerator="cpu",
        callbacks=[by_client, *method],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Digits(
        num_clients=20, partition=Dirichlet(alpha=0.1), batch_size=20, client_test_fraction=0.25
    )
    learner = ImageClassifier(MLP([64, 32, 10]), num_classes=10, lr=0.1)
    trainer.fit(FederatedModule(learner, participation=0.5, local_epochs=2), data)
    column = "acc_finetuned" if finetuned else "acc"
    return np.sort(list(by_client.table[column].values()))


# Of ten rounds, the authors' average of 0.95 would remember the initial model above all.
found = {
    "FedAvg": accuracies([]),
    "FedGMT": accuracies([FedGMT(average=0.5)]),
    "FedProto": accuracies([PrototypePull(classes=10, features=32, strength=0.1)]),
    "APFL": accuracies([MixedPersonalModel()]),
    "FedBABU": accuracies([FixedHead()], finetuned=True),
}

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, values in found.items():
    style = "k--" if name == "FedAvg" else ".-"
    axes.plot(range(1, 21), values, style, label=f"{name}: mean {values.mean():.1%}")
axes.set(title="Clients served by four methods", ylabel="accuracy on own test samples")
axes.set_xlabel("clients, from the worst served to the best")
axes.set_xticks(range(2, 21, 2))
axes.legend()
axes.grid(alpha=0.3)
folder = Path("runs/examples/methods_in_thirty_lines")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "clients.png", dpi=150)

mean = {name: f"{values.mean():.1%}" for name, values in found.items()}
print(
    f"On their own test samples clients are right on {mean['FedBABU']} with FedBABU, "
    f"{mean['APFL']} with APFL and {mean['FedProto']} with FedProto; with one model for all on "
    f"{mean['FedGMT']} with FedGMT and {mean['FedAvg']} with FedAvg."
)
