"""What ``benchmarks.checkouts`` runs to compare bits: methods and settings in many combinations, on
a tiny federation.

Only what both checkouts know under one name is used here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from fl_lightning import (
    ClientState,
    FederatedCallback,
    InMemoryDataModule,
    Scratch,
    ServerState,
    Upload,
    callbacks,
)
from fl_lightning.optim import FedAdagrad, FedAdam, FedYogi
from fl_lightning.schedules import Cosine, Exponential, Steps

SIZES = (1, 5, 9, 4, 12, 7, 17)  # batches of 4: one sample, short last batches, different K_i


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3))


def half_frozen() -> nn.Module:
    network = mlp()
    for parameter in network[2].parameters():
        parameter.requires_grad_(False)
    return network


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 12), nn.Dropout(0.4), nn.ReLU(), nn.Linear(12, 3))


class Embedded(nn.Module):
    """A sparse gradient, and a parameter that gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(5, 16, sparse=True), mlp()
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x + self.table((x[:, 0] > 0).long()))
        return y


class Learner(pl.LightningModule):
    """Cross-entropy with SGD, and logs of training and validation.

    Nothing that an engine would not take.
    """

    def __init__(self, network: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.network = network()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self.network(x)
        self.log_dict(
            {
                "val/loss": nn.functional.cross_entropy(out, y),
                "val/acc": (out.argmax(1) == y).float().mean(),
            }
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, weight_decay=0.01)


class Everything(FederatedCallback):
    """No method of anybody: hooks and kinds of state that the packaged ones do not use."""

    mine = ClientState(initial=lambda w: 0.5 * w, synchronised=True)
    visits = ClientState(synchronised=False, shape=(2,), dtype=torch.float64)
    seen = ServerState(initial="current_model", sent=True, synchronised=False)
    path = Scratch()
    length = Upload(shape=(), dtype=torch.float64)

    def on_round_start(self, server: Any) -> None:
        self.seen = 0.9 * self.seen + 0.1 * server.w

    def on_local_start(self, clients: Any) -> None:
        clients.x = clients.x + 0.01 * (self.mine[clients] - clients.w)

    def on_local_step_end(self, clients: Any) -> None:
        self.path[clients] += (clients.x - clients.start).abs()

    def on_local_end(self, clients: Any) -> None:
        self.mine[clients] = 0.5 * (self.mine[clients] + clients.x)
        self.visits[clients] = self.visits[clients] + torch.cat([clients.steps, clients.sizes], 1)
        self.length[clients] = clients.norm(self.path[clients])[:, 0] * clients.weights[:, 0]
        clients.log("own/rate", clients.lr * clients.steps)

    def transmit(self, clients: Any, update: Tensor) -> Tensor:
        clients.sent(parameters=3, bytes=7)
        return update * (1 + 0.1 * clients.ids[:, None] / 7).to(update.dtype)

    def on_server_update(self, server: Any) -> None:
        server.update += 0.01 * (self.seen - server.w) + 0.1 * server.mean_change

    def on_round_end(self, server: Any) -> None:
        server.log("own/length", self.length.weighted() + self.length.sum() / server.n)


def federation(poisoned: bool = False) -> InMemoryDataModule:
    """Unequal clients with labels of their own.

    ``poisoned``: one has a sample that is not finite.
    """
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.normal(size=(n, 16)) + rng.normal(size=16) for n in SIZES]).astype(
        np.float32
    )
    y = np.concatenate(
        [np.where(rng.random(n) < 0.6, i % 3, rng.integers(0, 3, n)) for i, n in enumerate(SIZES)]
    )
    ends = np.cumsum(SIZES)
    if poisoned:
        x[ends[1]] = np.inf
    own = [np.arange(end - n, end) for end, n in zip(ends, SIZES, strict=True)]
    test = (torch.from_numpy(rng.normal(size=(10, 16)).astype(np.float32)), torch.arange(10) % 3)
    return InMemoryDataModule(
        (torch.from_numpy(x), torch.from_numpy(y)), test=test, clients=own, batch_size=4
    )


@dataclass(frozen=True)
class Composition:
    """One run: ``methods`` makes its callbacks anew, ``settings`` go to the FederatedModule."""

    methods: Callable[[], list[Any]] = list
    network: Callable[[], nn.Module] = mlp
    settings: dict[str, Any] = field(default_factory=dict)
    poisoned: bool = False


def sgd(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, **options)


def fedsmoo() -> list[Any]:
    return [callbacks.GlobalSharpnessAwareMinimization(0.05), callbacks.DynamicRegularization(0.2)]


def loggers() -> list[Any]:
    return [
        callbacks.DriftLogger(),
        callbacks.DivergenceLogger(),
        callbacks.CommunicationLogger(),
        callbacks.ConsensusDistanceLogger(),
    ]


def every_other() -> Any:
    return callbacks.PartialAveraging(periods={"network.0.*": 2, "network.2.weight": 3})


