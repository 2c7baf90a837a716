"""FedLab's serial trainers: FedAvg, and SCAFFOLD (Option II)."""

from __future__ import annotations

from typing import Any

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.algorithm.scaffold import ScaffoldSerialClientTrainer, ScaffoldServerHandler
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers import Missing, Rounds
from benchmarks.workloads import LR, Workload


def play(work: Workload, processes: int, rounds: Rounds) -> None:
    if work.methods not in ((), ("ControlVariates",)):
        raise Missing(f"it has no {' + '.join(work.methods)}")
    torch.manual_seed(0)
    network = work.others()
    x, y = work.arrays()
    own = list(zip(x.split(work.samples), y.split(work.samples), strict=True))
    losses: list[Tensor] = []

    class Data:
        def get_dataloader(self, client: int, batch_size: int) -> Any:
            return DataLoader(TensorDataset(*own[client]), batch_size=batch_size, shuffle=True)

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        loss = cross_entropy(output, target)
        losses.append(loss.detach())
        return loss

    trainer = (ScaffoldSerialClientTrainer if work.methods else SGDSerialClientTrainer)(
        network, work.registered
    )
    trainer.setup_dataset(Data())
    trainer.setup_optim(work.epochs, work.batch_size, LR)
    trainer.optimizer = torch.optim.SGD(
        trainer._model.parameters(), LR, weight_decay=work.weight_decay
    )
    trainer.criterion = criterion
    sampled = work.clients / work.registered
    if work.methods:
        handler = ScaffoldServerHandler(network, 10**6, sampled)
        handler.setup_optim(lr=1.0)
    else:
        handler = SyncServerHandler(network, 10**6, sampled)
    handler.num_clients = work.registered

    def round() -> float:
        losses.clear()
        trainer.local_process(handler.downlink_package, list(range(work.clients)))
        for package in trainer.uplink_package:
            handler.load(package)
        return float(torch.stack(losses).mean())

    rounds(round)
