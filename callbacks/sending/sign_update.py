"""EF-signSGD: signs with error feedback.

S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi: Error Feedback Fixes SignSGD and other
Gradient Compression Schemes (ICML 2019), Algorithm 1, arXiv:1901.09847, with rounds in place of
steps: a client sends the signs of its update and their scale, and remembers the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.callback import Clients, ClientState, FederatedCallback, Paper, wire


class SignUpdate(FederatedCallback):
    """v = (x_{i,K} - w) + e_i; S sign(v) is sent, S = ‖v‖₁/d of its block; e_i ← v - S sign(v).

    S is rounded to float32. The sign of 0 is +1, so one bit is enough. With
    partial averaging the method raises an error, because the error of a part that is not averaged
    would be lost.
    Sent: one bit per number and 32 per block, in place of D numbers. Kept: e_i by each client.

    Args:
        per_layer: each parameter tensor is a block; if False, the whole vector is one, as printed.

    Example:
        All numbers of a tensor move equally far; 31 bits and four scales of four bytes are sent.

        >>> from fl_lightning.callbacks import CommunicationLogger, SignUpdate
        >>> from fl_lightning.testing import tiny_run
        >>> zero, one = (
        ...     tiny_run(SignUpdate(), CommunicationLogger(), rounds=t, participation=1)
        ...     for t in (1, 2)
        ... )
        >>> moved = (one.global_vector - zero.global_vector).abs()[one.layout["head.bias"][0]]
        >>> bool(moved.allclose(moved.mean()))
        True
        >>> int(zero.trainer.callback_metrics["communication/up_bytes"])
        20
    """

    title = "EF-signSGD"
    paper = Paper("karimireddy2019error")
    tolerates_staleness = True
    cannot_run_with = {"parts": "what is not averaged is not sent, and its error would be lost"}
    contraction = True  # EF21 may use this compressor
    error = ClientState(synchronised=False)

    def __init__(self, per_layer: bool = True) -> None:
        super().__init__()
        self.per_layer = per_layer

    @wire.once
    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        v = update.double() + self.error[clients]
        sent = self.compress(clients, v, self)
        self.error[clients] = v - sent
        return sent

    def compress(self, clients: Clients, v: Tensor, run: FederatedCallback) -> Tensor:
        """Return S sign(v), and report how much is sent.

        ``run`` is the callback that calls this.
        """
        blocks = wire.Blocks(clients.layout, self.per_layer)
        scales = blocks.scales(v, "mean").float()
        positive = v >= 0
        clients.sent(parameters=v.shape[1], bytes=-(-(32 * scales.shape[1] + v.shape[1]) // 8))
        vars(clients)["message"] = {"scales": scales, "positive": positive}
        return self._received(blocks, scales, positive).to(clients.w.dtype)

    def encode(self, clients: Clients, update: Tensor) -> dict[str, NDArray[Any]]:
        message = wire.message_of(SignUpdate.transmit, self, clients, update)
        return {
            "scales": wire.as_array(message["scales"][0]),
            "positive": wire.packed(wire.as_array(message["positive"][0]), 1),
        }

    def decode(self, arrays: dict[str, NDArray[Any]], round: int, client: int) -> Tensor:
        return self.decompress(arrays, round, client, self)

    def decompress(
        self, arrays: dict[str, NDArray[Any]], round: int, client: int, run: FederatedCallback
    ) -> Tensor:
        """Return the result of :meth:`compress` ``(D,)``, from the arrays of ``encode``."""
        w = run._transaction.w
        blocks = wire.Blocks(run._transaction.layout, self.per_layer)
        wire.check_arrays(arrays, {"scales": len(blocks.slices), "positive": None})
        positive = wire.as_tensor(wire.unpacked(arrays["positive"], 1, len(w)), like=w) > 0
        scales = wire.as_tensor(arrays["scales"], like=w)
        return self._received(blocks, scales, positive).to(w.dtype)[0]

    def _received(self, blocks: wire.Blocks, scales: Tensor, positive: Tensor) -> Tensor:
        scale = blocks.spread(scales)
        return torch.where(positive, scale, -scale)
