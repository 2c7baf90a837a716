"""The communication of a run, counted by what methods declare that they send.

What the simulation copies in memory is not counted.

The count follows the algorithms as published; the table in docs/methods.md has the count of each
method.
"""

from __future__ import annotations

from typing import Any

import torch

from fl_lightning.callback import FederatedCallback, PositiveFloat, Server, ServerState

COUNTS = ("down_parameters", "down_bytes", "up_parameters", "up_bytes", "buffers_bytes")


class CommunicationLogger(FederatedCallback):
    """Logs ``communication/{up,down,total}_parameters`` and ``_bytes`` of all rounds so far.

    A participant is sent the model (only parts of which it has no valid copy) and the server states
    declared as ``sent``. A participant sends its update (only parts averaged this round) and its
    uploads. Buffers are sent in both directions, and counted only in
    ``communication/buffers_bytes``. ``cost/kept_vectors`` is what a participant keeps until its
    next round, in vectors of D numbers: its rows of methods' states, its copies of parts, and its
    optimizer's state if the run keeps it.
    Sent: nothing more. Kept: five totals, by the server.

    Args:
        budget: a number of bytes; the run ends after the first round whose
            ``communication/total_bytes`` reach it. A resumed run does not go on, unless it gets a
            larger budget. None: no end.

    Example:
        SCAFFOLD sends two vectors in each direction, and FedAvg one.

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

    def __init__(self, budget: PositiveFloat | None = None) -> None:
        super().__init__()
        # A resume refuses other values of arguments that are stored under their own names. A
        # resumed run may have another budget, so the budget has a private name.
        self._most = budget
        self._told = False

    def facts(self) -> dict[str, str]:
        return {} if self._most is None else {"budget": f"{self._most:,.0f} bytes"}

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

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._told = False
        self._end_if_spent(trainer, pl_module, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._end_if_spent(trainer, pl_module, trainer.current_epoch + 1)

    def _end_if_spent(self, trainer: Any, pl_module: Any, rounds: int) -> None:
        counted = pl_module.server_states.get("CommunicationLogger.counted")
        if self._most is None or counted is None:
            return
        totals = dict(zip(COUNTS, counted.tolist(), strict=True))
        spent = totals["up_bytes"] + totals["down_bytes"]
        if spent < self._most:
            return
        trainer.should_stop = True
        if not self._told:
            self._told = True
            pl_module.note(
                f"CommunicationLogger: the run ends after {rounds} rounds, since {spent:,} bytes "
                f"reach the budget of {self._most:,.0f}"
            )
