"""A method as its author writes it. FedAvgM on a median of clipped updates, and clients chosen by
their last loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning import ClientState, Coefficient, FederatedCallback, ServerState


class ClippedMedian(FederatedCallback):
    """u_i <- u_i min(1, C/|u_i|); m <- beta m + median(u); d = m. Largest last losses take part."""

    beta = Coefficient(below=1)
    clip = Coefficient(above=0)
    m = ServerState(synchronised=True)
    loss = ClientState(initial=lambda w: torch.inf, shape=(), synchronised=False)

    def __init__(self, beta: float = 0.9, clip: float = 10.0) -> None:
        super().__init__()
        self.beta, self.clip = beta, clip

    def select(self, server: Any, available: Tensor, n: int) -> Tensor:
        drawn = server.generator("candidates").choice(
            len(available), min(2 * n, len(available)), replace=False
        )
        candidates = available[torch.from_numpy(drawn)]
        return candidates[
            self.loss.rows(server, candidates).argsort(descending=True, stable=True)[:n]
        ]

    def on_local_start(self, clients: Any) -> None:
        self.loss[clients] = clients.evaluate(clients.w)["loss"][:, 0]

    def on_updates(self, server: Any) -> None:
        norms = server.updates.norm(dim=1, keepdim=True)
        server.updates *= (self.clip / norms).clamp(max=1)
        server.log("clipped/share", (norms > self.clip).double().mean())

    def aggregate(self, server: Any, updates: Tensor) -> Tensor:
        self.m = self.beta * self.m + updates.median(0).values
        return self.m
