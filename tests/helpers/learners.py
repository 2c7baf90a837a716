"""Learners and data shared by tests: small, float64, and knowing nothing of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fl_lightning import FederatedModule, InMemoryDataModule


class Lit(pl.LightningModule):
    """Two layers and cross-entropy: 20 inputs, 4 classes."""

    def __init__(self, hidden: int = 8, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(20, hidden), nn.Tanh(), nn.Linear(hidden, 4))
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self.net(x)
        self.log("val/acc", (out.argmax(1) == y).float().mean())
        self.log("val/loss", nn.functional.cross_entropy(out, y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test/acc", (self.net(x).argmax(1) == y).float().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        predicted: Tensor = self.net(batch[0]).argmax(1)
        return predicted

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, weight_decay=1e-3)


class Loads(pl.LightningDataModule):
    """A data module of one training loader, which knows no clients."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader


class Normed(Lit):
    """With batch normalisation, so with buffers that its steps change."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))


class Dropping(Lit):
    """Draws random numbers of the process in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, nn.Dropout(0.5))


class InPlace(Lit):
    """Centres its inputs at a running mean, kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(20))

    def move(self, x: Tensor) -> None:
        self.running_mean.mul_(0.9).add_(0.1 * x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.move(batch[0].mean(0))
        return nn.functional.cross_entropy(self.net(batch[0] - self.running_mean), batch[1])


def blobs(
    clients: int = 10, per_client: int = 24, batch_size: int = 8, dtype: torch.dtype = torch.float64
) -> Any:
    """Four Gaussian classes; client i holds ``per_client - 2 (i mod 5)`` samples."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 20, generator=generator, dtype=dtype)
    y = torch.randint(0, 4, (clients * per_client,), generator=generator)
    x = centres[y] + torch.randn(len(y), 20, generator=generator, dtype=dtype)
    own = [np.arange(i * per_client, (i + 1) * per_client - 2 * (i % 5)) for i in range(clients)]
    return InMemoryDataModule((x, y), test=(x, y), clients=own, batch_size=batch_size)


def as_batches(batches: Any) -> DataLoader[Any]:
    """Batches that are there already, for a Trainer of plain Lightning."""
    return DataLoader(batches, batch_size=None)


def trainer(rounds: int = 2, callbacks: Any = (), **settings: Any) -> pl.Trainer:
    """A quiet Trainer on the CPU."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(
        max_epochs=rounds,
        callbacks=list(callbacks),
        accelerator="cpu",
        enable_model_summary=False,
        log_every_n_steps=1,
        **{**quiet, **settings},
    )


def federated(learner: Any = None, **arguments: Any) -> FederatedModule:
    """A module around a learner in float64, with seed 1 and a third of the clients."""
    torch.manual_seed(0)
    defaults = {"participation": 0.3, "local_epochs": 1, "seed": 1}
    return FederatedModule((learner or Lit()).double(), **{**defaults, **arguments})


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def last_checkpoint(folder: Path) -> ModelCheckpoint:
    """Writes ``checkpoints/last.ckpt`` in this folder after every round."""
    return ModelCheckpoint(
        folder / "checkpoints", "last", enable_version_counter=False, save_on_train_epoch_end=True
    )


def client_rows(module: FederatedModule) -> dict[Any, Tensor]:
    """All state of clients that a run holds, by (name, client)."""
    store = module.client_rows.store
    return {
        (name, int(i)): store.read(name, int(i))
        for name in store.names()
        for i in store.clients(name)
    }


def by_hand(learner: Any, batches: Any, optimizer: Any = None) -> Any:
    """The learner after a plain loop over the batches. ``optimizer``: what makes one of its
    parameters; None: that of the learner itself."""
    learner.log = lambda *_, **__: None
    made = learner.configure_optimizers() if optimizer is None else None
    own = made or optimizer(list(learner.parameters()))
    for k, batch in enumerate(batches):
        own.zero_grad()
        learner.training_step(batch, k).backward()
        own.step()
    return learner


def by_lightning(learner: Any, batches: Any, **settings: Any) -> Any:
    """The learner after an epoch of plain Lightning over the batches."""
    trainer(1, limit_val_batches=0, **settings).fit(learner, as_batches(list(batches)))
    return learner


def assert_trained_as(module: FederatedModule, alone: Any, tolerance: float = 1e-10) -> None:
    """Every parameter and buffer of a run's model is that of a learner that was trained alone."""
    found = module.export().state_dict()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


def fitted(learner: type[Lit], rounds: int = 2, **arguments: Any) -> tuple[Any, dict[str, Tensor]]:
    """A module after a few rounds of all clients, and what was logged."""
    torch.manual_seed(3)
    module = federated(learner(), **{"participation": 1.0, **arguments})
    run = trainer(rounds)
    run.fit(module, blobs())
    return module, run.callback_metrics
