"""SCAFFOLD as a plain loop around a plain network, with the bits of its callback.

Run it: ``python examples/scaffold_by_hand.py``. Who takes part comes from the run, a client's
batches from its data module; all arithmetic stands below. S. P. Karimireddy et al.: SCAFFOLD
(ICML 2020), Algorithm 1, Option II.
"""

import logging

import pytorch_lightning as pl
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fl_lightning import FederatedModule
from fl_lightning.callbacks import ControlVariates
from fl_lightning.datamodules import Digits
from fl_lightning.models import MLP, ImageClassifier

ROUNDS = 5
CLIENTS = 10
COHORT = 4
STEPS = 8
LR = 0.1


def by_hand(network, data, participants):
    """Train ``network`` for some rounds; gives w, c ``(D,)`` each, and every client's c_i."""
    w = parameters_to_vector(network.parameters()).detach().clone()
    c = torch.zeros_like(w)
    c_i = {client: torch.zeros_like(w) for client in range(CLIENTS)}
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
    return w, c, c_i


def tree_sum(terms):
    """Sum the even and the odd ones apart, and so on: an order that processes can share."""
    return terms[0] if len(terms) == 1 else tree_sum(terms[0::2]) + tree_sum(terms[1::2])


def by_callback(network, data):
    """The same run as a user writes it."""
    learner = ImageClassifier(num_classes=10, network=network, lr=LR)
    module = FederatedModule(learner, participation=COHORT, local_steps=STEPS, seed=1)
    trainer = pl.Trainer(
        max_epochs=ROUNDS,
        callbacks=[ControlVariates()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        accelerator="cpu",
    )
    trainer.fit(module, data)
    return module


def main():
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    data = Digits(num_clients=CLIENTS, batch_size=20)
    torch.manual_seed(0)
    start = MLP([64, 32, 10]).state_dict()
    one, other = MLP([64, 32, 10]), MLP([64, 32, 10])
    one.load_state_dict(start)
    other.load_state_dict(start)
    module = by_callback(one, data)
    w, c, c_i = by_hand(other, data, module.participants)
    assert torch.equal(w, module.global_vector)
    assert torch.equal(c, module.server_states["ControlVariates.c"])
    for client in range(CLIENTS):
        row = module.client_rows.read("ControlVariates.c_i", client)
        assert row is None or torch.equal(c_i[client], row)
    print(
        f"{ROUNDS} rounds of SCAFFOLD by hand and by its callback: "
        f"the same {len(w):,} numbers, bit for bit"
    )


if __name__ == "__main__":
    main()
