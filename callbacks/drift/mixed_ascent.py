"""FedSpeed: dynamic regularization, and a gradient from a point at which the loss is higher.

Y. Sun, L. Shen, T. Huang, L. Ding, D. Tao: FedSpeed: Larger Local Interval, Less Communication
Round, and Higher Generalization Accuracy (ICLR 2023), Algorithm 1, arXiv:2302.10429. Each step
mixes the gradients at x and at x + ρ g/‖g‖, and is corrected by a dual (the paper's ĝ_i, our λ_i)
and a pull towards w, with penalty a (the paper's 1/λ).
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fl_lightning.callback import (
    UNIFORM_OPTIMUM,
    Clients,
    ClientState,
    Coefficient,
    FederatedCallback,
    Note,
    Paper,
    Schedule,
    Scratch,
    Server,
    ServerState,
    Upload,
)


class MixedAscent(FederatedCallback):
    """g ← (1 - α) ∇ℓ(x) + α ∇ℓ(x + e) - λ_i + a (x - w); λ_i ← λ_i - a (x_{i,K} - w).

    e = ρ g/‖g‖ over all D coordinates with g = ∇ℓ(x), without weight decay; 0 where g = 0. The
    server's rule is that of the authors' code: λ ← λ - (a/m) Σ (x_{i,K} - w) and d ← d - λ/a. So
    with α = 1 it is DynamicRegularization and SharpnessAwareMinimization. With ``"participants"``
    the rule is as printed: clients send x_{i,K} - λ_i/a in place of x_{i,K}. If all clients take
    part, the two rules are equal.
    Sent: nothing more than by FedAvg. Kept: λ_i by each client; λ by the server, except with
    ``"participants"``. Two gradients per step, whatever α and ρ. With a method that compresses
    updates (SignUpdate) each client also sends x_{i,K} - w, which is counted: λ has to be exact,
    and the server cannot compute it from a compressed update.

    Args:
        penalty: a > 0.
        alpha: α, from 0; the authors' code has 1.
        radius: ρ, from 0.
        normalised: if False, e = ρ g, as Algorithm 1 prints it; the authors' code normalises.
        aggregate: the clients whose duals the server adds. ``"all"``: every client's latest dual;
            ``"participants"``, as printed: those of this round, which misses the optimum unless all
            clients take part.

    Example:
        The authors' code equals two other methods together.

        >>> from fl_lightning.callbacks import DynamicRegularization, MixedAscent
        >>> from fl_lightning.callbacks import SharpnessAwareMinimization
        >>> from fl_lightning.testing import tiny_run
        >>> two = tiny_run(DynamicRegularization(0.1), SharpnessAwareMinimization(0.1))
        >>> tiny_run(MixedAscent(0.1, radius=0.1)).global_vector.allclose(two.global_vector)
        True
    """

    title = "FedSpeed"
    paper = Paper("sun2023fedspeed")
    tolerates_staleness = True
    moves_start = False
    notes = (
        UNIFORM_OPTIMUM,
        Note(
            "with {n} of {m} clients per round, aggregate='participants' (the rule as printed in "
            "the paper) does not reach the optimum of the clients' mean; aggregate='all' does.",
            when=lambda method, run: method.aggregate_ == "participants" and run.n < run.m,
        ),
    )
    penalty = Coefficient(above=0)
    alpha = Coefficient(least=0)
    radius = Coefficient(least=0)
    dual = ClientState(synchronised=True)
    anchor = Scratch()
    first = Scratch()  # ∇ℓ(x)
    # An instance has this attribute only if it differs, and a resumed run must have the same value.
    aggregate_ = "all"  # `aggregate` is a hook

    def __init__(
        self,
        penalty: float | Schedule = 0.1,
        alpha: float | Schedule = 1.0,
        radius: float | Schedule = 0.1,
        normalised: bool = True,
        aggregate: Literal["all", "participants"] = "all",
    ) -> None:
        super().__init__()
        self.penalty = penalty
        self.alpha = alpha
        self.radius = radius
        self.normalised = normalised
        if aggregate == "participants":
            self.aggregate_ = aggregate
            self.use("transmit", self.less_the_dual)
        else:
            self.declare("dual_mean", ServerState(synchronised=True))
            self.declare("moved", Upload(sent="derived from x"))

    def on_local_start(self, clients: Clients) -> None:
        # Each step adds a x and a vector that is fixed for the round.
        self.anchor[clients] = self.dual[clients].add(clients.w, alpha=self.penalty)

    def perturbation(self, clients: Clients, gradient: Tensor) -> Tensor:
        self.first[clients] = gradient
        if not self.normalised:
            return gradient.mul_(self.radius)
        return gradient.mul_((self.radius / clients.norm(gradient)).nan_to_num(posinf=0.0))

    def on_loss_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient.mul_(self.alpha).add_(self.first[clients], alpha=1 - self.alpha)

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient.add_(clients.x, alpha=self.penalty).sub_(self.anchor[clients])

    def on_local_end(self, clients: Clients) -> None:
        moved = clients.x - clients.w
        self.dual[clients].sub_(moved, alpha=self.penalty)
        if self.aggregate_ == "all":
            self.moved[clients] = moved

    def less_the_dual(self, clients: Clients, update: Tensor) -> Tensor:
        """The message of a client with ``aggregate="participants"``."""
        sent: Tensor = update - self.dual[clients] / self.penalty
        return sent

    def on_server_update(self, server: Server) -> None:
        if self.aggregate_ == "all":
            self.dual_mean -= self.penalty / server.num_clients * self.moved.sum()
            server.update -= self.dual_mean / self.penalty
