"""FedTOGA: the last round's global update corrects local perturbations and gradients.

B. Li, Z. Peng, Y. Li, M. Xu, S. Chen, B. Ji, C. Shen: Neighborhood and Global Perturbations
Supported SAM in Federated Learning: From Local Tweaks To Global Awareness (2024), arXiv:2408.14144:
with ``DynamicRegularization``. We read the rule in two codes of other authors, which disagree.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import (
    Clients,
    Coefficient,
    FederatedCallback,
    Paper,
    Schedule,
    Server,
    ServerState,
    Upload,
)


class GlobalUpdateGuidance(FederatedCallback):
    """g = ∇ℓ(x + ρ q/‖q‖) + β Δ with q = ∇ℓ(x) + κ Δ; Δ ← mean (x_{i,0} - x_{i,K})/K_i.

    Δ is not divided by the learning rate, and is 0 in the first round; e is 0 where q = 0.
    Sent: Δ down; nothing more up, unless clients start from a point other than w. Kept: Δ by the
    server. Two gradients per step.

    Args:
        radius: ρ, from 0.
        kappa: κ, from 0.
        beta: β, from 0; with 0 and radius 0 it is FedAvg.

    Example:
        In the first round Δ is 0, so it is FedSAM.

        >>> from fl_lightning.callbacks import GlobalUpdateGuidance, SharpnessAwareMinimization
        >>> from fl_lightning.testing import tiny_run
        >>> ours = tiny_run(GlobalUpdateGuidance(radius=0.1), rounds=1).global_vector
        >>> ours.allclose(tiny_run(SharpnessAwareMinimization(0.1), rounds=1).global_vector)
        True
    """

    title = "global update guidance"
    paper = Paper("li2024fedtoga", vectors=2)
    neutral = {"radius": 0.0, "beta": 0.0}
    cannot_run_with = {"parts": "its Δ is of displacements of one round"}
    radius = Coefficient(least=0)
    kappa = Coefficient(least=0)
    beta = Coefficient(least=0)
    delta = ServerState(sent=True, synchronised=False)
    moved = Upload(sent="derived")

    def __init__(
        self,
        radius: float | Schedule = 0.1,
        kappa: float | Schedule = 1.0,
        beta: float | Schedule = 0.9,
    ) -> None:
        super().__init__()
        self.radius = radius
        self.kappa = kappa
        self.beta = beta

    def perturbation(self, clients: Clients, gradient: Tensor) -> Tensor:
        q = gradient.add_(self.delta, alpha=self.kappa)
        return q.mul_((self.radius / clients.norm(q)).nan_to_num(posinf=0.0))

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient.add_(self.delta, alpha=self.beta)

    def on_local_end(self, clients: Clients) -> None:
        self.moved[clients] = (clients.start - clients.x) / clients.steps

    def on_server_update(self, server: Server) -> None:
        self.delta = self.moved.mean()
