"""The common part of methods for adapters of unequal ranks: ranks of clients, masks, and
products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import NonNegativeFloat, PositiveInt, check
from fl_lightning.learner.adapters import Adapter
from fl_lightning.learner.layout import Layout
from fl_lightning.machine.device_memory import to_device
from fl_lightning.round.clients import Clients
from fl_lightning.round.server import Server
from fl_lightning.sampling import generator
from fl_lightning.virtual.devices import Tiers, cut_by_shares

NEGLIGIBLE = 1e-10  # singular values up to this fraction of the largest count as 0


class Ranks:
    """How many rows of A and columns of B each client trains.

    Args:
        given: None: all of each adapter's; a list, one number for each client; ``{rank: share}``.
        method: the method with this option.

    Raises:
        UserError: it has another form.
    """

    def __init__(self, given: Sequence[int] | Mapping[int, float] | None, method: str) -> None:
        option = f"{method}: ranks"
        check(option, given, Sequence[PositiveInt] | Mapping[int, NonNegativeFloat] | None)
        self.method = method
        self.listed: list[int] | None = None
        self.shares: tuple[tuple[float, int], ...] = ()
        if isinstance(given, Mapping):
            check(option, list(given), Sequence[PositiveInt])
            self.shares = tuple((float(share), rank) for rank, share in given.items())
            Tiers(self.shares)
        elif given is not None:
            self.listed = list(given)

    def check(self, layout: Layout, num_clients: int) -> None:
        """Refuse ranks that the learner's adapters do not have.

        Raises:
            UserError: it names the method, and the rank or the number of clients.
        """
        largest = largest_rank(layout)
        ranks = self.listed if self.listed is not None else [rank for _, rank in self.shares]
        for rank in ranks:
            if rank > largest:
                raise UserError(
                    f"{self.method}: ranks has {rank}; the learner's adapters have rank "
                    f"{largest}, so accepted are 1 to {largest}."
                )
        if self.listed is not None and len(self.listed) != num_clients:
            raise UserError(
                f"{self.method}: ranks has {len(self.listed)} numbers, and the data have "
                f"{num_clients} clients. Give one number for each client, or shares: "
                "ranks={2: 0.5, 8: 0.5}."
            )

    @property
    def equal(self) -> bool:
        return self.listed is None and not self.shares

    def all(self, seed: int, m: int, layout: Layout) -> Tensor:
        """Return the rank of each of the m clients ``(m,)``, int64."""
        if self.listed is not None:
            return torch.tensor(self.listed)
        if self.shares:
            return _by_shares(seed, m, self.shares)
        return torch.full((m,), largest_rank(layout))

    def of(self, clients: Clients) -> Tensor:
        seed = clients._group.round.seed
        ranks = self.all(seed, clients.num_clients, clients.layout)
        return to_device(ranks, clients.x.device)[clients.ids]

    def at(self, server: Server) -> Tensor:
        ranks = self.all(server._round.seed, server.num_clients, server.layout)
        return ranks.to(server.w.device)[server.ids]


@lru_cache
def _by_shares(seed: int, m: int, shares: tuple[tuple[float, int], ...]) -> Tensor:
    order = generator(seed, "ranks").permutation(m)
    return torch.from_numpy(cut_by_shares(shares, order).astype(np.int64))


def largest_rank(layout: Layout) -> int:
    return max(adapter.rank for adapter in layout.adapters)


def numbers(layout: Layout, device: torch.device | None = None) -> Tensor:
    """Return ``(D,)`` int64: for each coordinate of A its row, for each of B its column; -1
    elsewhere.

    ``device``: where it lies; None: on the CPU.
    """
    found = torch.full((layout.size,), -1)
    for adapter in layout.adapters:
        a, b = adapter.matrices(found)
        place = torch.arange(adapter.rank)
        a.copy_(place[:, None].expand_as(a))
        b.copy_(place.expand_as(b))
    return found if device is None else to_device(found, device)


def mask(layout: Layout, ranks: Tensor) -> Tensor:
    """``(n, D)`` bool: the first ``ranks`` ``(n,)`` rows and columns, and all other coordinates."""
    return numbers(layout, ranks.device) < ranks[:, None]


def residual(server: Server, adapter: Adapter) -> tuple[Tensor, Tensor]:
    """Return factors ``(out, R)`` and ``(R, in)`` of Σ p_i B_i A_i - B̄ Ā, ascending by client;
    float64.

    It is Σ_{i<n} p_i (B_i - B̄)(A_i - A_n), R = (n - 1) r, in which the model that the clients were
    given cancels.
    """
    weights = server.weights.double()
    changes = server.updates.double()
    _, mean_b = adapter.matrices(weights @ changes)
    pairs = [adapter.matrices(row) for row in changes]
    last_a, _ = pairs[-1]
    lefts = [p * (b - mean_b) for p, (_, b) in zip(weights, pairs[:-1], strict=False)]
    rights = [a - last_a for a, _ in pairs[:-1]]
    return torch.cat(lefts, dim=1), torch.cat(rights)


# The reason of methods that set the server's factors from those of the clients.
OF_OTHER_MODELS = (
    "its server computes the clients' factors from its own model and their updates, and these were "
    "measured from another model"
)


class Received:
    """The factors of all clients at the server: w^t and their updates, 0 where they did not train.

    Args:
        ranks: ``(n,)``: number of rows and columns that each client sent.
    """

    def __init__(self, server: Server, ranks: Tensor) -> None:
        self.server = server
        self.layout = server.layout
        self.held = mask(self.layout, ranks)
        self.ranks = ranks
        self.x = torch.where(self.held, server.w + server.updates, 0.0).double()
        self.weights = server.weights.double()

    def stacked(self, adapter: Adapter) -> tuple[Tensor, Tensor]:
        """Return [p_i B_i] ``(out, R)`` and [A_i] ``(R, in)``, ascending by client; float64.

        Their product is Σ p_i B_i A_i. R is the sum of the clients' ranks.
        """
        lefts = []
        rights = []
        for row, weight, rank in zip(self.x, self.weights, self.ranks.tolist(), strict=True):
            a, b = adapter.matrices(row)
            lefts.append(weight * b[:, :rank])
            rights.append(a[:rank])
        return torch.cat(lefts, dim=1), torch.cat(rights)

    def products(self, adapter: Adapter) -> list[Tensor]:
        pairs = [adapter.matrices(row) for row in self.x]
        return [b @ a for a, b in pairs]

    def put(self, update: Tensor, adapter: Adapter, a: Tensor, b: Tensor) -> None:
        """Change ``update`` ``(D,)`` so that the server's A and B become these."""
        for new, old, step in zip(
            (a, b), adapter.matrices(self.server.w), adapter.matrices(update), strict=True
        ):
            step.copy_(new.to(old) - old)


