"""
A LightningCLI of your own
==========================

``FederatedCLI(MyLearner, MyDataModule)`` takes the place of ``LightningCLI(MyLearner,
MyDataModule)``. Learner, data module, links and configs stay as they are; extra options configure
the federation.
"""

# %%
# A learner and a data module that know nothing of clients.
from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedCLI


class Blobs(pl.LightningDataModule):
    def __init__(self, blobs: int = 5, spread: float = 0.25, batch_size: int = 16):
        super().__init__()
        self.batch_size = batch_size
        draw = torch.Generator().manual_seed(0)
        angle = torch.arange(blobs) * 2 * torch.pi / blobs
        centres = torch.stack([angle.cos(), angle.sin()], dim=1)
        self.y = torch.arange(blobs).repeat(120)
        self.x = centres[self.y] + spread * torch.randn(len(self.y), 2, generator=draw)

    def train_dataloader(self):
        train = TensorDataset(self.x[200:], self.y[200:])
        return DataLoader(train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(self.x[:200], self.y[:200]), batch_size=200)


class Classifier(pl.LightningModule):
    def __init__(self, classes: int, hidden: int = 16, lr: float = 0.1):
        super().__init__()
        self.lr = lr
        self.network = torch.nn.Sequential(
            torch.nn.Linear(2, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, classes)
        )

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/acc", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


# %%
# The subclass is the one that LightningCLI would have: here it links two arguments.
class CLI(FederatedCLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.blobs", "model.classes")


# %%
# Without ``args`` these come from the command line: ``python own_cli.py fit --data.blobs 7 …``.
folder = Path("runs/examples/own_cli")
cli = CLI(
    Classifier,
    Blobs,
    seed_everything_default=0,
    save_config_kwargs={"overwrite": True},
    trainer_defaults={
        "accelerator": "cpu",
        "default_root_dir": str(folder),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    },
    args=[
        "fit",
        "--trainer.max_epochs=15",
        "--data.blobs=7",
        "--split.num_clients=10",
        "--split.partition=Pathological",
        "--split.partition.classes=2",
        "--federated.participation=0.5",
        "--federated.local_epochs=2",
        "--method+=ControlVariates",
    ],
)

# %%
# ``cli.model`` is the FederatedModule, ``cli.trainer`` the Trainer that ran it.
accuracy = float(cli.trainer.callback_metrics["val/acc"])
a, b = torch.meshgrid(torch.linspace(-2, 2, 200), torch.linspace(-2, 2, 200), indexing="xy")
with torch.no_grad():
    decided = cli.model.export()(torch.stack([a, b], dim=-1).view(-1, 2)).argmax(1)
figure, axes = plt.subplots(figsize=(4.6, 4.2), layout="constrained")
axes.pcolormesh(a, b, decided.view(200, 200), cmap="Set2", alpha=0.35, vmin=0, vmax=7)
blobs = cli.datamodule.datamodule
axes.scatter(*blobs.x[:200].T, c=blobs.y[:200], cmap="Set2", s=12, vmin=0, vmax=7, ec="k", lw=0.3)
axes.set(title=f"Seven blobs, clients with two each: {accuracy:.1%}", xlabel="$x_1$")
axes.set_ylabel("$x_2$")
figure.savefig(folder / "regions.png", dpi=150)

print(
    f"The link gave the learner {cli.learner.network[-1].out_features} classes, and 10 clients "
    f"with two of them each trained it to {accuracy:.1%} of the test points."
)
