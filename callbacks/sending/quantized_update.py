"""QSGD, FedPAQ: unbiased quantisation of the update.

D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic: QSGD, Communication-Efficient SGD via
Gradient Quantization and Encoding (NeurIPS 2017), arXiv:1610.02132, applied to what a client sends
once per round, as in A. Reisizadeh, A. Mokhtari, H. Hassani, A. Jadbabaie, R. Pedarsani: FedPAQ
(AISTATS 2020), Algorithm 1, arXiv:1909.13014.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.callback import AtLeast, Below, Clients, FederatedCallback, Paper, wire


class QuantizedUpdate(FederatedCallback):
    """S q_j/s, whose mean is v_j, is sent for v_j, v = x_{i,K} - w; q_j = ±⌊r_j⌋ or ±⌈r_j⌉.

    r_j is the size of v_j times s/S, S the norm of v's block, rounded up to a float32. q_j is
    rounded up with probability r_j - ⌊r_j⌋, by a draw keyed by (seed, round, client). The method is
    refused together with partial averaging: a scale would include coordinates that are not
    averaged.
    Sent: ⌈log2(2 s + 1)⌉ bits per number and 32 per block, in place of D numbers. Kept: nothing.

    Args:
        levels: s, at least 1; 1 takes two bits per number, 7 four, 127 eight. None is FedAvg.
        norm: S is the Euclidean norm of a block, ``"l2"``, or its largest number, ``"max"``.
        per_layer: each parameter tensor is a block; if False, the whole vector is one.

    Example:
        With one level a number is sent as 0 or ± the largest of its tensor. Each client sends 31
        numbers of two bits and four scales of four bytes.

        >>> from fl_lightning.callbacks import CommunicationLogger, QuantizedUpdate
        >>> from fl_lightning.testing import tiny_run
        >>> method = QuantizedUpdate(levels=1, norm="max")
        >>> run = tiny_run(method, CommunicationLogger(), rounds=1, participation=1)
        >>> int(run.trainer.callback_metrics["communication/up_bytes"])
        24
    """

    title = "QSGD"
    paper = Paper("alistarh2017qsgd", "reisizadeh2020fedpaq")
    tolerates_staleness = True
    draws_by_client = True
    neutral = {"levels": None}
    cannot_run_with = {"parts": "its scale would be of coordinates that are not averaged, too"}

    def __init__(
        self,
        levels: Annotated[int, AtLeast(1), Below(2**31)] | None = 127,
        norm: Literal["l2", "max"] = "l2",
        per_layer: bool = True,
    ) -> None:
        super().__init__()
        self.levels = levels
        self.norm = norm
        self.per_layer = per_layer
        if levels is None:
            vars(self)["sends"] = "x"  # as FedAvg does

    @wire.once
    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        if self.levels is None:
            return update
        v = update.double()
        blocks = wire.Blocks(clients.layout, self.per_layer)
        scales = wire.rounded_up(blocks.scales(v, self.norm))
        drawn = [
            torch.from_numpy(self._keyed("quantise", clients.round, i).random(v.shape[1]))
            for i in clients.client_ids
        ]
        q = wire.levels_of(v, blocks.spread(scales), self.levels, torch.stack(drawn).to(v.device))
        bits = 32 * scales.shape[1] + v.shape[1] * wire.bits_of(self.levels)
        clients.sent(parameters=v.shape[1], bytes=-(-bits // 8))
        vars(clients)["message"] = {"scales": scales, "levels": q}
        return received(blocks, scales, q, self.levels).to(update.dtype)

    def encode(self, clients: Clients, update: Tensor) -> dict[str, NDArray[Any]]:
        if self.levels is None:
            return {"update": wire.as_array(update[0])}
        message = wire.message_of(QuantizedUpdate.transmit, self, clients, update)
        # Shift to 0 … 2 s, because the packed bits have no sign.
        numbers = wire.as_array(message["levels"][0].long() + self.levels)
        return {
            "scales": wire.as_array(message["scales"][0]),
            "levels": wire.packed(numbers, wire.bits_of(self.levels)),
        }

    def decode(self, arrays: dict[str, NDArray[Any]], round: int, client: int) -> Tensor:
        w = self._transaction.w
        if self.levels is None:
            wire.check_arrays(arrays, {"update": len(w)})
            return wire.as_tensor(arrays["update"], like=w)[0]
        blocks = wire.Blocks(self._transaction.layout, self.per_layer)
        wire.check_arrays(arrays, {"scales": len(blocks.slices), "levels": None})
        numbers = wire.unpacked(arrays["levels"], wire.bits_of(self.levels), len(w)) - self.levels
        if bool((numbers > self.levels).any()):
            raise ValueError(f"a level is above {self.levels}")
        scales = wire.as_tensor(arrays["scales"], like=w)
        q = wire.as_tensor(numbers, like=w)
        return received(blocks, scales, q, self.levels).to(w.dtype)[0]


def received(blocks: wire.Blocks, scales: Tensor, q: Tensor, s: int) -> Tensor:
    """Return S q/s of each coordinate, in float64."""
    return blocks.spread(scales) * q / s
