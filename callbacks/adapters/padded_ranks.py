"""HetLoRA: adapters of unequal ranks, padded with zeros, weighted by norm, and pruned by clients.

Y. J. Cho, L. Liu, Z. Xu, A. Fahrezi, G. Joshi: Heterogeneous LoRA for Federated Fine-tuning of
On-Device Foundation Models (EMNLP 2024), arXiv:2401.06432.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from fl_lightning.callback import (
    Above,
    AtMost,
    Clients,
    ClientState,
    FederatedCallback,
    Layout,
    NonNegativeFloat,
    Paper,
    Scratch,
    Server,
    low_rank,
)


@lru_cache
def after_pruning(gamma: float, largest: int) -> list[int]:
    """Return max(1, ⌊γ ρ⌋) for each rank ρ = 0, 1, …, with γ read as a decimal."""
    exact = Fraction(str(gamma))
    return [max(1, math.floor(exact * rank)) for rank in range(largest + 1)]


class PaddedRanks(FederatedCallback):
    """Client i trains the first ρ_i rows of A and columns of B; the server pads them with zeros and
    averages.

    Each local loss has + λ Σ ‖B[:, q:ρ]‖ ‖A[q:ρ, :]‖ over the adapters, q = max(1, ⌊γ ρ⌋). If that
    sum is smaller after the last step than before the first, the client prunes: ρ_i ← q. The
    weight of client i is its share of (Σ s² ‖B_i A_i‖²)^{1/2}, or p_i.
    Sent: down ρ_i rows and columns, up as many as are left after pruning; in each direction also
    all other trainable parameters. Kept: ρ_i.

    Args:
        ranks: None: every client begins with the adapter's whole rank; a list with one rank per
            client; or ``{rank: share}`` of the clients, drawn from the seed.
        norm_weighted: weigh adapters by norm; if False, by p_i.
        gamma: γ, above 0, up to 1; with 1 no client prunes.
        penalty: λ, from 0.
        averaged_over: ``"zeros"``: a coordinate that a client does not train counts as 0;
            ``"holders"``: each coordinate is averaged over the clients that train it; ``"all"``: a
            coordinate that a client does not train counts as unchanged.

    Example:
        Without weights by norm and without pruning it is FedAvg.

        >>> from fl_lightning.callbacks import PaddedRanks
        >>> from fl_lightning.testing import tiny_run
        >>> plain = tiny_run(PaddedRanks(norm_weighted=False, gamma=1.0))
        >>> plain.global_vector.equal(tiny_run(adapters=True).global_vector)
        True
        >>> tiny_run(PaddedRanks(gamma=0.5)).client_rows.read("PaddedRanks.rank", 2)
        tensor(2)
    """

    title = "HetLoRA"
    paper = Paper("cho2024hetlora", vectors=None)
    needs_adapters = True
    needs_products = True
    cannot_run_with = {"broadcast": low_rank.OF_OTHER_MODELS}
    untrained = "zero"
    moves_start = False
    draws_by_client = True
    neutral = {"norm_weighted": False, "gamma": 1.0}
    # 0 until a client has finished a round. The server can compute it from the size of the client's
    # message.
    rank = ClientState(shape=(), dtype=torch.int64, synchronised=False, reported="known", least=1)
    present = Scratch(shape=(), dtype=torch.int64)
    smaller = Scratch(shape=(), dtype=torch.int64)
    begun = Scratch(shape=())
    place = Scratch(dtype=torch.int64)

    def __init__(
        self,
        ranks: list[int] | dict[int, float] | None = None,
        norm_weighted: bool = True,
        gamma: Annotated[float, Above(0), AtMost(1)] = 0.99,
        penalty: NonNegativeFloat = 1e-3,
        averaged_over: Literal["holders", "all", "zeros"] = "zeros",
    ) -> None:
        super().__init__()
        self.ranks = ranks
        self.norm_weighted = norm_weighted
        self.gamma = gamma
        self.penalty = penalty
        self.averaged_over = averaged_over
        self._of_client = low_rank.Ranks(ranks, "PaddedRanks")
        if gamma < 1:
            self.use("on_local_start", self._begin)
            self.use("on_local_gradient", self._penalise)
        # With weights p_i and constant ranks, the framework's mean is already the method's.
        if norm_weighted or gamma < 1:
            self.use("aggregate", self._aggregate)
        self._masked = gamma < 1 or not self._of_client.equal
        if self._masked:
            self.use("trained", self._mask)
            self.use("on_local_end", self._prune)

    def check_layout(self, layout: Layout, num_clients: int, w: Tensor) -> None:
        super().check_layout(layout, num_clients, w)
        self._of_client.check(layout, num_clients)

    def not_beside(self, other: FederatedCallback) -> str:
        return "its ranks change between rounds" if self.kept_vector(other) else ""

    def _mask(self, clients: Clients) -> Tensor:
        kept = self.rank[clients]
        present = torch.where(kept > 0, kept, self._of_client.of(clients))
        self.present[clients] = present
        return low_rank.mask(clients.layout, present)

    def _begin(self, clients: Clients) -> None:
        table = after_pruning(self.gamma, low_rank.largest_rank(clients.layout))
        smaller = torch.tensor(table, device=clients.x.device)
        self.smaller[clients] = smaller[self.present[clients]]
        # Every step reads it, and moving it to a GPU takes long.
        self.place[clients] = low_rank.numbers(clients.layout, clients.x.device)
        self.begun[clients] = self._tail(clients)[0]

    def _penalise(self, clients: Clients, gradient: Tensor) -> None:
        gradient.add_(self._tail(clients)[1], alpha=self.penalty)

    def _tail(self, clients: Clients) -> tuple[Tensor, Tensor]:
        """Return Σ ‖B[:, q:ρ]‖ ‖A[q:ρ, :]‖ ``(n,)`` and its gradient ``(n, D)``; 0 if a norm is."""
        x = clients.x
        place = self.place[clients]
        present, smaller = self.present[clients], self.smaller[clients]
        in_tail = (place >= smaller[:, None]) & (place < present[:, None])
        tail = torch.where(in_tail, x, 0.0)
        total = x.new_zeros(len(x))
        gradient = torch.zeros_like(x)
        for adapter in clients.layout.adapters:
            of_a, of_b = (tail[:, each].norm(dim=1, keepdim=True) for each in adapter.places)
            total += (of_a * of_b)[:, 0]
            for each, own, other in zip(adapter.places, (of_a, of_b), (of_b, of_a), strict=True):
                divisor = torch.where(own > 0, own, 1.0)
                gradient[:, each] = other * tail[:, each] / divisor
        return total, gradient

    def _prune(self, clients: Clients) -> None:
        present = self.present[clients]
        if self.gamma < 1:
            prunes = self._tail(clients)[0] < self.begun[clients]
            present = torch.where(prunes, self.smaller[clients], present)
        self.rank[clients] = present
        clients.sent(low_rank.mask(clients.layout, present).sum(1))

    def _aggregate(self, server: Server, updates: Tensor) -> Tensor:
        # The mean of the clients' updates, which is right for all parameters except adapters.
        update = server.update.clone()
        if not len(updates):
            return update
        ranks = self._of_client.at(server)
        if self._masked:
            ranks = torch.cat([rows for _, rows in self.rank.staged(server)])
        received = low_rank.Received(server, ranks)
        weights = self._weights(received, server.layout)[:, None]
        held = received.held.double()
        w = server.w.double()
        new = (weights * received.x).sum(0)
        if self.averaged_over != "zeros":
            new = new - ((weights * held).sum(0)) * w
            if self.averaged_over == "holders":
                share = (weights * held).sum(0)
                new = torch.where(share > 0, new / torch.where(share > 0, share, 1.0), 0.0)
            new = w + new
        adapters = low_rank.numbers(server.layout, w.device) >= 0
        return torch.where(adapters, (new - w).to(update), update)

    def _weights(self, received: Any, layout: Layout) -> Tensor:
        """Return the clients' weights for adapters ``(n,)``, float64."""
        squares = received.x.new_zeros(len(received.x))
        for adapter in layout.adapters if self.norm_weighted else ():
            for row, product in enumerate(received.products(adapter)):
                squares[row] += adapter.scale**2 * product.square().sum()
        norms = squares.sqrt()
        total = norms.sum()
        by_norm: Tensor = torch.where(
            total > 0, norms / torch.where(total > 0, total, 1.0), received.weights
        )
        return by_norm
