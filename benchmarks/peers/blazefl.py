"""BlazeFL's FedAvg, in a pool of threads or of processes with shared memory (Python 3.12)."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from blazefl.contrib.fedavg import (
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from blazefl.core import IPCMode
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers import Missing, Peer, Rounds
from benchmarks.workloads import LR, Workload


class Networks:
    """Gives each client a network."""

    def __init__(self, work: Workload) -> None:
        self.work = work

    def select_model(self, model_name: str) -> nn.Module:
        return self.work.others()


class Data:
    """Each participant's samples."""

    def __init__(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        self.sets = [TensorDataset(*part) for part in parts]

    def get_dataset(self, type_: Any, cid: int | None) -> Any:
        return self.sets[cid or 0]

    def set_dataset(self, type_: Any, cid: int | None, dataset: Any) -> None:
        pass

    def get_dataloader(
        self, type_: Any, cid: int | None, batch_size: int | None, generator: Any = None
    ) -> Any:
        own = self.sets[cid or 0]
        return DataLoader(own, batch_size=batch_size, shuffle=True, generator=generator)


class Recorded(nn.CrossEntropyLoss):
    """Keeps each step's loss, which BlazeFL does not return."""

    losses: list[Tensor] = []

    def forward(self, *arguments: Any) -> Tensor:
        loss: Tensor = super().forward(*arguments)
        self.losses.append(loss.detach())
        return loss


class Quiet:
    """Shows no progress."""

    def progress_fn(self, it: Any) -> Any:
        return it


class Threads(Quiet, FedAvgThreadPoolClientTrainer):
    """A pool of threads."""


class Processes(Quiet, FedAvgProcessPoolClientTrainer):
    """A pool of processes, new in each round."""


def play(work: Workload, peer: Peer, rounds: Rounds) -> None:
    if work.methods or work.adam or work.text or work.pictures or work.weight_decay:
        raise Missing("its clients take steps of plain SGD on classes, without weight decay")
    nn.CrossEntropyLoss = Recorded  # type: ignore[misc]
    torch.multiprocessing.set_start_method("fork", force=True)
    networks: Any = Networks(work)
    data: Any = Data(work.parts())
    with tempfile.TemporaryDirectory() as folder:
        rounds(prepared(work, peer, networks, data, Path(folder)))


def prepared(
    work: Workload, peer: Peer, networks: Any, data: Any, folder: Path
) -> Callable[[], float]:
    given: Any = {
        "model_selector": networks,
        "model_name": "",
        "dataset": data,
        "device": "cpu",
        "num_clients": work.registered,
        "epochs": work.epochs,
        "batch_size": work.batch_size,
        "lr": LR,
        "seed": 0,
        "num_parallels": peer.workers,
    }
    trainer: Any
    if peer.apart:
        more: Any = {"share_dir": folder / "share", "state_dir": folder / "state"}
        trainer = Processes(**given, **more, ipc_mode=IPCMode.SHARED_MEMORY)
    else:
        trainer = Threads(**given)
    server = FedAvgBaseServerHandler(
        networks, "", data, 10**6, work.registered, 1.0, "cpu", work.batch_size, 0
    )
    server.num_clients_per_round = work.clients

    def round() -> float:
        Recorded.losses.clear()
        with contextlib.redirect_stderr(None):
            trainer.local_process(server.downlink_package(), list(range(work.clients)))
        for package in trainer.uplink_package():
            server.load(package)
        # Those of processes are not sent back.
        losses = Recorded.losses or [torch.tensor(torch.nan)]
        return float(torch.stack(losses).mean())

    return round
