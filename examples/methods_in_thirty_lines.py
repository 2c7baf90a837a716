"""
A paper's method in thirty lines
================================

A method is a file of its own that reads like the paper. FedGKD, which is not packaged, is written
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
import torch
from torch.nn.functional import kl_div, log_softmax

from fl_lightning import Coefficient, FederatedCallback, FederatedModule, ServerState
from fl_lightning.callbacks import (
    FixedHead,
    MixedPersonalModel,
    PerClientEvaluation,
    PrototypePull,
)
from fl_lightning.datamodules import Digits, Dirichlet
from fl_lightning.models import MLP, Classifier

# %%
# FedGKD (Yao et al., 2021, arXiv:2107.00051): the server also sends the mean of its last models,
# and clients stay near the predictions of this teacher. The rule is written from memory.


class FedGKD(FederatedCallback):
    """CE + strength/2 KL(teacher || x); the teacher is the mean of the last ``memory`` models."""

    taps = {"logits": "last"}
    strength = Coefficient()
    past = ServerState(shape=("memory", "D"))
    teacher = ServerState(sent=True)

    def __init__(self, strength=0.2, memory=5):
        super().__init__()
        self.strength = strength
        self.memory = memory

    def on_round_start(self, server):
        self.past = torch.cat([server.w[None], self.past[:-1]])
        self.teacher = self.past[: server.round + 1].mean(0)

    def local_loss(self, clients, loss, seen, batch):
        teacher = log_softmax(clients.seen_at(self.teacher)["logits"], 1)
        student = log_softmax(seen["logits"], 1)
        apart = kl_div(student, teacher, log_target=True, reduction="batchmean")
        return loss + self.strength / 2 * apart


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
    learner = Classifier(MLP([64, 32, 10]), num_classes=10, lr=0.1)
    trainer.fit(FederatedModule(learner, participation=0.5, local_epochs=2), data)
    column = "acc_finetuned" if finetuned else "acc"
    return np.sort(list(by_client.table[column].values()))


found = {
    "FedAvg": accuracies([]),
    "FedGKD": accuracies([FedGKD()]),
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
    f"{mean['FedGKD']} with FedGKD and {mean['FedAvg']} with FedAvg."
)
