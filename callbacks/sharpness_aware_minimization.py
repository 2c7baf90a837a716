"""FedSAM: sharpness-aware minimization in the local steps.

Z. Qu et al.: Generalized Federated Learning via Sharpness Aware Minimization (ICML 2022). The gradient is taken at
x + ρ g/‖g‖ on the same batch.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import Clients, Coefficient, FederatedCallback, Schedule


class SharpnessAwareMinimization(FederatedCallback):
    """e = ρ g/‖g‖ over all D coordinates, 0 where g = 0; no weight decay in g.

    Args:
        radius: ρ; 0 is FedAvg.
    """

    title = "FedSAM"
    neutral = {"radius": 0.0}
    radius = Coefficient()

    def __init__(self, radius: float | Schedule = 0.01) -> None:
        super().__init__()
        self.radius = radius

    def perturbation(self, clients: Clients, gradient: Tensor) -> Tensor:
        norm = clients.norm(gradient)
        return gradient.mul_((self.radius / norm).nan_to_num(posinf=0.0))
