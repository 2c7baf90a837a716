"""FedSAM: sharpness-aware minimization in the local steps.

Z. Qu, X. Li, R. Duan, Y. Liu, B. Tang, Z. Lu: Generalized Federated Learning via Sharpness Aware
Minimization (ICML 2022), arXiv:2206.02618. The gradient is taken at x + ρ g/‖g‖, on the same batch.
Together with ClientMomentum it is MoFedSAM, together with ControlVariates FedGamma.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import Clients, Coefficient, FederatedCallback, Paper, Schedule


class SharpnessAwareMinimization(FederatedCallback):
    """The gradient is taken at x + e with e = ρ g/‖g‖ over all D coordinates, 0 where g = 0.

    g does not include weight decay.
    Sent and kept: nothing more than by FedAvg. Two gradients per step.

    Args:
        radius: ρ, from 0; 0 is FedAvg.

    Example:
        FedSAM; with radius 0 it is FedAvg, to the last bit.

        >>> from fl_lightning.callbacks import SharpnessAwareMinimization
        >>> from fl_lightning.testing import tiny_run
        >>> fedavg = tiny_run().global_vector
        >>> tiny_run(SharpnessAwareMinimization(radius=0.0)).global_vector.equal(fedavg)
        True
    """

    title = "FedSAM"
    paper = Paper("qu2022fedsam")
    tolerates_staleness = True
    neutral = {"radius": 0.0}
    radius = Coefficient(least=0)

    def __init__(self, radius: float | Schedule = 0.01) -> None:
        super().__init__()
        self.radius = radius

    def perturbation(self, clients: Clients, gradient: Tensor) -> Tensor:
        norm = clients.norm(gradient)
        return gradient.mul_((self.radius / norm).nan_to_num(posinf=0.0))