def cut(left: Tensor, right: Tensor, rank: int, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return A ``(rank, in)`` and B ``(out, rank)``: left @ right cut to its largest singular
    values.

    U Σ Vᵀ is the product; B = U_r Σ_r and A = V_rᵀ. In each column of U the entry of largest
    magnitude is positive. If a singular value is negligible, B's column is 0 and A's row is the row
    of ``a``.
    """
    u, sigma, vt = _svd(left, right)
    k = min(rank, len(sigma))
    made_a = a.to(u).clone()
    made_b = u.new_zeros(len(u), rank)
    if not k:
        return made_a, made_b
    largest = u.abs().argmax(0, keepdim=True)
    signs = torch.where(u.gather(0, largest) < 0, -1.0, 1.0).to(u)
    there = (sigma[:k] > NEGLIGIBLE * sigma[0]) & (sigma[0] > 0)
    made_b[:, :k] = torch.where(there, (u * signs * sigma)[:, :k], 0.0)
    made_a[:k] = torch.where(there[:, None], (vt * signs.T)[:k], made_a[:k])
    return made_a, made_b


def _svd(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular value decomposition of left @ right, computed from a small matrix if possible."""
    if left.shape[1] >= min(left.shape[0], right.shape[1]):
        u, sigma, vt = torch.linalg.svd(left @ right, full_matrices=False)
        return u, sigma, vt
    q_left, small_left = torch.linalg.qr(left)
    q_right, small_right = torch.linalg.qr(right.T)
    u, sigma, vt = torch.linalg.svd(small_left @ small_right.T, full_matrices=False)
    return q_left @ u, sigma, vt @ q_right.T
