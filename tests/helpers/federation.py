"""Our side of comparisons: small federations in float64 through the public interface, recorded
after each round."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from fl_lightning import FederatedModule, InMemoryDataModule
from tests.oracles.problems import Quadratic, Schedule, Vector

SIZES = [1, 5, 9, 4, 12, 7, 20, 3]
BATCH = 4


class Network(pl.LightningModule):
    """Linear, tanh, linear, cross-entropy: the oracle's TwoLayer(3, 4, 3)."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        for parameter in self.parameters():
            parameter.data = 0.5 * torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


class Quadratics(pl.LightningModule):
    """Client i's loss is the oracle's f_i(w) = (w - b_i)' A_i (w - b_i) / 2. Its samples are its
    number."""

    def __init__(self, problem: Quadratic, start: Vector) -> None:
        super().__init__()
        self.curvature, self.centre = (
            torch.from_numpy(problem.curvature),
            torch.from_numpy(problem.centre),
        )
        self.w = nn.Parameter(torch.from_numpy(start.copy()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        i = int(batch[0][0, 0])
        away = self.w - self.centre[i]
        return away @ self.curvature[i] @ away / 2


class Recorder(pl.Callback):
    """What there is after each round."""

    def __init__(self) -> None:
        self.w: list[Vector] = []
        self.evaluated: list[Vector] = []
        self.rows: list[dict[str, dict[int, Vector]]] = []
        self.server: list[dict[str, Vector]] = []
        self.optimizer: list[dict[str, Vector]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        store = pl_module.client_rows.store
        self.w.append(pl_module.global_vector.detach().numpy().copy())
        self.evaluated.append(pl_module.evaluated_vector.detach().numpy().copy())
        self.rows.append(
            {
                n: {int(i): store.read(n, int(i)).numpy() for i in store.clients(n)}
                for n in store.names()
            }
        )
        self.server.append(
            {name: value.numpy().copy() for name, value in pl_module.server_states.items()}
        )
        (state,) = pl_module.optimizers().state.values() or [{}]
        self.optimizer.append(
            {k: v.numpy().copy() for k, v in state.items() if isinstance(v, Tensor)}
        )
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


@dataclass
class Run:
    """A finished run of ours, and what the oracle needs to repeat it."""

    module: FederatedModule
    record: Recorder
    start: Vector
    schedule: Schedule


def samples(sizes: Sequence[int] = SIZES) -> tuple[Tensor, Tensor, list[Any]]:
    """Heterogeneous clients: each has its own centre and its own favourite class."""
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.normal(size=(n, 3)) + rng.normal(size=3) for n in sizes])
    y = np.concatenate(
        [np.where(rng.random(n) < 0.6, i % 3, rng.integers(0, 3, n)) for i, n in enumerate(sizes)]
    )
    ends = np.cumsum(sizes)
    return (
        torch.from_numpy(x),
        torch.from_numpy(y),
        [np.arange(e - n, e) for e, n in zip(ends, sizes, strict=True)],
    )


def fit(
    learner: pl.LightningModule, data: Any, callbacks: Sequence[Any], rounds: int, **options: Any
) -> Run:
    """Train quietly on the CPU and record every round."""
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    options.setdefault("engine", "sequential")
    module = FederatedModule(learner, seed=1, **options)
    start, record = module.global_vector.detach().numpy().copy(), Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            max_epochs=rounds,
            callbacks=[*callbacks, record],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, data)
    table = [
        {i: _batches(module, data, t, i) for i in module.participants(t)} for t in range(rounds)
    ]
    everything = [_samples(data, data.client_indices(i)) for i in range(data.num_clients)]
    return Run(
        module, record, start, Schedule(table, [int(n) for n in data.client_sizes()], everything)
    )


def network(callbacks: Sequence[Any], rounds: int = 7, **options: Any) -> Run:
    """Three of eight clients of unequal size, one and a half epochs of batches of four."""
    x, y, clients = samples()
    rate, decay = options.pop("lr", 0.3), options.pop("weight_decay", 0.01)
    momentum = options.pop("momentum", 0.0)
    options.setdefault("local_epochs", 1.5)
    return fit(
        Network(),
        InMemoryDataModule((x, y), clients=clients, batch_size=BATCH),
        callbacks,
        rounds,
        participation=options.pop("participation", 3),
        client_optimizer=lambda p: torch.optim.SGD(p, rate, weight_decay=decay, momentum=momentum),
        **options,
    )


def quadratics(
    problem: Quadratic, start: Vector, callbacks: Sequence[Any], rounds: int, **options: Any
) -> Run:
    """All of a client's samples in one batch: K_i = local_steps of full gradients."""
    m, rate = len(problem.centre), options.pop("lr", 0.05)
    number = torch.arange(m, dtype=torch.float64).reshape(m, 1)
    return fit(
        Quadratics(problem, start),
        InMemoryDataModule(
            (number, torch.zeros(m)), clients=[[i] for i in range(m)], batch_size=None
        ),
        callbacks,
        rounds,
        client_optimizer=lambda p: torch.optim.SGD(p, rate),
        **options,
    )


def _samples(data: Any, positions: Any) -> tuple[Any, Any]:
    x, y = data._given_sets["train"]
    return x.numpy()[positions], y.numpy()[positions]


def _batches(module: FederatedModule, data: Any, t: int, client: int) -> list[Any]:
    mine, size = data.client_indices(client), data.batch_size or len(data.client_indices(client))
    batches: list[Any] = []
    for epoch in range(module.steps(t, client)):
        order = mine[data.order(client, t, epoch)]
        batches += [_samples(data, order[k : k + size]) for k in range(0, len(order), size)]
        if len(batches) >= module.steps(t, client):
            break
    return batches[: module.steps(t, client)]
