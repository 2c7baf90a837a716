"""``python -m benchmarks.loop``: what a round costs besides training, on a problem of almost no
work.

Milliseconds a round with progress bar, TensorBoard and validation, and without them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn

from benchmarks.workloads import quiet_trainer
from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.callbacks import FederatedProgressBar


class Trivial(pl.LightningModule):
    """One weight, one step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", (self.layer(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(pl.Callback):
    def __init__(self) -> None:
        self.at: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.at.append(time.perf_counter())


def milliseconds(rounds: int, shown: bool, clients: int) -> float:
    x = torch.linspace(0, 1, 4).view(-1, 1)
    data = InMemoryDataModule(
        (x, 2 * x), test=(x, 2 * x), clients=[[i] for i in range(clients)], batch_size=1
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"limit_val_batches": 0, "num_sanity_val_steps": 0}
        callbacks: list[Any] = [clock]
        if shown:
            settings = {"logger": TensorBoardLogger(folder), "enable_progress_bar": True}
            callbacks.append(FederatedProgressBar())
        trainer = quiet_trainer(rounds, callbacks, default_root_dir=folder, **settings)
        trainer.fit(FederatedModule(Trivial(), participation=1.0, local_steps=1, seed=1), data)
    return 1000 * statistics.median(
        b - a for a, b in zip(clock.at[10:], clock.at[11:], strict=False)
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(
        "\n| clients, one step each | ms a round | with bar, TensorBoard and validation "
        "|\n|---|---|---|"
    )
    for clients in (1, 4):
        print(
            f"| {clients} | {milliseconds(rounds, False, clients):.2f} | "
            f"{milliseconds(rounds, True, clients):.2f} |"
        )


if __name__ == "__main__":
    main()
