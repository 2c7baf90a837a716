"""Top-k compression with error feedback.

S. U. Stich, J.-B. Cordonnier, M. Jaggi: Sparsified SGD with Memory (NeurIPS 2018), by rounds instead of steps: a client
sends the k largest entries of its update and remembers the rest for its next round.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from fl_lightning.callback import Clients, ClientState, FederatedCallback, UserError


class TopKCompression(FederatedCallback):
    """v = (x_{i,K} - w) + e_i; send its k = ⌈fraction · D⌉ largest entries (ties: the lowest index); e_i ← v - sent.

    Counted as k numbers with k indices of 4 bytes (8 from 2³¹ parameters). Refused together with partial averaging.

    Args:
        fraction: of the D numbers that are sent, above 0 up to 1; 1 is FedAvg.
    """

    title = "top-k"
    neutral = {"fraction": 1.0}
    cannot_run_with = {"parts": "what is not averaged is not sent, and its error would be lost"}
    error = ClientState(synchronised=False)

    def __init__(self, fraction: float = 0.1) -> None:
        super().__init__()
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
            raise UserError(f"TopKCompression: fraction={fraction!r} is not accepted; it has to be above 0, up to 1.")
        self.fraction = fraction

    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        size = update.shape[1]
        k = math.ceil(Fraction(str(self.fraction)) * size)
        v = update + self.error[clients]
        largest = v.abs().sort(dim=1, descending=True, stable=True).indices[:, :k]
        kept = torch.zeros_like(v).scatter(1, largest, v.gather(1, largest))
        self.error[clients] = v - kept
        clients.sent(parameters=k, bytes=k * (v.element_size() + (4 if size < 2**31 else 8)))
        return kept
