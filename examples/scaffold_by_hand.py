"""
SCAFFOLD by hand
================

SCAFFOLD as a plain loop around a plain network, beside its callback: the same bits, round by round.
Who takes part comes from the run, a client's batches from its data module; all arithmetic stands
below (S. P. Karimireddy et al., ICML 2020, Algorithm 1, Option II).
"""

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fl_lightning
from fl_lightning import FederatedModule, MetricsCSV
from fl_lightning.callbacks import ControlVariates
from fl_lightning.datamodules import Digits
from fl_lightning.models import MLP, Classifier

ROUNDS = 5
CLIENTS = 10
COHORT = 4
STEPS = 8
LR = 0.1


# %%
# The loop. ``c`` is the server's control variate, ``c_i`` a client's.
def by_hand(network, data, participants):
    """Train ``network`` for some rounds; gives w, c ``(D,)`` each, every c_i, and accuracies."""
    w = parameters_to_vector(network.parameters()).detach().clone()
    c = torch.zeros_like(w)
    c_i = {client: torch.zeros_like(w) for client in range(CLIENTS)}
    accuracies = []
    for t in range(ROUNDS):
        updates, changes = [], []
        for client in sorted(participants(t)):
            x = torch.nn.Parameter(w.clone())
            optimizer = torch.optim.SGD([x], lr=LR, fused=True)
            for image, label in data.client_batches(client, t, STEPS):
                vector_to_parameters(x.detach(), network.parameters())
                loss = cross_entropy(network(image), label)
                gradient = parameters_to_vector(
                    torch.autograd.grad(loss, list(network.parameters()))
                )
                x.grad = gradient + (c - c_i[client])
                optimizer.step()
            local = x.detach()
            # c_i becomes the mean gradient of the client's steps.
            mean_gradient = (w - local) / (STEPS * torch.tensor(LR))
            change = mean_gradient - c
            c_i[client] += change
            updates.append(local - w)
            changes.append(change)
        w = w + tree_sum(updates) / COHORT
        c += COHORT / CLIENTS * (tree_sum(changes) / COHORT)
        vector_to_parameters(w, network.parameters())
        accuracies.append(accuracy(network, data))
    return w, c, c_i, accuracies


def tree_sum(terms):
    """Sum the even and the odd ones apart, and so on: an order that processes can share."""
    return terms[0] if len(terms) == 1 else tree_sum(terms[0::2]) + tree_sum(terms[1::2])


def accuracy(network, data):
    """The share of the test images that ``network`` has right."""
    (image, label), *_ = data.val_dataloader()
    with torch.no_grad():
        return float((network(image).argmax(1) == label).float().mean())


# %%
# The same run as a user writes it.
pl.seed_everything(0)
torch.set_num_threads(1)
folder = Path("runs/examples/scaffold_by_hand")
data = Digits(num_clients=CLIENTS, batch_size=20)
network = MLP([64, 32, 10])
same = MLP([64, 32, 10])
same.load_state_dict(network.state_dict())

learner = Classifier(network, num_classes=10, lr=LR)
module = FederatedModule(learner, participation=COHORT, local_steps=STEPS, seed=1)
trainer = pl.Trainer(
    max_epochs=ROUNDS,
    callbacks=[ControlVariates()],
    accelerator="cpu",
    logger=MetricsCSV(folder),
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, data)

# %%
# Every number is compared: the model, the server's c, and each client's c_i.
w, c, c_i, accuracies = by_hand(same, data, module.participants)
assert torch.equal(w, module.global_vector)
assert torch.equal(c, module.server_states["ControlVariates.c"])
for client in range(CLIENTS):
    row = module.client_rows.read("ControlVariates.c_i", client)
    assert row is None or torch.equal(c_i[client], row)

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
rounds = range(1, ROUNDS + 1)
axes.plot(rounds, fl_lightning.load(folder).metrics["val/acc"], lw=5, alpha=0.35, label="callback")
axes.plot(rounds, accuracies, "k--o", lw=1.2, ms=4, label="by hand")
axes.set(title="SCAFFOLD, by its callback and by hand", xlabel="round", ylabel="test accuracy")
axes.set_xticks(rounds)
axes.legend()
axes.grid(alpha=0.3)
figure.savefig(folder / "accuracy.png", dpi=150)

print(
    f"{ROUNDS} rounds of SCAFFOLD by hand and by its callback: the same {len(w):,} numbers, bit "
    f"for bit, and an accuracy of {accuracies[-1]:.1%}."
)
