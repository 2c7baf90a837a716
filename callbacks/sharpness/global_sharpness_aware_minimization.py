"""FedSMOO's perturbation: sharpness-aware minimization of the global loss.

Y. Sun, L. Shen, S. Chen, L. Ding, D. Tao: Dynamic Regularized Sharpness Aware Minimization in
Federated Learning: Approaching Global Consistency and Smooth Landscape (ICML 2023), Algorithm 1,
arXiv:2305.11584. Each client's perturbation is corrected towards a common one, s. FedSMOO is this
together with DynamicRegularization.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.callback import (
    Clients,
    ClientState,
    Coefficient,
    FederatedCallback,
    Paper,
    Schedule,
    Scratch,
    Server,
    ServerState,
    Upload,
    ordered_norm,
)


class GlobalSharpnessAwareMinimization(FederatedCallback):
    """q = g - μ_i - s; e = r q/‖q‖; μ_i ← μ_i + e - s; the gradient is taken at x + e.

    At the server s ← r U/‖U‖ with U = mean(μ_i - e).
    The paper does not define it for partial averaging, which raises an error.
    Sent: s down, μ_i - e up. Kept: μ_i by each client, s by the server. Two gradients per step.

    Args:
        radius: r, from 0; 0 is FedAvg.
        ignore_last: send μ_i, so that U = mean(μ_i), as in the authors' simulator.

    Example:
        FedSMOO. The common perturbation has the norm r.

        >>> from fl_lightning.callbacks import DynamicRegularization
        >>> from fl_lightning.callbacks import GlobalSharpnessAwareMinimization
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(DynamicRegularization(), GlobalSharpnessAwareMinimization(radius=0.1))
        >>> round(float(run.server_states["GlobalSharpnessAwareMinimization.s"].norm()), 6)
        0.1
    """

    title = "FedSMOO's perturbation"
    paper = Paper("sun2023fedsmoo", vectors=2)
    moves_start = False
    neutral = {"radius": 0.0}
    cannot_run_with = {
        "parts": (
            "the paper does not say what the common perturbation is where a part is not averaged"
        )
    }
    radius = Coefficient(least=0)
    mu_i = ClientState(synchronised=False)
    s = ServerState(sent=True, synchronised=False)
    shift = Scratch()  # μ_i + s
    last = Scratch()
    dual = Upload()

    def __init__(self, radius: float | Schedule = 0.1, ignore_last: bool = False) -> None:
        super().__init__()
        self.radius = radius
        self.ignore_last = ignore_last

    def on_local_start(self, clients: Clients) -> None:
        self.shift[clients] = self.mu_i[clients] + self.s

    def perturbation(self, clients: Clients, gradient: Tensor) -> Tensor:
        shift = self.shift[clients]
        e = self.last[clients]
        q = torch.sub(gradient, shift, out=e)
        # If q = 0 there is no direction, so e = 0. This reuses q's memory.
        norm = clients.norm(q)
        e = q.mul_((self.radius / norm).nan_to_num(posinf=0.0))
        shift.add_(e).sub_(self.s)
        return e

    def on_local_end(self, clients: Clients) -> None:
        mu_i = self.shift[clients] - self.s
        self.mu_i[clients] = mu_i
        self.dual[clients] = mu_i if self.ignore_last else mu_i - self.last[clients]

    def on_server_update(self, server: Server) -> None:
        mean = self.dual.mean()
        norm = ordered_norm(mean)
        self.s = mean * (self.radius / norm).nan_to_num(posinf=0.0)
