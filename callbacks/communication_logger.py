"""What a run has sent: counted from what methods declare, not from what a simulator happens to move."""

from __future__ import annotations

import torch

from fl_lightning.callback import FederatedCallback, Server, ServerState

COUNTS = ("down_parameters", "down_bytes", "up_parameters", "up_bytes", "buffers_bytes")


class CommunicationLogger(FederatedCallback):
    """Logs ``communication/{up,down,total}_parameters`` and ``_bytes``, cumulative; buffers apart.

    A participant is sent the model (parts of which it has no valid copy) and server state declared ``sent``; it sends
    its update (parts averaged this round) and its uploads.
    """

    counted = ServerState(synchronised=False, shape=(len(COUNTS),), dtype=torch.int64)

    def on_round_end(self, server: Server) -> None:
        self.counted += torch.tensor([server.communication[name] for name in COUNTS], device=self.counted.device)
        totals = dict(zip(COUNTS, self.counted.tolist(), strict=True))
        for what in ("parameters", "bytes"):
            totals[f"total_{what}"] = totals[f"up_{what}"] + totals[f"down_{what}"]
        for name, value in totals.items():
            server.log(f"communication/{name}", value)
