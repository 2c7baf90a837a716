"""The processes of a run, with torch.distributed underneath; alone, everything is a list of one."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gathered(value: T) -> list[T]:
    """What each process has, by rank, in all of them; any picklable value."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def collective_device() -> torch.device:
    """Where tensors have to lie that travel between processes."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
