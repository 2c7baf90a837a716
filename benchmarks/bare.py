"""The yardstick: one round of FedAvg or SCAFFOLD as a plain PyTorch loop, one client after the
other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.workloads import LR, Workload

Arrays = tuple[Tensor, Tensor]


def prepared(work: Workload, device: str) -> Callable[[], float]:
    """A workload's round, which gives its mean loss.

    FedAvg's work stands for methods that the loop does not have.
    """
    torch.manual_seed(0)
    loop = Bare(
        work.others().to(device), work.epochs, work.batch_size, LR, work.weight_decay,
        "ControlVariates" in work.methods, work.registered,
    )  # fmt: skip
    x, y = (array.to(device) for array in work.arrays())
    clients = list(zip(x.split(work.samples), y.split(work.samples), strict=True))
    return lambda: loop.round(clients)


class Bare:
    """Trains ``clients`` (their tensors x, y) from the global model, and averages them.

    Args:
        scaffold: with control variates of Option II.
    """

    def __init__(
        self,
        network: nn.Module,
        epochs: int,
        batch_size: int,
        lr: float = 0.1,
        weight_decay: float = 0.0,
        scaffold: bool = False,
        registered: int = 100,
    ) -> None:
        self.network, self.epochs, self.batch_size = network, epochs, batch_size
        self.lr, self.weight_decay, self.scaffold, self.registered = (
            lr,
            weight_decay,
            scaffold,
            registered,
        )
        self.c = [torch.zeros_like(p) for p in network.parameters()]
        self.c_i: dict[int, list[Tensor]] = {}

    def round(self, clients: Sequence[Arrays]) -> float:
        """One round; returns the mean loss over clients and steps."""
        w = [p.detach().clone() for p in self.network.parameters()]
        total, moved = [torch.zeros_like(p) for p in w], [torch.zeros_like(p) for p in w]
        losses: list[Tensor] = []
        for client, (x, y) in enumerate(clients):
            model = copy.deepcopy(self.network)
            with torch.no_grad():
                for p, value in zip(model.parameters(), w, strict=True):
                    p.copy_(value)
            c_i = self.c_i.get(client, [torch.zeros_like(p) for p in w])
            correction = [a - b for a, b in zip(self.c, c_i, strict=True)]
            steps = self.train(model, x, y, correction, losses)
            with torch.no_grad():
                for t, p in zip(total, model.parameters(), strict=True):
                    t += p / len(clients)
                if self.scaffold:
                    scale = 1 / (self.lr * steps)
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
                c += len(clients) / self.registered * m
        return float(torch.stack(losses).mean())

    def train(
        self, model: nn.Module, x: Tensor, y: Tensor, correction: list[Tensor], losses: list[Tensor]
    ) -> int:
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        steps = 0
        for _ in range(self.epochs):
            order = torch.randperm(len(x))
            for start in range(0, len(x), self.batch_size):
                chosen = order[start : start + self.batch_size]
                optimizer.zero_grad()
                loss = self.loss(model, x[chosen], y[chosen])
                loss.backward()
                if self.scaffold:
                    for p, add in zip(model.parameters(), correction, strict=True):
                        assert p.grad is not None
                        p.grad += add
                optimizer.step()
                losses.append(loss.detach())
                steps += 1
        return steps

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """What a step minimises."""
        return cross_entropy(model(x), y)
