"""The processes of a run, over torch.distributed; where there is only one, lists have one entry."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gathered(value: T) -> list[T]:
    """Every process's value, by rank, in all of them; any picklable value."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def collective_device() -> torch.device:
    """Where tensors that travel between processes have to lie."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
