"""One run with each engine, all that it left after each round, and how near two runs are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.callback import ClientState, FederatedCallback, Scratch, Upload
from tests.helpers.federation import BATCH, Network, Recorder, samples
from tests.helpers.learners import trainer

Case = tuple[list[Any], dict[str, Any]]  # callbacks, and arguments of the module
SIZES = [1, 5, 9, 4, 12, 3]
DOUBLE, SINGLE = 1e-9, 1e-5
CLIPPED: dict[str, Any] = {"clip_norm": 0.9, "weighting": "samples"}


class Logged(Network):
    """Logs its loss at each step, and something at its third step alone, which not every client
    takes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.log("train/loss", loss)
        if batch_idx == 2:
            self.log("train/third", loss)
        return loss


class EveryHook(FederatedCallback):
    """Uses all that a hook can use in each local step, where clients that have finished must not
    take part."""

    seen = ClientState(synchronised=False)
    steps = Scratch(shape=(), dtype=torch.int64)
    sent = Upload(sent=False)

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        clients.log("gradient", clients.norm(gradient))
        return gradient * (1 + self.steps[clients][:, None])

    def on_local_step_end(self, clients: Any) -> None:
        rows = self.steps[clients]
        rows += 1
        self.seen[clients] += clients.x
        clients.x -= 0.1 * clients.full_gradient(clients.x)
        self.sent[clients] = clients.x * rows[:, None]
        clients.log("steps", rows.double())

    def on_server_update(self, server: Any) -> None:
        server.log("sent", self.sent.mean().sum())


def in_memory(x: Tensor, y: Tensor, clients: list[Any]) -> Any:
    return InMemoryDataModule((x, y), clients=clients, batch_size=BATCH)


@dataclass
class Run:
    module: FederatedModule
    record: Recorder
    trainer: pl.Trainer


def trained(
    case: Case,
    engine: str,
    *,
    learner: Callable[[], pl.LightningModule] = Logged,
    data: Callable[..., Any] = in_memory,
    dtype: torch.dtype = torch.float64,
    rounds: int = 3,
    start: Path | None = None,
    **options: Any,
) -> Run:
    """Four of six clients of one to three local steps; ``start``: the checkpoint to go on from."""
    callbacks, given = case
    given = {"participation": 4, "local_epochs": 1, "lr_decay": 0.9, **given, **options}
    momentum = given.pop("momentum", 0.0)
    given.setdefault(
        "client_optimizer", lambda p: torch.optim.SGD(p, 0.3, weight_decay=0.01, momentum=momentum)
    )
    x, y, clients = samples(SIZES)
    record = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = FederatedModule(learner().to(dtype), seed=1, engine=engine, **given)
        fitted = trainer(rounds, [*callbacks, record])
        fitted.fit(module, data(x.to(dtype), y, clients), ckpt_path=start)
    return Run(module, record, fitted)


def values(run: Run, last: int = 0) -> dict[str, Any]:
    """All that a run left after each of its (``last``) rounds, by name."""
    found: dict[str, Any] = {}
    record = run.record
    for t in range(-last or -len(record.w), 0):
        now = {"w": record.w[t], "evaluated": record.evaluated[t], **record.server[t]}
        now |= {
            f"{name} of client {i}": row
            for name, rows in record.rows[t].items()
            for i, row in rows.items()
        }
        now |= {f"server optimizer's {name}": value for name, value in record.optimizer[t].items()}
        now |= {
            name: value for name, value in record.metrics[t].items() if not name.startswith("time/")
        }
        found |= {f"{name}, {-t} from the end": np.asarray(value) for name, value in now.items()}
    return found


def same_bits(run: Run, reference: Run, last: int = 0) -> None:
    ours, theirs = values(run, last), values(reference, last)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and ours[name].tobytes() == value.tobytes(), name


def near(run: Run, reference: Run, tolerance: float = DOUBLE, last: int = 0) -> None:
    """Differences are relative to the largest number of what they are in."""
    ours, theirs = values(run, last), values(reference, last)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if "top_residual" in name:  # is rounding itself
            continue
        assert ours[name].dtype == value.dtype and ours[name].shape == value.shape, name
        scale = max(np.abs(value).max(initial=0.0, where=np.isfinite(value)), 1e-3)
        assert np.allclose(ours[name], value, rtol=0, atol=tolerance * scale, equal_nan=True), name
