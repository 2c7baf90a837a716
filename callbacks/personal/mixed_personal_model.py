"""APFL: each client mixes its own model with the global one, and learns the share of each.

Y. Deng, M. M. Kamani, M. Mahdavi: Adaptive Personalized Federated Learning (2020),
arXiv:2003.13461. Client i minimises f_i(α v + (1 - α) w) over v and α; w is FedAvg's.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import (
    ROUND_RATE,
    Clients,
    ClientState,
    FederatedCallback,
    Paper,
    Scratch,
    UnitInterval,
)


class MixedPersonalModel(FederatedCallback):
    """In each step, before x moves: v ← v - η α g, g = ∇ℓ(v̄) + λ_wd v̄ at v̄ = α v + (1 - α) x.

    With ``adaptive``, after the round: α ← min(1, max(0, α - η⟨v - x, g⟩)), by the last step. v is
    w^0 at first. The client uses α v + (1 - α) w itself. x and w are FedAvg's, to the last bit, for
    every α.
    Sent: nothing more than by FedAvg. Kept by each client: v, and α, a number, if it is learned.
    Two gradients per step.

    Args:
        alpha: the first α of every client, from 0 to 1.
        adaptive: whether α is learned.

    Example:
        the global model is FedAvg's.

        >>> from fl_lightning.callbacks import MixedPersonalModel
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(MixedPersonalModel(), participation="all")
        >>> run.global_vector.equal(tiny_run(participation="all").global_vector)
        True
        >>> bool(0 <= run.client_rows.read("MixedPersonalModel.alpha_i", 2) <= 1)
        True
    """

    title = "APFL"
    paper = Paper("deng2020apfl")
    neutral = {}
    notes = (ROUND_RATE,)
    v = ClientState(initial="initial_model", synchronised=False)
    slope = Scratch(shape=())  # η⟨v - x, g⟩ of the last step

    def __init__(self, alpha: UnitInterval = 0.5, adaptive: bool = True) -> None:
        super().__init__()
        self.alpha = alpha
        self.adaptive = adaptive
        if adaptive:
            first = ClientState(initial=lambda w: alpha, shape=(), synchronised=False)
            self.declare("alpha_i", first)

    def share(self, clients: Clients) -> Tensor | float:
        """α of each client ``(n, 1)``."""
        return self.alpha_i[clients][:, None] if self.adaptive else self.alpha

    def mixed(self, clients: Clients) -> Tensor:
        """α v + (1 - α) x ``(n, D)``."""
        alpha = self.share(clients)
        mixed: Tensor = alpha * self.v[clients] + (1 - alpha) * clients.x
        return mixed

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        v = self.v[clients]
        middle = self.mixed(clients)
        g = clients.gradient_at(middle) + clients.weight_decay * middle
        self.slope[clients] = (clients.lr * (v - clients.x) * g).sum(1)
        v -= clients.lr * self.share(clients) * g

    def on_local_end(self, clients: Clients) -> None:
        if self.adaptive:
            self.alpha_i[clients] = (self.alpha_i[clients] - self.slope[clients]).clamp(0, 1)

    def personal(self, clients: Clients) -> Tensor:
        return self.mixed(clients)
