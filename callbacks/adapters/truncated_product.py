"""FlexLoRA: adapters of unequal ranks; their mean product is cut by its singular values.

J. Bai, D. Chen, B. Qian, L. Yao, Y. Li: Federated Fine-tuning of Large Language Models under
Heterogeneous Tasks and Client Resources (NeurIPS 2024), arXiv:2402.11505.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import Clients, FederatedCallback, Layout, Paper, Server, low_rank


class TruncatedProduct(FederatedCallback):
    """M = Σ p_i B_i A_i of each adapter is cut to its largest singular values.

    M = U Σ Vᵀ; the server's B becomes U_r Σ_r, its A V_rᵀ. Client i trains the first r_i rows of A
    and columns of B; their product is M cut to rank r_i. Other trainable parameters are averaged.
    Sent: in each direction the client's rows and columns, and the other trainable parameters.
    Kept: nothing.

    Args:
        ranks: None: every client trains the adapter's whole rank; a list with one rank per client;
            or ``{rank: share}`` of the clients, drawn from the seed.

    Example:
        With one client per round the server's product is that client's.

        >>> from fl_lightning.callbacks import TruncatedProduct
        >>> from fl_lightning.testing import tiny_run
        >>> one = tiny_run(participation=1, rounds=1, adapters=True)
        >>> cut = tiny_run(TruncatedProduct(), participation=1, rounds=1)
        >>> def product(module):
        ...     a, b = module.layout.adapters[0].matrices(module.global_vector)
        ...     return (b @ a).detach()
        >>> bool((product(one) - product(cut)).abs().max() < 1e-12)
        True
    """

    title = "FlexLoRA"
    paper = Paper("bai2024flexlora", vectors=None)
    needs_adapters = True
    needs_products = True
    cannot_run_with = {"broadcast": low_rank.OF_OTHER_MODELS}
    restarts = True
    untrained = "zero"
    moves_start = False
    draws_by_client = True

    def __init__(self, ranks: list[int] | dict[int, float] | None = None) -> None:
        super().__init__()
        self.ranks = ranks
        self._of_client = low_rank.Ranks(ranks, type(self).__name__)
        if not self._of_client.equal:
            self.use("trained", self._mask)

    def check_layout(self, layout: Layout, num_clients: int, w: Tensor) -> None:
        super().check_layout(layout, num_clients, w)
        self._of_client.check(layout, num_clients)

    def _mask(self, clients: Clients) -> Tensor:
        return low_rank.mask(clients.layout, self._of_client.of(clients))

    def aggregate(self, server: Server, updates: Tensor) -> Tensor:
        # The mean of the clients' updates, which is right for all parameters except adapters.
        update = server.update.clone()
        if not len(updates):
            return update
        received = low_rank.Received(server, self._of_client.at(server))
        for adapter in server.layout.adapters:
            left, right = received.stacked(adapter)
            a, _ = adapter.matrices(server.w)
            received.put(update, adapter, *low_rank.cut(left, right, adapter.rank, a))
        return update
