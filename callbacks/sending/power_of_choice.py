"""Power-of-Choice: among some drawn clients, those with the largest loss take part.

Y. J. Cho, J. Wang, G. Joshi: Towards Understanding Biased Client Selection in Federated Learning
(AISTATS 2022; in 2020 Client Selection in Federated Learning: Convergence Analysis and
Power-of-Choice Selection Strategies, arXiv:2010.01243), in its cheap form, rpow-d: a client's last
known loss stands for its present one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.callback import (
    Clients,
    ClientState,
    FederatedCallback,
    Paper,
    PositiveInt,
    Server,
)


class PowerOfChoice(FederatedCallback):
    """d candidates are drawn in proportion to N_i; the n of them with the largest F_i take part.

    F_i is the mean loss of client i's local steps in its latest round, and ∞ before its first, so
    that every client comes first once. If losses are equal, the clients that were drawn first take
    part. A client whose loss is not finite comes after all other drawn clients, until it has taken
    part again.
    Sent: one number up. Kept: F_i, one number per client, by client and server.

    Args:
        candidates: d. If it is below the number of participants, that number counts. None: twice
            the number of participants.

    Example:
        in two rounds of three, each of six clients takes part once.

        >>> from fl_lightning.callbacks import PowerOfChoice
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(PowerOfChoice(candidates=6), rounds=2)
        >>> sorted(run.participants(0) + run.participants(1))
        [0, 1, 2, 3, 4, 5]
    """

    title = "Power-of-Choice"
    paper = Paper("cho2022power")
    last = ClientState(
        initial=lambda w: torch.inf,
        synchronised=False,
        shape=(),
        dtype=torch.float64,
        reported=True,
    )

    def __init__(self, candidates: PositiveInt | None = None) -> None:
        super().__init__()
        self.candidates = candidates

    def select(self, server: Server, available: Tensor, n: int) -> Tensor:
        d = min(max(self.candidates or 2 * n, n), len(available))
        sizes = server.sizes(available).cpu().numpy()
        draw = server.generator("power of choice").choice(
            len(available), d, replace=False, p=sizes / sizes.sum()
        )
        drawn = available[torch.from_numpy(draw).to(available.device)]
        losses = self.last.rows(server, drawn).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        # A stable order: among equal losses, the clients drawn first come first, on every device.
        return drawn[losses.argsort(descending=True, stable=True)[:n]]

    def on_local_end(self, clients: Clients, loss: Tensor) -> None:
        finite = loss.isfinite()
        self.last[clients] = torch.where(finite, loss, -torch.inf)[:, 0]
