"""How far clients drift in a round, and whether they drift in one direction."""

from __future__ import annotations

from typing import Any

import torch

from fl_lightning.callback import Clients, FederatedCallback, Server, Upload, ordered_sum


class DriftLogger(FederatedCallback):
    """Logs ``drift/norm``, the mean of ‖u_i‖, and ``drift/cosine``, the mean cosine over pairs.

    u_i = x_{i,K} - w^t, on the coordinates that client i trains; under partial averaging the
    evaluated model takes the place of w^t. A client that did not move is left out of the pairs. If
    no pair is left, the logger logs no cosine. If clients are at sites, it logs nothing under
    partial averaging, because the clients' copies of parts stay there.
    Sent and kept: nothing; vectors that clients send only for this measurement are not counted.

    Example:
        FedProx's pull keeps clients closer to the server.

        >>> from fl_lightning.callbacks import DriftLogger, ProximalTerm
        >>> from fl_lightning.testing import tiny_run
        >>> runs = [tiny_run(ProximalTerm(mu), DriftLogger()) for mu in (0.0, 0.1, 1.0)]
        >>> weak, middle, strong = (run.trainer.callback_metrics["drift/norm"] for run in runs)
        >>> bool(weak > middle > strong)
        True
    """

    role = "measurement"
    reads_evaluated = True
    direction = Upload(sent=False, dtype=torch.float64)
    length = Upload(sent=False, shape=(), dtype=torch.float64, least=0)
    moving = Upload(sent=False, shape=(), dtype=torch.float64, least=0)

    def on_local_end(self, clients: Clients) -> None:
        # Under partial averaging w has parts from which no client starts.
        partial = clients._group.round.parts is not None
        update = (clients.x - (clients.evaluated if partial else clients.w)).double()
        # Coordinates that a client does not train may stand at 0, far from w.
        update = torch.where(clients.trained, update, 0.0)
        norm = clients.norm(update)
        self.direction[clients] = update / torch.where(norm > 0, norm, 1.0)
        self.length[clients] = norm[:, 0]
        self.moving[clients] = (norm[:, 0] > 0).double()

    def on_round_end(self, server: Server) -> None:
        transaction: Any = self._transaction
        if transaction.rows_elsewhere and transaction.round.parts is not None:
            return
        server.log("drift/norm", self.length.mean())
        # For n unit vectors e_i, ‖Σ e_i‖² is n plus twice the sum of all pairs' cosines.
        together = self.direction.sum()
        n = self.moving.sum()
        if n > 1:
            server.log("drift/cosine", (ordered_sum(together**2) - n) / (n * (n - 1)))
