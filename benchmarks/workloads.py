"""What is measured: networks, client arrays of a fixed seed, and our run on them, a round at a
time."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, Subset
from torchvision.transforms import (
    Compose,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    ToTensor,
)
from torchvision.transforms.functional import to_pil_image

from benchmarks.networks import (
    CHARACTERS,
    CharacterLSTM,
    Decoder,
    HandwritingConvolutions,
    Series,
    SmallConvolutions,
    SmallTransformer,
    adapted_decoder,
    adapted_vision_transformer,
)
from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.datamodules import FederatedDataModule, FromDatasets
from fl_lightning.models import MLP, LeNet, ResNet18GN, ResNet20

LR = 0.1
FEDSMOO = ("GlobalSharpnessAwareMinimization", "DynamicRegularization")
METHODS: dict[str, tuple[str, ...]] = {
    "FedInit": ("RelaxedInitialization",),
    "FedProx": ("ProximalTerm",),
    "FedDyn": ("DynamicRegularization",),
    "FedCM": ("ClientMomentum",),
    "SCAFFOLD": ("ControlVariates",),
    "FedSAM": ("SharpnessAwareMinimization",),
    "FedSMOO": FEDSMOO,
}


OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy over classes ``(…, C)``, at each position of a text."""
    return cross_entropy(outputs.flatten(0, -2), y.flatten())


class Pictures(Dataset[tuple[Tensor, int]]):
    """JPEG files in memory, which PIL decodes, crops and flips at random when they are read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.targets = y
        self.files = [self._encoded(picture) for picture in x]
        self.transform = Compose(
            [
                RandomResizedCrop(32),
                RandomHorizontalFlip(),
                ToTensor(),
                Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
            ]
        )

    @staticmethod
    def _encoded(picture: Tensor) -> bytes:
        file = BytesIO()
        to_pil_image(picture.sigmoid()).resize((128, 128)).save(file, "JPEG")
        return file.getvalue()

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        picture = Image.open(BytesIO(self.files[i]))
        return self.transform(picture), int(self.targets[i])


@dataclass(frozen=True)
class Workload:
    """One line of the table."""

    network: Callable[[], nn.Module]  # no lambda: BlazeFL pickles it
    shape: tuple[int, ...]  # of a sample; of a text: its length
    samples: int  # of a client; of the largest one where sizes differ
    epochs: int
    batch_size: int
    clients: int = 10
    registered: int = 100
    weight_decay: float = 1e-3
    methods: tuple[str, ...] = ()
    usual: Callable[[], nn.Module] | None = None
    classes: int = 10
    text: bool = False  # the targets are the next characters
    pictures: bool = False  # files, which PIL decodes
    augment: bool = False  # crops with padding 4, and flips
    adam: bool = False
    # The smallest client has 1 / spread of the samples of the largest one.
    spread: int = 1

    @property
    def draws(self) -> bool:
        """Whether steps or data draw random numbers."""
        parts = self.network().modules()
        drops = (part.p > 0 for part in parts if isinstance(part, nn.Dropout))
        return self.pictures or any(drops)

    @property
    def others(self) -> Callable[[], nn.Module]:
        """The network for the bare loop and peers.

        ``usual``, the same function as everybody writes it.
        """
        return self.usual or self.network

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        trained = [p for p in parameters if p.requires_grad]
        if self.adam:
            return torch.optim.Adam(trained, lr=LR / 100)
        return torch.optim.SGD(trained, lr=LR, weight_decay=self.weight_decay)

    def sizes(self) -> list[int]:
        """Samples of each participant: from ``samples`` down to ``samples / spread``."""
        smallest = self.samples // self.spread
        step = (self.samples - smallest) / max(1, self.clients - 1)
        return [round(self.samples - step * i) for i in range(self.clients)]

    def arrays(self) -> tuple[Tensor, Tensor]:
        """Samples of noisy patterns, for the participants alone, client after client."""
        draw = torch.Generator().manual_seed(1)
        total = sum(self.sizes())
        if self.text:
            # A text in which the next character depends on the one before, most of the time.
            text = torch.randint(0, CHARACTERS, (total, self.shape[0] + 1), generator=draw)
            for k in range(self.shape[0]):
                follows = torch.rand(total, generator=draw) < 0.7
                text[:, k + 1] = torch.where(follows, (text[:, k] * 7 + 3) % 90, text[:, k + 1])
            return text[:, :-1].contiguous(), text[:, 1:].contiguous()
        patterns = torch.randn(self.classes, *self.shape, generator=draw)
        y = torch.randint(0, self.classes, (total,), generator=draw)
        return 0.3 * patterns[y] + torch.randn(len(y), *self.shape, generator=draw), y

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """Each participant's samples."""
        x, y = self.arrays()
        return list(zip(x.split(self.sizes()), y.split(self.sizes()), strict=True))

    def data(self) -> Any:
        """Our data module: the participants' samples, again and again over all clients."""
        ends = np.cumsum([0, *self.sizes()])
        own = [np.arange(a, b) for a, b in pairwise(ends)]
        registered = [own[i % self.clients] for i in range(self.registered)]
        if self.pictures:
            pictures = Pictures(*self.arrays())
            clients = [Subset(pictures, index.tolist()) for index in registered]
            return FromDatasets(clients=clients, batch_size=self.batch_size)
        return InMemoryDataModule(
            self.arrays(),
            clients=registered,
            batch_size=self.batch_size,
            augment=["crop", "flip"] if self.augment else None,
        )


