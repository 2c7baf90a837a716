"""LoRA-FAIR: the server corrects the mean of B, so that its product with A is closer to the
clients' products.

J. Bian, L. Wang, L. Zhang, J. Xu: LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and
Initialization Refinement (ICCV 2025), arXiv:2411.14961. The paper corrects B by gradient steps;
this class uses the closed form of a ridge regression.
"""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from fl_lightning.callback import (
    AtLeast,
    AtMost,
    Diverged,
    FederatedCallback,
    Paper,
    Server,
    low_rank,
)


class CorrectedFactor(FederatedCallback):
    """A ← Ā, B ← B̄ + ΔB, ΔB = argmin ‖Σ p_i B_i A_i - (B̄ + ΔB) Ā‖² + λ ‖ΔB‖².

    Σ p_i B_i A_i - B̄ Ā is the spread of the clients' factors. It does not depend on the model that
    the clients were given, and Ā is the A of the next model, with all that other methods add.
    Sent and kept: as by FedAvg.

    Args:
        penalty: λ, at least 0; with infinity it is FedAvg.

    Example:
        With an infinite penalty the mean stays, to the bit.

        >>> from fl_lightning.callbacks import CorrectedFactor
        >>> from fl_lightning.testing import tiny_run
        >>> plain = tiny_run(adapters=True).global_vector
        >>> tiny_run(CorrectedFactor(float("inf"))).global_vector.equal(plain)
        True
    """

    title = "LoRA-FAIR"
    paper = Paper("bian2024lorafair", vectors=None)
    needs_adapters = True
    needs_products = True
    order = 1
    neutral = {"penalty": math.inf}

    def __init__(self, penalty: Annotated[float, AtLeast(0), AtMost(math.inf)] = 0.01) -> None:
        super().__init__()
        self.penalty = penalty

    def aggregate(self, server: Server) -> Tensor:
        # The mean. Its B is corrected below, when all other methods have changed the update: the
        # correction belongs to the A of the next model.
        return server.update

    def on_server_update(self, server: Server, updates: Tensor) -> None:
        if len(updates) < 2 or self.penalty == math.inf:
            return
        model = (server.w + server.update).double()
        correction = torch.zeros_like(server.update)
        for adapter in server.layout.adapters:
            left, right = low_rank.residual(server, adapter)
            a, _ = adapter.matrices(model)
            if self.penalty:
                # (R Aᵀ)(A Aᵀ + λ I)⁻¹, with R = left right
                ridge = a @ a.T + self.penalty * torch.eye(len(a)).to(a)
                solved, failed = torch.linalg.solve_ex(ridge, (left @ (right @ a.T)).T)
                if failed:
                    raise Diverged(
                        f"CorrectedFactor: the factor A of {adapter.name} became so large in round "
                        f"{server.round} that its ridge regression has no solution. Lower the "
                        "clients' learning rate, or set clip_norm."
                    )
                change = solved.T
            else:
                change = left @ (right @ torch.linalg.pinv(a))
            adapter.matrices(correction)[1].copy_(change)
        server.update += correction
