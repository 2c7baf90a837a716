"""The yardstick: one round of FedAvg, SCAFFOLD or DFedAvg as a plain PyTorch loop, one client after
the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from torchvision.transforms import Compose, RandomCrop, RandomHorizontalFlip

from benchmarks.workloads import LR, Pictures, Workload, loss_of

Arrays = tuple[Tensor, Tensor]


def prepared(work: Workload, device: str) -> Callable[[], float]:
    """A workload's round, which gives its mean loss.

    FedAvg's work stands for methods that the loop does not have.
    """
    torch.manual_seed(0)
    loop = (OnARing if "Gossip" in work.methods else Bare)(work, device)
    return lambda: loop.round(loop.clients)


class Bare:
    """Trains clients from the global model, and averages them.

    With control variates of Option II where the workload's method is SCAFFOLD.
    """

    def __init__(self, work: Workload, device: str = "cpu") -> None:
        self.work = work
        self.network = work.others().to(device)
        self.scaffold = "ControlVariates" in work.methods
        self.clients: list[Any]
        if work.pictures:
            pictures = Pictures(*work.arrays())
            ends = np.cumsum([0, *work.sizes()])
            self.clients = [Subset(pictures, range(a, b)) for a, b in pairwise(ends.tolist())]
        else:
            self.clients = [(x.to(device), y.to(device)) for x, y in work.parts()]
        self.c = [torch.zeros_like(p) for p in self.network.parameters()]
        self.c_i: dict[int, list[Tensor]] = {}

    def round(self, clients: Sequence[Any]) -> float:
        """One round; returns the mean loss over clients and steps."""
        w = [p.detach().clone() for p in self.network.parameters()]
        total, moved = [torch.zeros_like(p) for p in w], [torch.zeros_like(p) for p in w]
        losses: list[Tensor] = []
        for client, samples in enumerate(clients):
            model = copy.deepcopy(self.network)
            with torch.no_grad():
                for p, value in zip(model.parameters(), w, strict=True):
                    p.copy_(value)
            c_i = self.c_i.get(client, [torch.zeros_like(p) for p in w])
            correction = [a - b for a, b in zip(self.c, c_i, strict=True)]
            steps = self.train(model, samples, correction, losses)
            with torch.no_grad():
                for t, p in zip(total, model.parameters(), strict=True):
                    t += p / len(clients)
                if self.scaffold:
                    scale = 1 / (LR * steps)
                    trained = list(model.parameters())
                    new = [
                        ci - c + scale * (before - after)
                        for ci, c, before, after in zip(c_i, self.c, w, trained, strict=True)
                    ]
                    for m, n, o in zip(moved, new, c_i, strict=True):
                        m += (n - o) / len(clients)
                    self.c_i[client] = new
        with torch.no_grad():
            for p, t in zip(self.network.parameters(), total, strict=True):
                p.copy_(t)
            for c, m in zip(self.c, moved, strict=True):
                c += len(clients) / self.work.registered * m
        return float(torch.stack(losses).mean())

    def epoch(self, samples: Any) -> Iterator[Arrays]:
        size = self.work.batch_size
        if self.work.pictures:
            yield from DataLoader(samples, size, shuffle=True)
            return
        x, y = samples
        for chosen in torch.randperm(len(x)).split(size):
            yield cropped_and_flipped(x[chosen]) if self.work.augment else x[chosen], y[chosen]

    def train(
        self, model: nn.Module, samples: Any, correction: Sequence[Tensor], losses: list[Tensor]
    ) -> int:
        optimizer = self.work.optimizer(model.parameters())
        steps = 0
        for _ in range(self.work.epochs):
            for x, y in self.epoch(samples):
                optimizer.zero_grad()
                loss = loss_of(model(x), y)
                loss.backward()
                if self.scaffold:
                    for p, add in zip(model.parameters(), correction, strict=True):
                        assert p.grad is not None
                        p.grad += add
                optimizer.step()
                losses.append(loss.detach())
                steps += 1
        return steps


class OnARing(Bare):
    """DFedAvg: clients train their own models, and take the mean with those of two neighbours."""

    def __init__(self, work: Workload, device: str = "cpu") -> None:
        super().__init__(work, device)
        first = [p.detach().clone() for p in self.network.parameters()]
        self.models = [first for _ in self.clients]

    def round(self, clients: Sequence[Any]) -> float:
        trained, losses = [], list[Tensor]()
        for own, samples in zip(self.models, clients, strict=True):
            model = copy.deepcopy(self.network)
            with torch.no_grad():
                for p, value in zip(model.parameters(), own, strict=True):
                    p.copy_(value)
            self.train(model, samples, (), losses)
            trained.append([p.detach() for p in model.parameters()])
        left, right = [trained[-1], *trained[:-1]], [*trained[1:], trained[0]]
        self.models = [
            [(a + b + c) / 3 for a, b, c in zip(*three, strict=True)]
            for three in zip(left, trained, right, strict=True)
        ]
        return float(torch.stack(losses).mean())


def cropped_and_flipped(x: Tensor) -> Tensor:
    """Random crops with padding 4 and flips, in two calls per picture, as torchvision's."""
    transform = Compose([RandomCrop(x.shape[-1], padding=4), RandomHorizontalFlip()])
    return torch.stack([transform(picture) for picture in x])
