"""The processes of a run, with torch.distributed underneath; alone, everything is a list of one."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fl_lightning.errors import UserError
from fl_lightning.storage.lock import RunLock, hold, join

T = TypeVar("T")

_timeout: timedelta | None = None


def default_timeout() -> timedelta:
    """How long a process waits for another where nobody says."""
    return timedelta(minutes=30)


def set_timeout(timeout: timedelta) -> None:
    """From here on no process waits longer for another."""
    global _timeout
    _timeout = timeout
    c10d: Any = dist.distributed_c10d
    setter = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
    setter(timeout)


def timeout() -> timedelta:
    """How long a process waits for another at present."""
    return _timeout or default_timeout()


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


def held_by_all(folder: Path, trainer: Any) -> RunLock:
    """The folder as the run's own: the first process holds it, the others write there beside it.

    Raises:
        UserError: in all of them, where another run holds it.
    """
    held, told = None, ("", "")
    if trainer.is_global_zero:
        try:
            held = hold(folder)
            told = (held.mark, "")
        except UserError as error:
            told = ("", str(error))
    mark, refusal = trainer.strategy.broadcast(told)
    if refusal:
        raise UserError(refusal)
    return held or join(folder, mark)


def collective_device() -> torch.device:
    """Where tensors have to lie that travel between processes."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
