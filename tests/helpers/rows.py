"""Rows of clients in a store, and their bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.callback import ClientState, FederatedCallback
from fl_lightning.storage.client_store import ClientStore

NO_FLOAT = 2**53  # from here on float64 has no odd numbers


class Times(FederatedCallback):
    """How often each client took part, as an integer that no float holds."""

    times = ClientState(
        lambda w: NO_FLOAT, shape=(), dtype=torch.int64, synchronised=False, reported=True
    )

    def on_local_end(self, clients: Any) -> None:
        self.times[clients] += 1

    def on_round_end(self, server: Any) -> None:
        most = max(int(rows.max()) for _, rows in self.times.staged(server))
        server.log("times/most", most - NO_FLOAT)


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def filled(
    folder: Path, clients: int = 8, size: int = 1000, names: Sequence[str] = ("M.s",)
) -> tuple[ClientStore, Path]:
    """A store whose clients hold ``arange(size) + client``, and the segment that this was written
    to."""
    store = ClientStore()
    numbers = torch.arange(size, dtype=torch.float32)
    store.commit({name: {i: numbers + i for i in range(clients)} for name in names})
    path = store.flush(folder)
    assert path is not None
    return store, path
