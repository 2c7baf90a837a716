"""Who sends to whom in a round without a server, and by which weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.topologies import check_edges

# A receiver's senders with their weights, ascending by sender, itself among them.
Addends = dict[int, list[tuple[int, float]]]


@dataclass(frozen=True)
class Neighbourhood:
    """The messages of a round's exchange, among the clients that finished: ``server.ids``.

    A client's own weight is 1 minus the weights of what it sends, so the weights by which others
    take a client's value, and its own, add up to 1.

    Args:
        senders, receivers: clients ``(P,)``, int64; each ordered pair once.
        weights: V[receiver, sender] ``(P,)``, float64.
        steps: how many times in a row the clients exchange; each time every client sends again.
        shared: ``(D,)`` bool, the coordinates that are exchanged; at the others each client keeps
            its own value. None: all.
        everyone: every client gets the uniform mean over all that finished; the pairs are then left
            empty.
    """

    senders: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    receivers: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    weights: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    steps: int = 1
    shared: Tensor | None = None
    everyone: bool = False

    def messages(self, finished: int) -> int:
        """Return how many values of each kind are sent, if so many clients finished."""
        pairs = finished * (finished - 1) if self.everyone else len(self.senders)
        return pairs * self.steps

    def checked(self, ids: Sequence[int], method: str) -> Neighbourhood:
        """Return it, if it is one among these clients.

        Raises:
            UserError: a pair is no pair of them, or is given twice.
        """
        pairs = np.stack([self.senders, self.receivers], axis=1)
        known = np.isin(pairs, np.asarray(ids, dtype=np.int64))
        if not known.all():
            raise UserError(
                f"method: {method}.neighbours names client {pairs[~known][0]}, which did not "
                "finish this round. Name clients of server.ids only."
            )
        check_edges(f"method: {method}.neighbours", pairs, self.weights)
        return self

    def addends(self, receivers: Sequence[int]) -> Addends:
        """Return what each of these receivers adds up."""
        sent: dict[int, float] = {}
        for sender, weight in zip(self.senders.tolist(), self.weights.tolist(), strict=True):
            sent[sender] = sent.get(sender, 0.0) + weight
        found: Addends = {i: [(i, 1.0 - sent.get(i, 0.0))] for i in receivers}
        triples = zip(
            self.senders.tolist(), self.receivers.tolist(), self.weights.tolist(), strict=True
        )
        for sender, receiver, weight in triples:
            if receiver in found:
                found[receiver].append((sender, weight))
        return {receiver: sorted(pairs) for receiver, pairs in found.items()}


def mixed(addends: list[tuple[int, float]], values: Mapping[int, Tensor]) -> Tensor:
    """Return Σ_j V_ij value_j, added up in the order of ``addends``, in at least float32."""
    (first, weight), *rest = addends
    dtype = torch.promote_types(values[first].dtype, torch.float32)
    total = values[first].to(dtype) * weight
    for sender, weight in rest:
        total.add_(values[sender].to(dtype), alpha=weight)
    return total
