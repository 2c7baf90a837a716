"""
Client drift, pictured
======================

Three clients, a model of two numbers. Each client walks to its own optimum, and the mean of where
they arrive is not the optimum of them all: that is client drift. SCAFFOLD takes the difference of
the directions out of each step.
"""

# %%
# A learner with two parameters: linear regression.
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedCallback, FederatedModule, InMemoryDataModule
from fl_lightning.callbacks import ControlVariates


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return ((x @ self.w - y) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


# %%
# Clients differ in what they should answer, and in which inputs they see.
rng = np.random.default_rng(0)
targets = np.array([[2.0, 0.5], [-1.0, 2.0], [0.5, -2.0]])
scales = np.array([[2.0, 0.3], [0.4, 1.5], [1.0, 1.0]])
inputs = [rng.standard_normal((40, 2)) * scale for scale in scales]
answers = [x @ target for x, target in zip(inputs, targets, strict=True)]
x = torch.tensor(np.concatenate(inputs), dtype=torch.float32)
y = torch.tensor(np.concatenate(answers), dtype=torch.float32)
best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]


# %%
# A callback sees every local step. This one writes down where the clients are.
class Footprints(FederatedCallback):
    def __init__(self):
        super().__init__()
        self.server = [(0.0, 0.0)]
        self.steps = []

    def on_local_step_end(self, clients):
        for client, place in zip(clients.ids.tolist(), clients.x.tolist(), strict=True):
            self.steps.append((clients.round, client, place))

    def on_round_end(self, server):
        self.server.append(tuple(server.w.tolist()))


def walk(*method):
    """Train, and give the footprints."""
    seen = Footprints()
    trainer = pl.Trainer(
        max_epochs=40,
        accelerator="cpu",
        callbacks=[seen, *method],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = InMemoryDataModule((x, y), clients=torch.arange(120).split(40), batch_size=None)
    module = FederatedModule(
        Line(), participation="all", local_steps=10, engine="sequential", seed=0
    )
    trainer.fit(module, data)
    return seen


# %%
# Both start at the same place and take the same number of steps. Pale are the clients' paths of the
# first round, bright those of the last.
walks = {"FedAvg": walk(), "SCAFFOLD": walk(ControlVariates())}
TITLES = {
    "FedAvg": "FedAvg: clients pull apart, the server ends {:.2f} away",
    "SCAFFOLD": "SCAFFOLD: steps are corrected, it ends {:.2f} away",
}
distance = {}
figure, panels = plt.subplots(
    1, 2, figsize=(11, 4.6), sharex=True, sharey=True, layout="constrained"
)
a, b = np.meshgrid(np.linspace(-1.5, 2.5, 80), np.linspace(-2.3, 2.5, 80))
grid = torch.tensor(np.stack([a.ravel(), b.ravel()]), dtype=torch.float32)
loss = ((x @ grid - y[:, None]) ** 2).mean(0).view(80, 80)
for axes, (name, seen) in zip(panels, walks.items(), strict=True):
    axes.contour(a, b, loss, levels=12, colors="lightgray", linewidths=0.8)
    for client, target in enumerate(targets):
        for t in (0, 39):
            path = [place for when, who, place in seen.steps if (when, who) == (t, client)]
            path = np.array([seen.server[t], *path])
            axes.plot(*path.T, color=f"C{client}", marker=".", ms=3, lw=1, alpha=1 if t else 0.45)
        axes.plot(*target, "s", color=f"C{client}", ms=8, label=f"optimum of client {client}")
    axes.plot(*np.array(seen.server).T, "k-o", ms=3, lw=1.5, label="server, after each round")
    axes.plot(*best, "*", color="crimson", ms=16, zorder=5, label="optimum of all clients")
    distance[name] = float((torch.tensor(seen.server[-1]) - best).norm())
    axes.set(title=TITLES[name].format(distance[name]), xlabel="$w_1$")
panels[0].set_ylabel("$w_2$")
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
folder = Path("runs/examples/drift_pictured")
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "drift.png", dpi=150)

print(
    f"After 40 rounds of 10 local steps FedAvg stands {distance['FedAvg']:.3f} away from the "
    f"optimum of all clients, SCAFFOLD {distance['SCAFFOLD']:.3f}."
)
