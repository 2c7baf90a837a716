"""FedDisco: clients whose labels differ much from the target distribution count for less.

R. Ye, M. Xu, J. Wang, C. Xu, S. Chen, Y. Wang: FedDisco: Federated Learning with Discrepancy-aware
Collaboration (ICML 2023), arXiv:2305.19229.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from fl_lightning.callback import (
    Clients,
    ClientState,
    FederatedCallback,
    NonNegativeFloat,
    Paper,
    Server,
    UserError,
)


class DiscrepancyWeights(FederatedCallback):
    """d = Σ p_i' u_i with p_i' ∝ max(0, p_i - a d_i + b), over the participants.

    d_i is the distance of the client's label distribution q_i from the target T. If all p_i' are
    0, the p_i stay. With a = b = 0 it is FedAvg, up to rounding.
    Sent: d_i, a number, up. Kept by each client: that number.

    Args:
        a, b: from 0.
        metric: d_i. ``"kl"``: Σ q_i log(q_i/T), divided by its sum over the participants unless
            that is 0; ``"l1"``, ``"l2"``: ‖q_i - T‖; ``"cosine"``: 1 - cos(q_i, T).
        target: T, one number per class, with sum 1; None: uniform.

    Raises:
        UserError: a value is not accepted; the data have no class labels; target has another number
            of classes; or another method combines updates.

    Example:
        without a and b it is FedAvg.

        >>> from fl_lightning.callbacks import DiscrepancyWeights
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(DiscrepancyWeights(a=0.0, b=0.0))
        >>> run.global_vector.allclose(tiny_run().global_vector)
        True
    """

    title = "FedDisco"
    paper = Paper("ye2023feddisco")
    moves_start = False
    cannot_run_with = {"parts": "its weights would be of parts that are not averaged, too"}
    distance = ClientState(
        shape=(), dtype=torch.float64, synchronised=False, reported=True, least=0.0
    )

    def __init__(
        self,
        a: NonNegativeFloat = 0.5,
        b: NonNegativeFloat = 0.1,
        metric: Literal["kl", "l1", "l2", "cosine"] = "kl",
        target: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.a = a
        self.b = b
        self.metric = metric
        self.target = target
        if target is None:
            return
        least = min(target, default=-1.0)
        if least < 0 or abs(sum(target) - 1) > 1e-6 or (metric == "kl" and not least):
            above = "above 0" if metric == "kl" else "from 0"
            raise UserError(
                f"DiscrepancyWeights: target={list(target)} has to be numbers {above} with sum 1, "
                "one per class."
            )

    def on_local_start(self, clients: Clients) -> None:
        counts = clients.label_counts.double()
        q = counts / counts.sum(1, keepdim=True)
        classes = q.shape[1]
        target = torch.full((classes,), 1 / classes, dtype=q.dtype, device=q.device)
        if self.target is not None:
            if len(self.target) != classes:
                raise UserError(
                    f"DiscrepancyWeights: target has {len(self.target)} numbers, and the data have "
                    f"{classes} classes. Give one number per class."
                )
            target = torch.tensor(self.target, dtype=q.dtype, device=q.device)
        if self.metric == "kl":
            distance = (torch.xlogy(q, q) - torch.xlogy(q, target)).sum(1)
        elif self.metric == "cosine":
            distance = 1 - cosine_similarity(q, target[None], dim=1)
        else:
            distance = torch.linalg.vector_norm(q - target, 1 if self.metric == "l1" else 2, dim=1)
        # Rounding may leave a distance slightly below 0.
        self.distance[clients] = distance.clamp(min=0.0)

    def aggregate(self, server: Server, updates: Tensor) -> Tensor:
        if not server.n:
            return server.update
        p = server.weights.double()
        distance = torch.cat([rows for _, rows in self.distance.staged(server)]).to(p)
        if self.metric == "kl" and bool(distance.sum() > 0):
            distance = distance / distance.sum()
        weights = (p - self.a * distance + self.b).clamp(min=0.0)
        if not bool(weights.sum() > 0):
            weights = p
        weights = weights / weights.sum()
        return (weights[:, None] * updates.double()).sum(0)
