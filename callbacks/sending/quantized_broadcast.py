"""Quantised broadcast: the server's model in few bits, without memory.

The quantiser of D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnovic: QSGD (NeurIPS 2017),
arXiv:1610.02132, applied to what the server sends down: the difference of its model from w^0, which
all clients know.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from fl_lightning.callback import (
    AtLeast,
    Below,
    FederatedCallback,
    Paper,
    Server,
    ServerState,
    wire,
)


class QuantizedBroadcast(FederatedCallback):
    """Clients get ŵ^t = w^0 + Q(w^t - w^0) as w^t; w^{t+1} = w^t + d, d from x_{i,K} - ŵ^t.

    Q sends S q_j/s for each v_j, v = w^t - w^0, as ``QuantizedUpdate`` does. S is the Euclidean
    norm of the parameter tensor. The draws, keyed by (seed, round), are the same for all clients,
    so the mean of ŵ^t is w^t. With partial averaging the method raises an error: a part that a
    client keeps is not sent, but the scale would include it.
    Sent: ⌈log2(2 s + 1)⌉ bits per number and 32 per tensor to each participant, in place of D
    numbers; w^0 itself is not counted, nor is what no round has trained (FFA-LoRA's A). Kept: w^0
    by the server.

    Args:
        levels: s, at least 1; 1 takes two bits per number, 7 four, 127 eight. None is FedAvg.

    Example:
        With 127 levels each participant is sent one byte per number and four bytes per tensor.

        >>> from fl_lightning.callbacks import CommunicationLogger, QuantizedBroadcast
        >>> from fl_lightning.testing import tiny_run
        >>> method = QuantizedBroadcast()
        >>> run = tiny_run(method, CommunicationLogger(), rounds=1, participation=1)
        >>> int(run.trainer.callback_metrics["communication/down_bytes"])
        47
    """

    not_over_sites = "a message down that sites could decode"
    title = "quantised broadcast"
    paper = Paper("alistarh2017qsgd")
    neutral = {"levels": None}
    cannot_run_with = {"parts": "its scales would be of coordinates that clients keep, too"}
    w0 = ServerState(initial="initial_model", synchronised=False)  # never written

    def __init__(self, levels: Annotated[int, AtLeast(1), Below(2**31)] | None = 127) -> None:
        super().__init__()
        self.levels = levels

    def broadcast(self, server: Server) -> Tensor:
        if self.levels is None:
            return server.w
        w0 = self.w0.double()
        v = (server.w - w0)[None]
        blocks = wire.Blocks(server.layout, per_layer=True)
        scales = wire.rounded_up(blocks.scales(v, "l2"))
        drawn = torch.from_numpy(self._keyed("broadcast", server.round).random(v.shape[1]))
        q = wire.levels_of(v, blocks.spread(scales), self.levels, drawn.to(v.device)[None])
        # Coordinates that no round has trained need not be sent: they are those of w^0.
        trained = torch.ones_like(v, dtype=torch.bool)
        if server.averaged is not None:
            trained = (v != 0) | server.averaged
        numbers = int(trained.sum())
        tensors = int(blocks.scales(trained.double(), "max").sum())
        bits = 32 * tensors + numbers * wire.bits_of(self.levels)
        server.sent(parameters=numbers, bytes=-(-bits // 8))
        received = w0 + (blocks.spread(scales) * q / self.levels)[0]
        return received.to(server.w.dtype)
