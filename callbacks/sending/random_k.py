"""Rand-k: coordinates drawn at random.

S. U. Stich, J.-B. Cordonnier, M. Jaggi: Sparsified SGD with Memory (NeurIPS 2018), § 2,
arXiv:1809.07599, with rounds in place of steps. k coordinates are sent, and no indices, because the
coordinates are drawn from the seed.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.callback import (
    Above,
    AtMost,
    Clients,
    ClientState,
    FederatedCallback,
    Paper,
    wire,
)


class RandomK(FederatedCallback):
    """k = ⌈fraction · D⌉ coordinates of v = x_{i,K} - w are sent, × D/k, so the mean is v.

    With ``memory`` v = (x_{i,K} - w) + e_i, the coordinates are sent without scaling, and e_i ← v -
    sent. The coordinates are drawn keyed by (seed, round, client), so the server knows them.
    With partial averaging the method raises an error, because coordinates drawn from a part
    that is not averaged would be lost.
    Sent: k numbers in place of D. Kept: e_i by each client, with memory.

    Args:
        fraction: share of the D numbers that is sent, above 0, up to 1; 1 is FedAvg.
        memory: remember the coordinates that were not sent, instead of scaling.

    Example:
        With one client per round 4 of the server's 31 parameters change.

        >>> from fl_lightning.callbacks import RandomK
        >>> from fl_lightning.testing import tiny_run
        >>> one, two = (tiny_run(RandomK(0.1), rounds=t, participation=1) for t in (1, 2))
        >>> int((one.global_vector != two.global_vector).sum())
        4
    """

    title = "rand-k"
    paper = Paper("stich2018sparsified")
    tolerates_staleness = True
    draws_by_client = True
    of_trained = True
    neutral = {"fraction": 1.0}
    cannot_run_with = {"parts": "what is drawn of a part that is not averaged would be lost"}

    def __init__(
        self, fraction: Annotated[float, Above(0), AtMost(1)], memory: bool = False
    ) -> None:
        super().__init__()
        self.fraction = fraction
        self.memory = memory
        self.contraction = memory  # EF21 may use this compressor
        if memory:
            self.declare("error", ClientState(synchronised=False))

    @wire.once
    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        if not self.memory:
            return self.compress(clients, update.double(), self)
        v = update.double() + self.error[clients]
        sent = self.compress(clients, v, self)
        self.error[clients] = v - sent
        return sent

    def compress(self, clients: Clients, v: Tensor, run: FederatedCallback) -> Tensor:
        """Return the drawn coordinates, and report how much is sent.

        ``run`` is the callback that calls this; the draw uses its run's seed.
        """
        size = v.shape[1]
        trained = clients.trained_by_all
        drawn = [self._drawn(size, clients.round, i, run, trained) for i in clients.client_ids]
        kept = torch.stack(drawn).to(v.device)
        k = kept.shape[1]
        among = size if trained is None else int(trained.sum())
        scale = 1.0 if self.memory else among / k
        values = (v.gather(1, kept) * scale).to(clients.w.dtype)
        clients.sent(parameters=k, bytes=k * values.element_size())
        vars(clients)["message"] = {"values": values}
        return _placed(values, kept, size)

    def _drawn(
        self,
        size: int,
        round: int,
        client: int,
        run: FederatedCallback,
        trained: Tensor | None = None,
    ) -> Tensor:
        """Return the coordinates ``(k,)`` that a client sends, among those that all train."""
        among = torch.arange(size) if trained is None else trained.cpu().nonzero()[:, 0]
        k = math.ceil(Fraction(str(self.fraction)) * len(among))
        generator = run._keyed("randk", round, client)
        return among[generator.choice(len(among), k, replace=False, shuffle=False)]

    def encode(self, clients: Clients, update: Tensor) -> dict[str, NDArray[Any]]:
        return {
            "values": wire.as_array(
                wire.message_of(RandomK.transmit, self, clients, update)["values"][0]
            )
        }

    def decode(self, arrays: dict[str, NDArray[Any]], round: int, client: int) -> Tensor:
        return self.decompress(arrays, round, client, self)

    def decompress(
        self, arrays: dict[str, NDArray[Any]], round: int, client: int, run: FederatedCallback
    ) -> Tensor:
        """Return the result of :meth:`compress` ``(D,)``, from the arrays of ``encode``."""
        w = run._transaction.w
        trained = run._transaction.round.trained
        kept = self._drawn(len(w), round, client, run, trained).to(w.device)[None]
        wire.check_arrays(arrays, {"values": kept.shape[1]})
        return _placed(wire.as_tensor(arrays["values"], like=w), kept, len(w))[0]


def _placed(values: Tensor, kept: Tensor, size: int) -> Tensor:
    """Return rows ``(n, D)`` with these values at these places, and zeros elsewhere."""
    return values.new_zeros(len(values), size).scatter(1, kept, values)
