"""Top-k compression with error feedback.

S. U. Stich, J.-B. Cordonnier, M. Jaggi: Sparsified SGD with Memory (NeurIPS 2018), Algorithm 1,
arXiv:1809.07599, with rounds in place of steps: a client sends the k largest entries of its update
and remembers the rest for its next round.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any

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


class TopKCompression(FederatedCallback):
    """v = (x_{i,K} - w) + e_i; top_k(v) is sent, k = ⌈fraction · D⌉; e_i ← v - top_k(v).

    The k entries with the largest absolute value are sent; ties go to the lowest index. With
    partial averaging the method raises an error, because the error of a part that is not averaged
    would be lost.
    Sent: k numbers and k indices of 4 bytes (8 from 2³¹ parameters on) in place of D numbers. Kept:
    e_i by each client.

    Args:
        fraction: share of the D numbers that is sent, above 0, up to 1; 1 is FedAvg.

    Example:
        With one client per round 4 of the server's 31 parameters change.

        >>> from fl_lightning.callbacks import TopKCompression
        >>> from fl_lightning.testing import tiny_run
        >>> one, two = (
        ...     tiny_run(TopKCompression(fraction=0.1), rounds=t, participation=1) for t in (1, 2)
        ... )
        >>> int((one.global_vector != two.global_vector).sum())
        4
    """

    title = "top-k"
    paper = Paper("stich2018sparsified")
    tolerates_staleness = True
    neutral = {"fraction": 1.0}
    cannot_run_with = {"parts": "what is not averaged is not sent, and its error would be lost"}
    contraction = True  # EF21 may use this compressor
    of_trained = True
    error = ClientState(synchronised=False)

    def __init__(self, fraction: Annotated[float, Above(0), AtMost(1)] = 0.1) -> None:
        super().__init__()
        self.fraction = fraction

    @wire.once
    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        v = update + self.error[clients]
        sent = self.compress(clients, v, self)
        self.error[clients] = v - sent
        return sent

    def compress(self, clients: Clients, v: Tensor, run: FederatedCallback) -> Tensor:
        """Return the k largest entries of v, and report how much is sent.

        ``run`` is the callback that calls this.
        """
        size = v.shape[1]
        magnitude = v.abs()
        trained = clients.trained_by_all
        number_of_them = size
        if trained is not None:
            number_of_them = int(trained.sum())
            magnitude = magnitude.masked_fill(~trained, -1.0)
        k = self._number(number_of_them)
        largest = magnitude.sort(dim=1, descending=True, stable=True).indices[:, :k]
        values = v.gather(1, largest).to(clients.w.dtype)
        # An index of 4 bytes is enough for 2³¹ parameters.
        index_bytes = 4 if size < 2**31 else 8
        clients.sent(parameters=k, bytes=k * (values.element_size() + index_bytes))
        vars(clients)["message"] = {"values": values, "indices": largest}
        return values.new_zeros(len(v), size).scatter(1, largest, values)

    def _number(self, of: int) -> int:
        """Return how many of so many entries a client sends."""
        return math.ceil(Fraction(str(self.fraction)) * of)

    def encode(self, clients: Clients, update: Tensor) -> dict[str, NDArray[Any]]:
        message = wire.message_of(TopKCompression.transmit, self, clients, update)
        indices = wire.as_array(message["indices"][0])
        return {
            "values": wire.as_array(message["values"][0]),
            "indices": indices.astype("int32" if update.shape[1] < 2**31 else "int64"),
        }

    def decode(self, arrays: dict[str, NDArray[Any]], round: int, client: int) -> Tensor:
        return self.decompress(arrays, round, client, self)

    def decompress(
        self, arrays: dict[str, NDArray[Any]], round: int, client: int, run: FederatedCallback
    ) -> Tensor:
        """Return the result of :meth:`compress` ``(D,)``, from the arrays of ``encode``."""
        w = run._transaction.w
        trained = run._transaction.round.trained
        k = self._number(len(w) if trained is None else int(trained.sum()))
        wire.check_arrays(arrays, {"values": k, "indices": k})
        if len(set(arrays["indices"].tolist())) < k or arrays["indices"].dtype.kind != "i":
            raise ValueError("an index is there twice")
        values = wire.as_tensor(arrays["values"], like=w)
        indices = wire.as_tensor(arrays["indices"], like=w).long()
        return values.new_zeros(1, len(w)).scatter(1, indices, values)[0]