WORKLOADS = {
    "W1": Workload(MLP, (1, 28, 28), 500, 5, 50),
    "W2": Workload(partial(LeNet, 10), (3, 32, 32), 500, 2, 50),
    "W3": Workload(
        partial(ResNet18GN, 10),
        (3, 32, 32),
        500,
        1,
        50,
        usual=partial(ResNet18GN, 10, live_taps=False),
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
    # without a server: all clients train, each mixes with its two neighbours on a ring
    "G1": Workload(MLP, (1, 28, 28), 500, 5, 50, clients=50, registered=50, methods=("Gossip",)),
    # a hundred clients of one step each: what a client costs besides its steps
    "W7": Workload(MLP, (1, 28, 28), 50, 1, 50, clients=100, registered=1000),
    "X6": Workload(CharacterLSTM, (80,), 20, 1, 10, text=True),
    "X7": Workload(Decoder, (64,), 48, 1, 16, clients=8, text=True),
    "X8": Workload(partial(ResNet20, 10), (3, 32, 32), 64, 1, 32, adam=True),
    "X9": Workload(SmallConvolutions, (3, 32, 32), 60, 2, 20, pictures=True),
    "X10": Workload(Series, (9, 128), 160, 2, 16, spread=8),
    "X11": Workload(adapted_decoder, (64,), 48, 1, 16, clients=8, text=True),
    # crops and flips: ours by `augment`, the bare loop's by torchvision, picture by picture
    "X12": Workload(
        partial(ResNet18GN, 10),
        (3, 32, 32),
        100,
        1,
        50,
        usual=partial(ResNet18GN, 10, live_taps=False),
        augment=True,
    ),
    "X13": Workload(adapted_vision_transformer, (3, 32, 32), 64, 1, 32, clients=8),
    "F1": Workload(HandwritingConvolutions, (1, 28, 28), 220, 1, 20, registered=3400, classes=62),
    # a round of all registered clients; BlazeFL's have no weight decay
    "F2": Workload(partial(LeNet, 10), (3, 32, 32), 100, 5, 50, clients=100, weight_decay=0.0),
}


class Learner(pl.LightningModule):
    """A network with a loss and an optimizer."""

    def __init__(self, network: nn.Module, optimizer: OptimizerOf) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = loss_of(self.network(x), y)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


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
        self.threads = threads
        self.module = FederatedModule(
            Learner(work.network(), work.optimizer),
            participation=work.clients,
            local_epochs=work.epochs,
            engine=engine,
            seed=1,
            **more,
        )
        self.data = work.data()
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


class Watched:
    """Seconds in which local steps ran, and in which their batches were made, from 0 on."""

    steps = 0.0
    reading = 0.0


@contextmanager
def local_steps_timed(clock: Callable[[], float] = time.perf_counter) -> Iterator[Watched]:
    """While it is open, the time of every local step of this process is added up."""
    watched = Watched()
    # Only here: `benchmarks.checkouts` also reads this file in checkouts with other module names.
    from fl_lightning.client.local_step import LocalStep

    step = LocalStep.__call__
    batches = FederatedDataModule.client_batches

    def timed_step(*arguments: Any) -> None:
        began = clock()
        step(*arguments)
        watched.steps += clock() - began

    def timed_batches(*arguments: Any, **given: Any) -> Iterator[Any]:
        made = batches(*arguments, **given)
        while True:
            began = clock()
            batch = next(made, None)
            watched.reading += clock() - began
            if batch is None:
                return
            yield batch

    with (
        patch.object(LocalStep, "__call__", timed_step),
        patch.object(FederatedDataModule, "client_batches", timed_batches),
    ):
        yield watched


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
