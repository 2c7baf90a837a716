"""The processes of a run, over torch.distributed; where there is only one, lists have one entry."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_timeout: timedelta | None = None


def usable_cores() -> int:
    """How many cores this process may use; a container may leave fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_timeout() -> timedelta:
    """How long a process waits for another where nobody says."""
    return timedelta(minutes=30)


def set_timeout(timeout: timedelta) -> None:
    """Let no process wait longer for another, from here on."""
    global _timeout
    _timeout = timeout
    # Older versions of torch have the function under a private name.
    c10d: Any = dist.distributed_c10d
    setter = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
    setter(timeout)


def timeout() -> timedelta:
    """How long a process waits for another at present."""
    return _timeout or default_timeout()


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def place() -> tuple[int, int]:
    """How many processes there are, and which this is."""
    world = world_size()
    return world, dist.get_rank() if world > 1 else 0


def gathered(value: T) -> list[T]:
    """Every process's value, by rank, in all of them; any picklable value."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def collective_device() -> torch.device:
    """The device on which tensors that travel between processes have to lie."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
