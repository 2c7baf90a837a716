"""FedALA: a client starts between its own last model and the server's, coordinate by coordinate.

J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan: FedALA: Adaptive Local Aggregation for
Personalized Federated Learning (AAAI 2023), arXiv:2212.01197. Before the round the client's own
loss decides how much of the server's model it takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.callback import (
    Clients,
    ClientState,
    Coefficient,
    FederatedCallback,
    Layout,
    NonNegativeInt,
    Paper,
    Schedule,
)


class AdaptiveLocalAggregation(FederatedCallback):
    """x_0 = θ = last + (w - last) ⊙ W on ``parts``, w elsewhere; W is trained before the round.

    ``steps`` times W ← clip(W - η_W G ⊙ (w - last), 0, 1), G = ∇f_i(θ) over all training samples,
    without weight decay. W is 1 at first. last is the client's latest x_K, and w before it ever
    took part, so a client's first round is FedAvg's. The client itself uses θ, computed with the
    new w.
    Sent: nothing that FedAvg does not send. Kept by each client: last and W. Each round costs
    ``steps`` more passes over the client's samples.

    Args:
        parts: ``"last"`` (layer), one pattern of parameter names (``fnmatch``), or several
            patterns.
        learning_rate: η_W, from 0.
        steps: number of updates of W per round; 0 is FedAvg.

    Raises:
        UserError: a pattern matches nothing.

    Example:
        Without steps W stays 1, which is FedAvg to the last bit.

        >>> from fl_lightning.callbacks import AdaptiveLocalAggregation
        >>> from fl_lightning.testing import tiny_run
        >>> fedavg = tiny_run().global_vector
        >>> tiny_run(AdaptiveLocalAggregation(steps=0)).global_vector.equal(fedavg)
        True
    """

    title = "FedALA"
    paper = Paper("zhang2023fedala")
    neutral = {"steps": 0}
    cannot_run_with = {
        "moves_start": "its clients start between their last model and the server's",
        "parts": "its clients keep their own last model, and start from it",
    }
    learning_rate = Coefficient(least=0)
    last = ClientState(initial="current_model", synchronised=False)
    W = ClientState(initial=torch.ones_like, synchronised=False)

    def __init__(
        self,
        parts: str | Sequence[str] = "last",
        learning_rate: float | Schedule = 1.0,
        steps: NonNegativeInt = 5,
    ) -> None:
        super().__init__()
        # `parts` and `steps` are names of hooks, so the attributes need other names.
        self.parts_ = parts
        self.learning_rate = learning_rate
        self.steps_ = steps

    def on_layout(self, layout: Layout) -> None:
        self.learned = layout.mask(layout.named(self.parts_, "AdaptiveLocalAggregation"))

    def start(self, clients: Clients) -> Tensor:
        """θ ``(n, D)``."""
        # Where W is 1, the result has exactly the bits of w.
        between = torch.lerp(self.last[clients], clients.w.expand_as(clients.x), self.W[clients])
        return torch.where(self.learned.to(clients.x.device), between, clients.w)

    def on_local_start(self, clients: Clients) -> None:
        away = clients.w - self.last[clients]
        learned = self.learned.to(clients.x.device)
        for _ in range(self.steps_):
            theta = self.start(clients)
            g = clients.full_gradient(theta) - clients.weight_decay * theta
            moved = (self.W[clients] - self.learning_rate * g * away).clamp(0, 1)
            self.W[clients] = torch.where(learned, moved, self.W[clients])
        clients.x = self.start(clients)

    def on_local_end(self, clients: Clients) -> None:
        self.last[clients] = clients.x

    def personal(self, clients: Clients) -> Tensor:
        return self.start(clients)
