"""The communication of a run, counted from what methods declare, not from what is copied here.

The count follows the algorithms as published: docs/methods.md has it as a table, method by method.
"""

from __future__ import annotations

import torch

from fl_lightning.callback import FederatedCallback, Server, ServerState

COUNTS = ("down_parameters", "down_bytes", "up_parameters", "up_bytes", "buffers_bytes")


class CommunicationLogger(FederatedCallback):
    """Logs ``communication/{up,down,total}_parameters`` and ``_bytes`` of all rounds so far.

    A participant is sent the model (the parts of which it has no valid copy) and the server states
    declared ``sent``; it sends its update (the parts averaged this round) and its uploads. Buffers,
    which travel both ways, are counted in ``communication/buffers_bytes`` alone.
    ``cost/kept_vectors`` is what a participant keeps until its next round, in vectors of D numbers:
    its rows of methods' states, its copies of parts, its optimizer where that is kept.
    Sent: nothing more. Kept: five totals by the server.

    Example:
        SCAFFOLD communicates two vectors each way where FedAvg communicates one.

        >>> from fl_lightning.callbacks import CommunicationLogger, ControlVariates
        >>> from fl_lightning.testing import tiny_run
        >>> fedavg = tiny_run(CommunicationLogger())
        >>> scaffold = tiny_run(ControlVariates(), CommunicationLogger())
        >>> name = "communication/total_parameters"
        >>> float(scaffold.trainer.callback_metrics[name] / fedavg.trainer.callback_metrics[name])
        2.0
    """

    role = "measurement"
    every_round = True
    counted = ServerState(synchronised=False, shape=(len(COUNTS),), dtype=torch.int64)

    def on_round_end(self, server: Server) -> None:
        counts = [server.communication[name] for name in COUNTS]
        self.counted += torch.tensor(counts, device=self.counted.device)
        totals = dict(zip(COUNTS, self.counted.tolist(), strict=True))
        for unit in ("parameters", "bytes"):
            totals[f"total_{unit}"] = totals[f"up_{unit}"] + totals[f"down_{unit}"]
        for name, value in totals.items():
            server.log(f"communication/{name}", value)
        if server.n:
            server.log("cost/kept_vectors", server.kept_vectors)
