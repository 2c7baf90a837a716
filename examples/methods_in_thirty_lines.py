"""
Four methods, thirty lines each
===============================

A paper's method is a file of its own that reads like the paper: FedBABU, APFL and FedProto give
each client a model of its own, FedGMT has one for all. Each uses other hooks: parts that are never
averaged, the gradient at a second point, losses that look at features or logits, and states that
are no vectors of the model's length. Three of them are packaged, too, with options and checks:
FedBABU as ``FixedHead``, APFL as ``MixedPersonalModel``, FedProto as ``PrototypePull``.
"""

# %%
# The data are the digits on 20 clients, and each holds out a quarter of its samples to be tested
# on.
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytorch_lightning as pl
import torch
from torch.nn.functional import kl_div, log_softmax, one_hot

from fl_lightning import (
    ClientState,
    Coefficient,
    FederatedCallback,
    FederatedModule,
    Scratch,
    ServerState,
    Upload,
)
from fl_lightning.callback import CLASS_LABELS
from fl_lightning.callbacks import PerClientEvaluation
from fl_lightning.datamodules import Digits, Dirichlet
from fl_lightning.models import MLP, ImageClassifier

# %%
# FedBABU (Oh et al., ICLR 2022): the head rests at its initial value, and is neither trained nor
# sent; the body is FedAvg's. Afterwards each client fine-tunes, which ``PerClientEvaluation`` does
# below. A gradient of 0 would not be enough: weight decay and momentum move what has none.


class FedBABU(FederatedCallback):
    """The body alone is trained and averaged; the head is that of w^0 at every client."""

    order = 1  # its hooks of a step come after those of other methods
    moves_start = False

    def head(self, layout):
        return layout.mask(layout.named("last", "FedBABU"))

    def parts(self, layout):
        return [(self.head(layout), None)]  # never averaged

    def on_local_gradient(self, clients, gradient):
        return gradient.masked_fill(self.head(clients.layout), 0.0)

    def on_local_step_end(self, clients):
        clients.x = torch.where(self.head(clients.layout), clients.start, clients.x)


# %%
# APFL (Deng et al., 2020): a client's model is a mix of its own and the server's, and how much of
# each is learned, too. The server's model is FedAvg's, to the last bit.


class APFL(FederatedCallback):
    """v <- v - lr a grad(mix), mix = a v + (1 - a) x; a round: a <- clip(a - lr <v - x, grad>)."""

    v = ClientState(initial="initial_model", synchronised=False)
    alpha = ClientState(initial=lambda w: 0.5, shape=(), synchronised=False)
    slope = Scratch(shape=())

    def mixed(self, clients):
        alpha = self.alpha[clients][:, None]
        return alpha * self.v[clients] + (1 - alpha) * clients.x

    def on_local_gradient(self, clients, gradient):  # x is as before its step
        v = self.v[clients]
        mix = self.mixed(clients)
        g = clients.gradient_at(mix) + clients.weight_decay * mix
        self.slope[clients] = (clients.lr * (v - clients.x) * g).sum(1)
        v -= clients.lr * self.alpha[clients][:, None] * g

    def on_local_end(self, clients):  # by the gradient of the last step
        self.alpha[clients] = (self.alpha[clients] - self.slope[clients]).clamp(0, 1)

    def personal(self, clients):
        return self.mixed(clients)


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
# FedProto (Tan et al., AAAI 2022): no weights travel. What clients share is the mean of the
# features of each class, its prototype, to which they pull their own.


class FedProto(FederatedCallback):
    """CE + strength mean|z - prototype_y|^2; prototypes are the means of z over all clients."""

    taps = {"features": "last:in"}
    notes = (CLASS_LABELS,)
    strength = Coefficient()
    prototypes = ServerState(shape=("C", "F"), sent=True, synchronised=False)
    known = ServerState(shape=("C",), sent=True, synchronised=False)  # clients read it, too
    sums = Scratch(shape=("C", "F"))
    counts = Scratch(shape=("C",))
    sent_sums = Upload(shape=("C", "F"))
    sent_counts = Upload(shape=("C",))

    def __init__(self, classes=10, features=32, strength=0.1):
        super().__init__()
        self.C = classes
        self.F = features
        self.strength = strength

    def parts(self, layout):
        return [(torch.ones(layout.size, dtype=torch.bool), None)]  # all, never averaged

    def local_loss(self, clients, loss, seen, batch):  # one client at a time
        z = seen["features"]
        mine = one_hot(batch[1], self.C).to(z)  # (B, C)
        self.sums[clients] += mine.T @ z.detach()
        self.counts[clients] += mine.sum(0)
        far = (z - self.prototypes[batch[1]]).square().mean(1)
        return loss + self.strength * (far * self.known[batch[1]]).mean()

    def on_local_end(self, clients):
        self.sent_sums[clients] = self.sums[clients]
        self.sent_counts[clients] = self.counts[clients]

    def on_server_update(self, server):
        counts = self.sent_counts.sum()
        seen = counts > 0
        means = self.sent_sums.sum() / counts.clamp(min=1)[:, None]
        self.prototypes = torch.where(seen[:, None], means, self.prototypes)
        self.known = torch.maximum(self.known, seen.to(self.known))


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
    "FedProto": accuracies([FedProto()]),
    "APFL": accuracies([APFL()]),
    "FedBABU": accuracies([FedBABU()], finetuned=True),
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
