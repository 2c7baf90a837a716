"""Ditto: besides the global model each client trains its own, which is pulled towards the global
one.

T. Li, S. Hu, A. Beirami, V. Smith: Ditto: Fair and Robust Federated Learning Through
Personalization (ICML 2021), Algorithm 1, arXiv:2012.04221: client i minimises f_i(v) + (λ/2)‖v -
w‖²; w is FedAvg's.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import (
    ROUND_RATE,
    Clients,
    ClientState,
    Coefficient,
    FederatedCallback,
    NonNegativeFloat,
    Paper,
    Schedule,
)


class ProximalPersonalModel(FederatedCallback):
    """In each local step also v_i ← v_i - η (∇ℓ(v_i) + λ_wd v_i + λ (v_i - w)), on the same batch.

    v_i is w^0 at first; the client uses it itself. v_i takes plain steps at the learning rate of x,
    whatever the optimizer of x is, without clipping, and with the buffers from before x's step. x
    and w are FedAvg's, to the last bit, for every λ.
    Sent: nothing more than by FedAvg. Kept by each client: v_i. Two gradients per step.

    Args:
        strength: λ, from 0; with 0 each client's own model is trained only in the rounds in which
            the client takes part.

    Example:
        The global model is FedAvg's, and with a stronger pull the personal models lie closer to it.

        >>> from fl_lightning.callbacks import ProximalPersonalModel
        >>> from fl_lightning.testing import tiny_run
        >>> def distance(run):
        ...     own = run.client_rows.read("ProximalPersonalModel.v", 2)
        ...     return float((own - run.global_vector).norm())
        >>> weak = tiny_run(ProximalPersonalModel(0.1), participation="all")
        >>> strong = tiny_run(ProximalPersonalModel(2.0), participation="all")
        >>> weak.global_vector.equal(tiny_run(participation="all").global_vector)
        True
        >>> distance(strong) < distance(weak)
        True
    """

    title = "Ditto"
    paper = Paper("li2021ditto")
    neutral = {}
    notes = (ROUND_RATE,)
    strength = Coefficient(least=0)
    v = ClientState(initial="initial_model", synchronised=False)

    def __init__(self, strength: NonNegativeFloat | Schedule = 0.1) -> None:
        super().__init__()
        self.strength = strength

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        v = self.v[clients]
        g = clients.gradient_at(v) + clients.weight_decay * v + self.strength * (v - clients.w)
        v -= clients.lr * g

    def personal(self, clients: Clients) -> Tensor:
        return self.v[clients]
