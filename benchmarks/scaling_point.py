"""One configuration of ``benchmarks.scaling``, in this process.

``python -m benchmarks.scaling_point JSON FOLDER``.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from benchmarks.scaling import Configuration
from benchmarks.workloads import LR, Learner, quiet_trainer
from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.callbacks import ControlVariates
from fl_lightning.datamodules import Dirichlet
from fl_lightning.models import MLP
from fl_lightning.sampling import generator


class FromFew(FederatedModule):
    """Participants are drawn from ``returning`` of the clients, spread over all ids."""

    returning = 0

    def participants(self, t: int) -> tuple[int, ...]:
        n, m = self.cohort.n, self.cohort.m
        drawn = generator(self.run_seed, "participants", t).choice(self.returning, n, replace=False)
        return tuple(sorted(int(i) * (m // self.returning) for i in drawn))


class Watch(pl.Callback):
    """Sets the store's budget, and takes times and resident memory as rounds go by."""

    def __init__(self, budget: int, folder: Path) -> None:
        self.budget = budget
        self.folder = folder
        self.rounds: list[float] = []
        self.starts: list[float] = []
        self.cpu: list[float] = []
        self.resident: list[float] = []
        self.open_files: list[int] = []
        self.threads: list[int] = []
        self.disk: list[float] = []  # every tenth round

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.client_rows.store.budget_bytes = self.budget

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._stamp()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.rounds.append(float(trainer.callback_metrics["time/round"]))
        self.resident.append(memory_mb("VmRSS"))
        self.open_files.append(len(os.listdir("/proc/self/fd")))
        self.threads.append(len(os.listdir("/proc/self/task")))
        if len(self.rounds) % 10 == 0:
            self.disk.append(megabytes_in(self.folder))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._stamp()

    def _stamp(self) -> None:
        self.starts.append(time.perf_counter())
        self.cpu.append(time.process_time())


def megabytes_in(folder: Path) -> float:
    """Of all files below a folder, in MiB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20


def memory_mb(what: str) -> float:
    """VmRSS (resident now) or VmHWM (its peak) of this process, in MiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(what))


def spans(stamps: list[float], every: int) -> list[float]:
    """Per round, over as many rounds as one checkpoint is written for.

    Without the first round, which warms up.
    """
    marks = stamps[1 if len(stamps) > every + 1 else 0 :: every]
    return [(b - a) / every for a, b in pairwise(marks)]


def late(values: Sequence[float]) -> float:
    """Median of the last tenth."""
    return statistics.median(values[-max(1, len(values) // 10) :])


def measure(wanted: Configuration, folder: Path) -> None:
    """Run one configuration in this process.

    What was found goes to ``folder/facts-<rank>.json``.
    """
    imported, began = memory_mb("VmRSS"), time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(2000, 64), torch.randint(0, 10, (2000,))
    # lazy: nothing is held per client
    partition = Dirichlet(0.3, replacement=True, samples_per_client=50)
    data = InMemoryDataModule(
        (x, y), partition=partition, num_clients=wanted.clients, batch_size=10
    )
    network = MLP([64, max(1, round((wanted.parameters - 10) / 75)), 10])
    learner = Learner(network, partial(torch.optim.SGD, lr=LR))
    kind = FromFew if wanted.returning else FederatedModule
    module = kind(
        learner, participation=wanted.participants, local_epochs=1, seed=1, engine="sequential"
    )
    if isinstance(module, FromFew):
        module.returning = wanted.returning
    size = sum(p.numel() for p in learner.parameters())
    watch = Watch(wanted.rows_in_memory * 4 * size, folder / "run")
    checkpoints = ModelCheckpoint(
        folder / "run" / "checkpoints",
        filename="last",
        enable_version_counter=False,
        every_n_epochs=wanted.checkpoint_every,
    )
    several = {"devices": wanted.processes, "strategy": "federated"} if wanted.processes > 1 else {}
    trainer = quiet_trainer(
        wanted.rounds, [ControlVariates(), watch, checkpoints], enable_checkpointing=True, **several
    )
    trainer.fit(module, data)
    every = min(wanted.checkpoint_every, wanted.rounds)
    rounds, whole, cpu = watch.rounds[1:], spans(watch.starts, every), spans(watch.cpu, every)
    facts = {
        "parameters": module.layout.size,
        "round": statistics.median(rounds),
        "round_late": late(rounds),
        "whole": statistics.median(whole),
        "whole_late": late(whole),
        "cpu": statistics.median(cpu),
        "cpu_late": late(cpu),
        "peak_mb": memory_mb("VmHWM") - imported,
        "grown_mb": watch.resident[-1] - watch.resident[len(watch.resident) // 10],
        "start": watch.starts[0] - began,
        "seconds": watch.rounds,
        "resident": watch.resident,
        "open_files": watch.open_files,
        "threads": watch.threads,
        "disk": watch.disk,
        "cpu_each": [b - a for a, b in pairwise(watch.cpu)],
    }
    (folder / f"facts-{trainer.global_rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    measure(Configuration(**json.loads(sys.argv[1])), Path(sys.argv[2]))
