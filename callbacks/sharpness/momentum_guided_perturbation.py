"""FedWMSAM: the server's momentum decides where the gradient is taken, and is mixed into it.

T. Li, Y. Huang, L. Jiang, C. Liu, Q. Xie, W. Du, L. Wang, K. Wu: FedWMSAM: Fast and Flat Federated
Learning via Weighted Momentum and Sharpness-Aware Minimization (NeurIPS 2025), arXiv:2511.22080.
The perturbation costs no gradient. The share of the momentum depends on how far clients move along
it.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from fl_lightning.callback import (
    MEAN_GRADIENT,
    Above,
    Below,
    Clients,
    ClientState,
    Coefficient,
    FederatedCallback,
    Paper,
    Schedule,
    Scratch,
    Server,
    ServerState,
    UnitInterval,
    Upload,
    UserError,
)


class MomentumGuidedPerturbation(FederatedCallback):
    """g ← α ∇ℓ(x + e) + (1 - α) Δ_i with e = ρ δ/‖δ‖, δ = w + k Δ_i - x in step k = 0, 1, ….

    Δ_i = Δ + α/(1 - α) (c - c_i), fixed in the round. At its end G_i = (x_{i,0} - x_{i,K})/(η K_i),
    c_i ← c_i - c + G_i; at the server Δ ← mean G_i, c ← c + (1/m) Σ (G_i - c), and
    α ← (1 - r) α + r min(upper, max(lower, mean ν_i)), ν_i = 1 + cos(x_{i,K} - x_{i,0}, Δ), or 0
    where one of the two is 0. e = 0 where δ = 0. c is the mean of all c_i.
    Sent: Δ, c and α down; nothing more up, unless clients start from a point other than w. Kept:
    c_i by each client; Δ, c and α by the server. One gradient per step, at x + e.

    Args:
        radius: ρ, from 0.
        alpha: α in round 0, above 0 and below 1.
        rate: r, from 0 to 1; 0: α is fixed.
        lower, upper: bounds of the value that α follows, above 0 and below 1.

    Example:
        c is the mean of all c_i, after every round.

        >>> import torch
        >>> from fl_lightning.callbacks import MomentumGuidedPerturbation
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(MomentumGuidedPerturbation(), participation="all")
        >>> name = "MomentumGuidedPerturbation"
        >>> c_i = [run.client_rows.read(f"{name}.c_i", i) for i in range(6)]
        >>> torch.stack(c_i).mean(0).allclose(run.server_states[f"{name}.c"])
        True
    """

    notes = (MEAN_GRADIENT,)
    title = "FedWMSAM"
    paper = Paper("li2025fedwmsam", vectors=2)
    moves_start = False
    cannot_run_with = {"parts": "its momentum is of displacements of one round"}
    radius = Coefficient(least=0)
    c_i = ClientState(synchronised=False)
    delta = ServerState(sent=True, synchronised=False)
    c = ServerState(sent=True, synchronised=False)
    mixing: Tensor  # α^t, a state that __init__ declares
    guide = Scratch()  # Δ_i
    velocity = Upload(sent="derived")
    alignment = Upload(sent="derived", shape=())  # ν_i

    def __init__(
        self,
        radius: float | Schedule = 0.01,
        alpha: Annotated[float, Above(0), Below(1)] = 0.1,
        rate: UnitInterval = 0.01,
        lower: Annotated[float, Above(0), Below(1)] = 0.1,
        upper: Annotated[float, Above(0), Below(1)] = 0.9,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if lower > upper:
            raise UserError(f"{name}: lower={lower:g} is above upper={upper:g}. Exchange them.")
        self.radius = radius
        self.alpha = alpha
        self.rate = rate
        self.lower = lower
        self.upper = upper
        first = float(alpha)
        mixing = ServerState(
            initial=lambda w: first, shape=(), dtype=torch.float64, sent=True, synchronised=False
        )
        self.declare("mixing", mixing)

    def on_local_start(self, clients: Clients) -> None:
        odds = self.mixing / (1 - self.mixing)
        self.guide[clients] = self.delta + odds * (self.c - self.c_i[clients])

    def perturbation(self, clients: Clients) -> Tensor:
        away = clients.w + clients.step * self.guide[clients] - clients.x
        e: Tensor = away * (self.radius / clients.norm(away)).nan_to_num(posinf=0.0)
        return e

    def on_loss_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient.mul_(self.mixing).add_((1 - self.mixing) * self.guide[clients])

    def on_local_end(self, clients: Clients) -> None:
        velocity = clients.mean_gradient
        self.c_i[clients] += velocity - self.c
        self.velocity[clients] = velocity
        moved = clients.x - clients.start
        lengths = clients.norm(moved)[:, 0] * torch.linalg.vector_norm(self.delta)
        along = (moved * self.delta).sum(1)
        self.alignment[clients] = torch.where(lengths > 0, 1 + along / lengths, 0.0)

    def on_server_update(self, server: Server) -> None:
        velocity = self.velocity.mean()
        self.delta = velocity
        self.c += server.n / server.num_clients * (velocity - self.c)
        follows = self.alignment.mean().clamp(self.lower, self.upper)
        self.mixing = (1 - self.rate) * self.mixing + self.rate * follows
