"""FedLab's serial trainers: FedAvg, and SCAFFOLD (Option II)."""

from __future__ import annotations

from typing import Any

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.algorithm.scaffold import ScaffoldSerialClientTrainer, ScaffoldServerHandler
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers import Missing, Peer, Rounds
from benchmarks.workloads import LR, Workload, loss_of


def play(work: Workload, peer: Peer, rounds: Rounds) -> None:
    if work.pictures:
        raise Missing("its clients' samples are tensors here")
    if work.methods not in ((), ("ControlVariates",)):
        raise Missing(f"it has no {' + '.join(work.methods)}")
    torch.manual_seed(0)
    network = work.others()
    own = work.parts()
    losses: list[Tensor] = []

    class Data:
        def get_dataloader(self, client: int, batch_size: int) -> Any:
            return DataLoader(TensorDataset(*own[client]), batch_size=batch_size, shuffle=True)

    def criterion(output: Tensor, target: Tensor) -> Tensor:
        loss = loss_of(output, target)
        losses.append(loss.detach())
        return loss

    trainer = (ScaffoldSerialClientTrainer if work.methods else SGDSerialClientTrainer)(
        network, work.registered
    )
    trainer.setup_dataset(Data())
    trainer.setup_optim(work.epochs, work.batch_size, LR)
    trainer.optimizer = work.optimizer(trainer._model.parameters())
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
