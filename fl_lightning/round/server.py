"""The server's side of a round, as server hooks see it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.learner import Layout
from fl_lightning.processes import world_size
from fl_lightning.round.context import Round
from fl_lightning.round.ledger import Ledger


class Server:
    """The server's side of a round. Means and sums are over the clients that finished.

    ``w`` is w^t until the server optimizer's step, w^{t+1} in ``on_round_end``; ``w_before`` is w^t; ``evaluated`` is
    what will be evaluated, w except under partial averaging; ``update`` is the aggregated update; each ``(D,)``.
    """

    def __init__(self, round: Round, ledger: Ledger) -> None:
        self._round, self._ledger = round, ledger
        self.w = self.w_before = self.update = self.evaluated = round.w
        self.communication: dict[str, int] = {}
        self.kept_vectors = 0.0
        self.logs: dict[str, Tensor | float] = {}

    @property
    def round(self) -> int:
        """t = 0, 1, …"""
        return self._round.t

    @property
    def initial_model(self) -> Tensor:
        """w^0 ``(D,)``, kept where a state of the run starts from it."""
        return self._round.w0

    @property
    def averaged(self) -> Tensor | None:
        """``(D,)`` bool: coordinates averaged at the end of this round; None: all."""
        return self._round.averaged

    @property
    def ids(self) -> Tensor:
        """The clients that finished, ascending, ``(n,)``."""
        return torch.tensor(self._ledger.finished, device=self.w.device)

    @property
    def n(self) -> int:
        """How many clients finished."""
        return len(self._ledger.finished)

    @property
    def num_clients(self) -> int:
        """Registered clients m."""
        return self._round.num_clients

    @property
    def layout(self) -> Layout:
        return self._round.layout

    @property
    def mean_change(self) -> Tensor:
        """The uniform mean ``(D,)`` of what was transmitted."""
        total = self._ledger.total
        return total.get("update", total["weighted"]) / max(self.n, 1)

    def log(self, name: str, value: Tensor | float) -> None:
        """Log a scalar against the round."""
        self.logs[name] = value

    def staged(self, key: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows written this round, ascending by client, brought to every process."""
        mine = self._ledger.rows.get(key, {})
        world = world_size()
        for j, client in enumerate(self._round.ids):
            row = mine.get(client)
            if world > 1:
                box = [row]
                dist.broadcast_object_list(box, src=j % world)
                row = box[0]
            if row is not None:
                yield torch.tensor([client], device=self.w.device), row.unsqueeze(0)
