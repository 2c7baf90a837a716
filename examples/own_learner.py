"""
Your own LightningModule
========================

Ten clients train an autoencoder that knows nothing of federated learning. Afterwards it is a plain
LightningModule again.
"""

# %%
# The learner is written as for Lightning alone: a loss, an optimizer, something to validate.
from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import mse_loss

from fl_lightning import FederatedModule, InMemoryDataModule


class Autoencoder(pl.LightningModule):
    def __init__(self, code=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, code))
        self.decoder = nn.Sequential(nn.Linear(code, 48), nn.ReLU(), nn.Linear(48, 64))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        return mse_loss(self(batch[0]), batch[0])

    def validation_step(self, batch, batch_idx):
        self.log("val/mse", mse_loss(self(batch[0]), batch[0]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


# %%
# ``clients`` says which samples each client has: here the client of a digit has that digit alone.
pl.seed_everything(0)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images / 16, dtype=torch.float32)
y = torch.tensor(labels)
train, test = torch.arange(300, len(x)), torch.arange(300)
clients = [(y[train] == digit).nonzero().flatten() for digit in range(10)]
data = InMemoryDataModule(
    (x[train], y[train]), test=(x[test], y[test]), clients=clients, batch_size=32
)

# %%
# All clients take part in each of 40 rounds.
module = FederatedModule(Autoencoder(), participation="all", local_epochs=2)
trainer = pl.Trainer(
    max_epochs=40,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, data)

# %%
# ``export`` gives an ``Autoencoder`` with the server's weights.
autoencoder = module.export().eval()
with torch.no_grad():
    restored = autoencoder(x[test])
error = mse_loss(restored, x[test]).item()
variance = mse_loss(x[train].mean(0).expand_as(x[test]), x[test]).item()

folder = Path("runs/examples/own_learner")
folder.mkdir(parents=True, exist_ok=True)
figure, axes = plt.subplots(2, 10, figsize=(8, 2.2), layout="constrained")
figure.suptitle("Test images (above), and what the autoencoder makes of 12 numbers (below)")
for row, shown in enumerate((x[test], restored)):
    for column in range(10):
        axes[row, column].imshow(shown[column].view(8, 8), cmap="gray_r", vmin=0, vmax=1)
        axes[row, column].axis("off")
figure.savefig(folder / "restored.png", dpi=150)

print(
    f"Ten clients with one digit each: the mean squared error on test images is {error:.4f}, "
    f"of {variance:.4f} without a code; val/mse was {trainer.callback_metrics['val/mse']:.4f}."
)
