"""FedEx-LoRA: the error of averaging A and B separately is added to the frozen weights.

R. Singhal, K. Ponkshe, P. Vepakomma: FedEx-LoRA: Exact Aggregation for Federated and Efficient
Fine-Tuning of Large Language Models (ACL 2025), arXiv:2410.09432.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.callback import (
    Base,
    FederatedCallback,
    NonNegativeInt,
    Paper,
    Server,
    low_rank,
)


class ResidualMerge(FederatedCallback):
    """A and B are averaged; W ← W + s (Σ p_i B_i A_i - B̄ Ā).

    The residual is Σ_{i<n} p_i (B_i - B̄)(A_i - A_n), which is sent as n - 1 pairs of factors. It
    does not depend on the model that the clients were given.
    Sent: as by FedAvg, and down also the residuals that the client has not had yet. Kept: nothing
    by clients; the server keeps the changed weights.

    Args:
        rank: number of the residual's singular values that are kept; None: all. 0 is FedAvg.

    Example:
        With one client per round there is no residual.

        >>> from fl_lightning.callbacks import ResidualMerge
        >>> from fl_lightning.testing import tiny_run
        >>> alone = tiny_run(ResidualMerge(), participation=1).base["first.weight"]
        >>> three = tiny_run(ResidualMerge()).base["first.weight"]
        >>> alone.equal(tiny_run(ResidualMerge(rank=0)).base["first.weight"]), alone.equal(three)
        (True, False)
    """

    title = "FedEx-LoRA"
    paper = Paper("singhal2025fedexlora", vectors=None)
    needs_adapters = True
    needs_products = True
    neutral = {"rank": 0}
    base = Base()

    def __init__(self, rank: NonNegativeInt | None = None) -> None:
        super().__init__()
        self.rank = rank

    def aggregate(self, server: Server, updates: Tensor) -> Tensor:
        n = len(updates)
        if n < 2 or self.rank == 0:
            return server.update
        for adapter in server.layout.adapters:
            left, right = low_rank.residual(server, adapter)
            if self.rank is not None:
                columns = min(self.rank, len(right))
                right, left = low_rank.cut(left, right, columns, torch.zeros_like(right[:columns]))
            self.base.add(adapter.weight, *adapter.addition(left, right))
        return server.update
