"""FedInit: relaxed initialization.

Y. Sun, L. Shen, D. Tao: Understanding How Consistency Works in Federated Learning via Stage-wise Relaxed Initialization
(NeurIPS 2023), Algorithm 1. Each client starts away from where it ended last: x_{i,0} = w + β (w - last_i).
"""

from __future__ import annotations

from typing import Literal

import pytorch_lightning as pl
from torch import Tensor

from fl_lightning.callback import ClientState, Coefficient, FederatedCallback
from fl_lightning.errors import UserError, suggest
from fl_lightning.rounds import Clients
from fl_lightning.schedules import Schedule


class RelaxedInitialization(FederatedCallback):
    """x_{i,0} = w^t + β (w^t - x_{i,K} of the client's latest round).

    With ``aggregate="models"`` a constant drift is amplified without bound iff β > n/(m - n): a warning says so.

    Args:
        beta: β; 0 is FedAvg, may be negative.
        aggregate: ``"models"``: the server averages x_{i,K}, as the paper writes; ``"updates"``: what moved,
            x_{i,K} - x_{i,0}, as the authors' simulator does.
    """

    title = "FedInit"
    neutral = {"beta": 0.0}
    sends = "displacement"  # with aggregate="updates", the one that transmits
    beta = Coefficient()
    last = ClientState(initial="initial_model", synchronised=False)

    def __init__(self, beta: float | Schedule = 0.1, aggregate: Literal["models", "updates"] = "models") -> None:
        super().__init__()
        if aggregate not in ("models", "updates"):
            raise UserError(
                f"RelaxedInitialization: aggregate={aggregate!r} is not known; accepted are 'models' and 'updates'."
                + suggest(str(aggregate), ["models", "updates"])
            )
        self.beta, self.rule = beta, aggregate
        if aggregate == "updates":
            self.transmit = self.moved  # type: ignore[method-assign]

    def on_local_start(self, clients: Clients) -> None:
        clients.x += self.beta * (clients.x - self.last[clients])

    def on_local_end(self, clients: Clients) -> None:
        self.last[clients] = clients.x

    def moved(self, clients: Clients, update: Tensor) -> Tensor:
        """What is sent with ``aggregate="updates"``."""
        return clients.x - clients.origin

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        beta, (n, m) = vars(self)["beta"], pl_module.cohort  # type: ignore[misc]
        if self.rule == "models" and n < m and not isinstance(beta, Schedule) and beta >= n / (m - n):
            pl_module.note(  # type: ignore[operator]
                f"RelaxedInitialization: beta={beta:g} with {n} of {m} clients a round amplifies a constant drift "
                f"without bound; it stays bounded below n/(m - n) = {n / (m - n):.3g}, or with aggregate='updates'."
            )
