"""Per-FedAvg: a model from which one gradient step serves each client well.

A. Fallah, A. Mokhtari, A. Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach (NeurIPS 2020), arXiv:2002.07948. The federation minimises the
mean of f_i(x - a ∇f_i(x)); clients use the model after fine-tuning it.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fl_lightning.callback import (
    Clients,
    Coefficient,
    FederatedCallback,
    Paper,
    PositiveFloat,
    Schedule,
)


class MetaGradient(FederatedCallback):
    """g = g' = ∇ℓ(x - a ∇ℓ(x)), or ``hessian="free"``: g' - a (∇ℓ(x + δ g') - ∇ℓ(x - δ g'))/(2 δ).

    All gradients of a step use its one batch; the paper draws independent batches. The adapted
    point does not include weight decay.
    Sent and kept: nothing more than by FedAvg. Two gradients per step, or four.

    Args:
        inner_lr: a, from 0; 0 with ``hessian="none"`` is FedAvg.
        hessian: ``"none"`` (first order) or ``"free"`` (by finite differences).
        delta: δ, above 0.

    Example:
        with a = 0 it is FedAvg, to the last bit.

        >>> from fl_lightning.callbacks import MetaGradient
        >>> from fl_lightning.testing import tiny_run
        >>> fedavg = tiny_run().global_vector
        >>> tiny_run(MetaGradient(inner_lr=0.0)).global_vector.equal(fedavg)
        True
    """

    title = "Per-FedAvg"
    paper = Paper("fallah2020perfedavg")
    tolerates_staleness = True
    neutral = {"inner_lr": 0.0, "hessian": "none"}
    inner_lr = Coefficient(least=0)

    def __init__(
        self,
        inner_lr: float | Schedule = 0.01,
        hessian: Literal["none", "free"] = "none",
        delta: PositiveFloat = 1e-3,
    ) -> None:
        super().__init__()
        self.inner_lr = inner_lr
        self.hessian = hessian
        self.delta = delta
        if hessian == "free":
            self.use("on_loss_gradient", self.curved)

    def perturbation(self, clients: Clients, gradient: Tensor) -> Tensor:
        return gradient.mul_(-self.inner_lr)

    def curved(self, clients: Clients, gradient: Tensor) -> Tensor:
        """The hook ``on_loss_gradient`` with ``hessian="free"``."""
        aside = self.delta * gradient
        ahead = clients.gradient_at(clients.x + aside)
        behind = clients.gradient_at(clients.x - aside)
        g: Tensor = gradient - self.inner_lr * (ahead - behind) / (2 * self.delta)
        return g
