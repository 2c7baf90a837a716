"""Adaptive server optimizers: FedAdam, FedYogi, FedAdagrad.

S. J. Reddi et al.: Adaptive Federated Optimization (ICLR 2021), Algorithm 2, arXiv:2003.00295.
FedAdam and FedAdagrad differ from torch.optim.Adam and Adagrad: v starts at τ², τ is added to √v,
and there is no bias correction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.introspection.accepted import BelowOne, NonNegativeFloat, PositiveFloat, checked
from fl_lightning.introspection.papers import Paper


@checked
class _Adaptive(Optimizer):
    """m ← β1 m + (1 - β1) d; v as each class has it; w ← w + η m / (√v + τ).

    The gradient is -d.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: NonNegativeFloat,
        beta1: BelowOne,
        beta2: BelowOne,
        tau: PositiveFloat,
        bias_correction: bool,
        initial_v: NonNegativeFloat | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta1": beta1,
            "beta2": beta2,
            "tau": tau,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)
        if initial_v is None:
            initial_v = 0.0 if bias_correction else tau**2
        # Create the state before the first step, because partial averaging restores it for parts
        # that are not averaged.
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {
                    "m": torch.zeros_like(p),
                    "v": torch.full_like(p, initial_v, requires_grad=False),
                }
                if bias_correction:
                    self.state[p]["step"] = torch.zeros((), dtype=torch.float64)

    @staticmethod
    def second_moment(v: Tensor, squared: Tensor, beta2: float) -> None:
        """Change v in place, given d²; each subclass has its own rule."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        # Lightning's closure calls the callbacks' on_before_optimizer_step.
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p]["m"]
                v = self.state[p]["v"]
                d = -p.grad
                m.lerp_(d, 1 - group["beta1"])
                self.second_moment(v, d**2, group["beta2"])
                if group["bias_correction"]:
                    k = self.state[p]["step"].add_(1)
                    m = m / (1 - group["beta1"] ** k)
                    v = v / (1 - group["beta2"] ** k)
                p.addcdiv_(m, v.sqrt() + group["tau"], value=group["lr"])
        return loss


class FedAdam(_Adaptive):
    """v ← β2 v + (1 - β2) d². FedInit's and FedSMOO's papers use lr 0.1.

    Args:
        params: the parameters to optimise.
        lr: η_g.
        betas: (β1, β2).
        tau: τ, in √v + τ; also √v before the first step.
        bias_correction: as in torch.optim.Adam, with v from 0; not in the paper's Algorithm 2.
        initial_v: v before the first step, such as 0 in FL-Simulator; None: τ², or 0 with
            ``bias_correction``.
    """

    paper = Paper("reddi2021adaptive")

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
        bias_correction: bool = False,
        initial_v: float | None = None,
    ) -> None:
        super().__init__(params, lr, betas[0], betas[1], tau, bias_correction, initial_v)

    @staticmethod
    def second_moment(v: Tensor, squared: Tensor, beta2: float) -> None:
        v.lerp_(squared, 1 - beta2)


class FedYogi(FedAdam):
    """v ← v - (1 - β2) d² sign(v - d²). The arguments are those of :class:`FedAdam`."""

    @staticmethod
    def second_moment(v: Tensor, squared: Tensor, beta2: float) -> None:
        v.sub_(squared * torch.sign(v - squared), alpha=1 - beta2)


class FedAdagrad(_Adaptive):
    """v ← v + d².

    Args:
        params: the parameters to optimise.
        lr: η_g.
        beta1: β1; 0 is no momentum.
        tau: τ, in √v + τ; also √v before the first step.
    """

    paper = Paper("reddi2021adaptive")

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, beta1: float = 0.0, tau: float = 1e-3
    ) -> None:
        super().__init__(params, lr, beta1, 0.0, tau, False)

    @staticmethod
    def second_moment(v: Tensor, squared: Tensor, beta2: float) -> None:
        v.add_(squared)
