"""What is measured: networks, client arrays of a fixed seed, and our run on them, a round at a
time."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.models import MLP, LeNet, ResNet18GN

LR = 0.1
FEDSMOO = ("GlobalSharpnessAwareMinimization", "DynamicRegularization")


class SmallConvolutions(nn.Sequential):
    """pfl's CIFAR-10 benchmark: two 3x3 convolutions (32, 64), pooling, 128 units."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 14 * 14, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


class SmallTransformer(nn.Sequential):
    """Two encoder layers of width 32 over 16 positions, without dropout."""

    def __init__(self) -> None:
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        super().__init__(
            nn.Linear(16, 32),
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Flatten(),
            nn.Linear(16 * 32, 10),
        )


@dataclass(frozen=True)
class Workload:
    """One line of the table."""

    network: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int
    epochs: int
    batch_size: int
    clients: int = 10
    registered: int = 100
    weight_decay: float = 1e-3
    methods: tuple[str, ...] = ()
    usual: Callable[[], nn.Module] | None = None

    @property
    def others(self) -> Callable[[], nn.Module]:
        """The network for the bare loop and peers.

        ``usual``, the same function as everybody writes it.
        """
        return self.usual or self.network

    def arrays(self) -> tuple[Tensor, Tensor]:
        """Samples of ten noisy patterns, for the participants alone, client after client."""
        draw = torch.Generator().manual_seed(1)
        patterns = torch.randn(10, *self.shape, generator=draw)
        y = torch.randint(0, 10, (self.clients * self.samples,), generator=draw)
        return 0.3 * patterns[y] + torch.randn(len(y), *self.shape, generator=draw), y


WORKLOADS = {
    "W1": Workload(MLP, (1, 28, 28), 500, 5, 50),
    "W2": Workload(lambda: LeNet(10), (3, 32, 32), 500, 2, 50),
    "W3": Workload(
        lambda: ResNet18GN(10),
        (3, 32, 32),
        500,
        1,
        50,
        usual=lambda: ResNet18GN(10, live_taps=False),
    ),
    # the same ten clients in every round, so that all systems hold the same client states
    "W4-scaffold": Workload(
        MLP, (1, 28, 28), 500, 5, 50, registered=10, methods=("ControlVariates",)
    ),
    "W4-fedsmoo": Workload(MLP, (1, 28, 28), 500, 5, 50, registered=10, methods=FEDSMOO),
    "W5": Workload(
        SmallConvolutions, (3, 32, 32), 50, 1, 10, clients=50, registered=1000, weight_decay=0.0
    ),
    "W6": Workload(SmallTransformer, (16, 16), 200, 2, 20),
}


class Learner(pl.LightningModule):
    def __init__(self, network: nn.Module, weight_decay: float) -> None:
        super().__init__()
        self.network, self.weight_decay = network, weight_decay

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.network(x), y)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR, weight_decay=self.weight_decay)


class Ours:
    """Our run of a workload, held between its rounds.

    ``round()`` gives seconds and loss of the next.
    """

    def __init__(
        self,
        work: Workload,
        engine: str,
        methods: Sequence[Any] = (),
        threads: int = 1,
        accelerator: str = "cpu",
        precision: Any = None,
        **more: Any,
    ) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(threads)
        x, y = work.arrays()
        own = [np.arange(i * work.samples, (i + 1) * work.samples) for i in range(work.clients)]
        registered = [own[i % work.clients] for i in range(work.registered)]
        self.threads = threads
        self.module = FederatedModule(
            Learner(work.network(), work.weight_decay),
            participation=work.clients,
            local_epochs=work.epochs,
            engine=engine,
            seed=1,
            **more,
        )
        self.data = InMemoryDataModule((x, y), clients=registered, batch_size=work.batch_size)
        self.trainer = quiet_trainer(
            1, list(methods), accelerator=accelerator, devices=1, precision=precision
        )
        self._first = True

    def round(self) -> tuple[float, float]:
        """Seconds of the next round, and its mean training loss."""
        torch.set_num_threads(self.threads)
        if self._first:  # by Lightning's loop, which sets everything up
            self.module.teardown = lambda stage: None
            self.trainer.fit(self.module, self.data)
            self.t, self._first = 1, False
            return tuple(
                float(self.trainer.callback_metrics[k]) for k in ("time/round", "train/loss")
            )
        began = time.perf_counter()
        with torch.no_grad():
            metrics = self.module.run.run_round(self.t)
        self.t += 1
        return time.perf_counter() - began, metrics["train/loss"]

    def close(self) -> None:
        if self.module.run.engine is not None:
            self.module.run.engine.close()


def quiet_trainer(rounds: int, callbacks: list[Any], **settings: Any) -> pl.Trainer:
    """A Trainer that shows and keeps nothing, on the CPU unless told otherwise."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    return pl.Trainer(
        max_epochs=rounds,
        callbacks=callbacks,
        enable_model_summary=False,
        log_every_n_steps=1,
        **{**quiet, **settings},
    )
