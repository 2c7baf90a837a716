"""Rows of clients in a store, and their bits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fl_lightning.storage.store import ClientStore


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def filled(folder: Path, clients: int = 8, size: int = 1000) -> tuple[ClientStore, Path]:
    """A store whose clients hold ``arange(size) + client``, and the segment that this was written
    to."""
    store = ClientStore()
    store.commit({"M.s": {i: torch.arange(size, dtype=torch.float32) + i for i in range(clients)}})
    path = store.flush(folder)
    assert path is not None
    return store, path
