"""K-GT: gradient tracking with local steps, beside Gossip.

Y. Liu, T. Lin, A. Koloskova, S. U. Stich: Decentralized Gradient Tracking with Local Steps (2023),
arXiv:2301.01313. With one local step it is DSGT. Each client corrects its gradients by its
neighbours', as SCAFFOLD does by the server's.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import (
    AfterExchange,
    Clients,
    ClientState,
    Exchanged,
    FederatedCallback,
    Paper,
)


class GradientTracking(FederatedCallback):
    """g ← g + c_i; then c_i ← c_i - z̄_i + Σ_j V_ij z̄_j, with the mean gradient z̄ of the round.

    z̄_i = (x_{i,0} - x_{i,K}) / Σ η. Σ_i c_i stays 0. V is that of :class:`Gossip`, which has to be
    there. The paper's first c_i is a gradient; here it is 0.
    Sent: z̄_i to each neighbour, beside Gossip's model. Kept by each client: c_i.

    Example:
        after one round c_i is how far a client's mean gradient is from its neighbours'.

        >>> from fl_lightning.callbacks import GradientTracking, Gossip
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(Gossip(), GradientTracking(), participation="all", buffers="own")
        >>> rows = [run.client_rows.read("GradientTracking.c_i", i) for i in range(6)]
        >>> bool(sum(rows).abs().max() < 1e-6), bool(rows[0].abs().max() > 1e-6)
        (True, True)
    """

    title = "K-GT"
    paper = Paper("liu2023kgt")
    needs_callbacks = ("Gossip",)
    c_i = ClientState(synchronised=False)
    mean = Exchanged()

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient += self.c_i[clients]

    def on_local_end(self, clients: Clients) -> None:
        mean = clients.mean_gradient
        self.mean[clients] = mean
        self.c_i[clients] -= mean

    def on_exchange(self, clients: AfterExchange) -> None:
        self.c_i[clients] += self.mean[clients]