PERSONAL = {"network.4.*": "never"}
COMPOSITIONS = {
    "FedAvg": Composition(),
    "FedProx": Composition(lambda: [callbacks.ProximalTerm(0.1)]),
    "FedInit": Composition(lambda: [callbacks.RelaxedInitialization(0.2)]),
    "FedInit-updates": Composition(lambda: [callbacks.RelaxedInitialization(0.2, "updates")]),
    "FedDyn": Composition(lambda: [callbacks.DynamicRegularization(0.2)]),
    "FedCM": Composition(lambda: [callbacks.ClientMomentum(0.3)]),
    "SCAFFOLD": Composition(lambda: [callbacks.ControlVariates()]),
    "SCAFFOLD-gradient": Composition(lambda: [callbacks.ControlVariates("gradient")]),
    "FedSAM": Composition(lambda: [callbacks.SharpnessAwareMinimization(0.05)]),
    "global-SAM": Composition(lambda: [callbacks.GlobalSharpnessAwareMinimization(0.05)]),
    "FedSMOO": Composition(fedsmoo),
    "FedSMOO+FedInit": Composition(lambda: [*fedsmoo(), callbacks.RelaxedInitialization(0.1)]),
    "FedSMOO+loggers": Composition(
        lambda: [*fedsmoo(), *loggers()], settings={"weighting": "samples"}
    ),
    "FedNova": Composition(lambda: [callbacks.NormalizedAveraging()]),
    "FedNova+momentum": Composition(
        lambda: [callbacks.NormalizedAveraging()],
        settings={"client_optimizer": sgd(lr=0.1, momentum=0.8)},
    ),
    "top-k": Composition(lambda: [callbacks.TopKCompression(0.1), callbacks.CommunicationLogger()]),
    "top-k+SCAFFOLD": Composition(
        lambda: [callbacks.TopKCompression(0.2), callbacks.ControlVariates()]
    ),
    "FedALS": Composition(lambda: [callbacks.PartialAveraging(period=2), *loggers()]),
    "FedPer": Composition(lambda: [callbacks.PartialAveraging(periods=PERSONAL)]),
    "FedALS+SCAFFOLD": Composition(lambda: [every_other(), callbacks.ControlVariates()]),
    "FedALS+FedDyn+FedInit": Composition(
        lambda: [
            every_other(),
            callbacks.DynamicRegularization(0.2),
            callbacks.RelaxedInitialization(0.1),
        ]
    ),
    "FedALS+server-momentum": Composition(
        lambda: [every_other(), callbacks.ClientMomentum(0.5)],
        settings={"server_optimizer": sgd(lr=0.7, momentum=0.5)},
    ),
    "FedALS+FedSMOO": Composition(lambda: [every_other(), *fedsmoo()]),
    "FedALS+top-k": Composition(lambda: [every_other(), callbacks.TopKCompression()]),
    "FedSAM+SCAFFOLD": Composition(
        lambda: [callbacks.SharpnessAwareMinimization(0.05), callbacks.ControlVariates()]
    ),
    "FedCM+FedSAM": Composition(
        lambda: [callbacks.ClientMomentum(0.3), callbacks.SharpnessAwareMinimization(0.05)]
    ),
    "FedAdam": Composition(settings={"server_optimizer": lambda p: FedAdam(p, lr=0.1)}),
    "FedYogi+FedALS": Composition(
        lambda: [every_other()],
        settings={"server_optimizer": lambda p: FedYogi(p, lr=0.1), "server_lr_decay": 0.9},
    ),
    "FedAdagrad": Composition(
        settings={"server_optimizer": lambda p: FedAdagrad(p, lr=0.1, beta1=0.5)}
    ),
    "weights-by-samples": Composition(
        lambda: [callbacks.ControlVariates()], settings={"weighting": "samples"}
    ),
    "clipped": Composition(lambda: [callbacks.ProximalTerm(0.1)], settings={"clip_norm": 0.5}),
    "momentum-kept": Composition(
        settings={
            "client_optimizer": sgd(lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.01),
            "keep_optimizer_state": True,
        }
    ),
    "Adam-clients": Composition(
        lambda: [callbacks.ProximalTerm(0.1)],
        settings={
            "client_optimizer": lambda p: torch.optim.Adam(p, lr=0.01),
            "keep_optimizer_state": True,
        },
    ),
    "schedules": Composition(
        lambda: [
            callbacks.ProximalTerm(Exponential(0.5)),
            callbacks.RelaxedInitialization(Steps({0: 0.1, 3: 0.2})),
        ],
        settings={"lr_decay": Cosine(6, 0.1), "server_lr_decay": 0.95, "clip_norm": 1.0},
    ),
    "two-rates": Composition(
        lambda: [callbacks.ProximalTerm(0.1)],
        settings={"client_optimizer": lambda p: torch.optim.SGD(_two_groups(p), lr=0.1)},
    ),
    "bernoulli": Composition(
        lambda: [callbacks.ControlVariates()],
        settings={"sampling": "bernoulli", "participation": 0.4},
    ),
    "all-clients": Composition(
        lambda: [callbacks.DynamicRegularization(0.2)],
        settings={"participation": "all", "local_steps": 3},
    ),
    "batch-norm": Composition(
        lambda: [callbacks.ControlVariates()], convolutions, {"weighting": "samples"}
    ),
    "batch-norm-kept": Composition(network=convolutions, settings={"buffers": "keep"}),
    "dropout": Composition(lambda: [callbacks.SharpnessAwareMinimization(0.05)], dropout),
    "half-frozen": Composition(lambda: [callbacks.ControlVariates()], half_frozen),
    "sparse": Composition(lambda: [callbacks.ControlVariates()], Embedded),
    "loggers": Composition(lambda: [callbacks.RelaxedInitialization(0.2), *loggers()]),
    "own-method": Composition(lambda: [Everything(), *loggers()]),
    "own-method+FedALS": Composition(lambda: [Everything(), every_other()]),
    "skipped-client": Composition(
        lambda: [callbacks.ControlVariates()], settings={"on_nonfinite": "skip"}, poisoned=True
    ),
}


def _two_groups(parameters: Any) -> list[dict[str, Any]]:
    listed = list(parameters)
    return [{"params": listed[:1], "lr": 0.05}, {"params": listed[1:]}]
