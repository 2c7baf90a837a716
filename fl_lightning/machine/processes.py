"""The processes of a run, over torch.distributed; with only one process, lists have one entry."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

if sys.platform == "linux":
    import resource

T = TypeVar("T")

_timeout: timedelta | None = None

# Files that our readers open again in each process, so that forks do not share a position.
opened_in_each: set[str] = set()


def usable_cores() -> int:
    """Return how many cores this process may use; a container may have fewer than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_of_each() -> int:
    """Return how many cores each of the run's processes on this machine may use, at least one.

    Processes with the same cores share them. If a launcher gave each process its own cores, these
    are not shared. Every process of the run has to call this.
    """
    if not hasattr(os, "sched_getaffinity"):
        local = os.environ.get("LOCAL_WORLD_SIZE", str(world_size()))
        return max(1, usable_cores() // int(local))
    machine = socket.gethostname()
    mine = os.sched_getaffinity(0)
    everyone = gathered((machine, mine))
    sharing = [cores for name, cores in everyone if name == machine and cores & mine]
    return max(1, len(mine) // len(sharing))


def processor_seconds() -> float:
    """Return the processor seconds of this process and of those that it waited for."""
    used = time.process_time()
    if sys.platform == "linux":
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        used += children.ru_utime + children.ru_stime
    return used


def limit_threads(cores: int) -> str:
    """Let PyTorch use at most as many threads within an operation as ``cores``.

    More threads than cores wait for each other in a busy loop, and a round of small steps then
    takes hundreds of times as long.

    Returns:
        The change as a note; empty if nothing had to be changed.
    """
    threads = torch.get_num_threads()
    if threads <= cores:
        return ""
    torch.set_num_threads(cores)
    given = os.environ.get("OMP_NUM_THREADS")
    why = f" (OMP_NUM_THREADS={given})" if given else ""
    return (
        f"PyTorch would use {threads} threads within an operation{why}, but this process has "
        f"{cores} {'core' if cores == 1 else 'cores'} for itself, so it uses {cores}. More threads "
        "than cores wait for each other, which can slow a run down hundreds of times."
    )


def default_timeout() -> timedelta:
    """Return how long a process waits for another by default."""
    return timedelta(minutes=30)


def set_timeout(timeout: timedelta) -> None:
    """From now on let no process wait longer than this for another."""
    global _timeout
    _timeout = timeout
    # Older versions of torch have this function under a private name.
    c10d: Any = dist.distributed_c10d
    setter = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
    setter(timeout)


def timeout() -> timedelta:
    """Return how long a process waits for another at present."""
    return _timeout or default_timeout()


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def place() -> tuple[int, int]:
    """Return the number of processes, and the number of this one."""
    world = world_size()
    return world, dist.get_rank() if world > 1 else 0


def gathered(value: T) -> list[T]:
    """Return every process's value, by rank, in all of them; any picklable value."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value)
    return values


def collective_device() -> torch.device:
    """Return the device on which tensors have to lie to be sent between processes."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
