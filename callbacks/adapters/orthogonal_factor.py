"""FedSVD: the server gives each adapter an A with orthonormal rows.

S. Lee, S. Park, D. B. Lee, D. Wagner, H. Seong, T. Bocklet, J. Lee, S. J. Hwang: FedSVD: Adaptive
Orthogonalization for Private Federated Learning with LoRA (NeurIPS 2025), arXiv:2505.12805. Clients
train only B, so the noise of differential privacy is not multiplied by noise. The server adapts A
to the product B A that the clients have trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.callback import (
    Clients,
    FederatedCallback,
    Layout,
    Paper,
    PositiveInt,
    Server,
    ServerState,
    low_rank,
)


class OrthogonalFactor(FederatedCallback):
    """Clients do not train A; then the server sets A ← V_rᵀ, B ← U_r Σ_r, with B A = U Σ Vᵀ.

    The server does this after averaging in each ``period``-th round. The product B A stays equal.
    Sent: B and other parameters in both directions; A down, if it changed since the client last
    received the model. Kept: nothing.

    Args:
        period: number of rounds, from 1; None: A never changes, which is FFA-LoRA bit for bit.

    Raises:
        UserError: period is below 1; the learner has no adapters, or adapters without products.

    Example:
        After a round the rows of A are orthonormal.

        >>> import torch
        >>> from fl_lightning.callbacks import OrthogonalFactor
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(OrthogonalFactor())
        >>> a, _ = run.layout.adapters[0].matrices(run.global_vector)
        >>> (a @ a.T).allclose(torch.eye(len(a), dtype=a.dtype))
        True
    """

    title = "FedSVD"
    paper = Paper("lee2025fedsvd", vectors=None)
    needs_adapters = True
    needs_products = True
    cannot_run_with = {
        "broadcast": low_rank.OF_OTHER_MODELS,
        **dict.fromkeys(
            (
                *("CorrectedFactor", "PaddedRanks", "ResidualMerge", "StackedAdapters"),
                "TruncatedProduct",
            ),
            "both decide the adapters' factors after a round",
        ),
    }
    order = 1
    restarts = True
    server_moves = True
    alike = True
    moves_start = False
    # One more than the round after which A last changed; 0: it is w^0's.
    changed = ServerState(shape=(), dtype=torch.int64, synchronised=False)

    def __init__(self, period: PositiveInt | None = 1) -> None:
        super().__init__()
        self.period = period

    def trained(self, clients: Clients) -> Tensor:
        return self._trained(clients.layout).to(clients.x.device).expand_as(clients.x)

    def numbers_down(self, layout: Layout, t: int, last: int | None) -> int | None:
        trained = int(self._trained(layout).sum())
        return layout.size if int(self.changed) > (last or 0) else trained

    def remembers_sent(self) -> bool:
        return True

    def on_server_update(self, server: Server) -> None:
        if self.period is None or (server.round + 1) % self.period:
            return
        w = server.w.detach()
        after = w + server.update
        for adapter in server.layout.adapters:
            a, b = (factor.double() for factor in adapter.matrices(after))
            made_a, made_b = low_rank.cut(b, a, adapter.rank, a)
            steps = adapter.matrices(server.update)
            for step, made, old in zip(steps, (made_a, made_b), adapter.matrices(w), strict=True):
                step.copy_(made.to(old) - old)

    def on_round_end(self, server: Server) -> None:
        moved = server.w != server.w_before
        if any(adapter.matrices(moved)[0].any() for adapter in server.layout.adapters):
            self.changed = torch.tensor(server.round + 1)

    @staticmethod
    def _trained(layout: Layout) -> Tensor:
        return ~layout.mask([adapter.a for adapter in layout.adapters])
