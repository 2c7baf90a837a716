"""Several real processes, forked from the tests' own, as a launcher or a process group has them."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def started(target: Callable[..., None], world: int, *arguments: Any) -> list[Any]:
    """``target(*arguments, rank, world)`` in each of ``world`` processes, as a launcher starts
    them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    children = [
        fork.Process(target=_under_torchelastic, args=(target, arguments, r, world, port))
        for r in range(world)
    ]
    for child in children:
        child.start()
    return children


def launched(target: Callable[..., None], world: int, *arguments: Any) -> list[int]:
    """The statuses of :func:`started` processes; one that does not end is killed (-9)."""
    children = started(target, world, *arguments)
    for child in children:
        child.join(600)
        if child.exitcode is None:
            child.kill()
            child.join()
    return [child.exitcode for child in children]


def grouped(target: Callable[..., None], world: int, *arguments: Any) -> None:
    """``target(*arguments, rank, world)`` in each process of a gloo group."""
    assert launched(_in_group, world, target, arguments) == [0] * world


def same_models_on_one_and_two(target: Callable[..., None], folder: Path) -> None:
    """One and two processes leave the same bits.

    ``target(folder, rank, world)`` saves ``<world>.pt``.
    """
    for world in (1, 2):
        assert launched(target, world, folder) == [0] * world
    one = torch.load(folder / "1.pt")
    two = torch.load(folder / "2.pt")
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(two[name], value), name


def _under_torchelastic(
    target: Callable[..., None], arguments: Any, rank: int, world: int, port: int
) -> None:
    if world > 1:
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="test",
            GROUP_RANK="0",
        )
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
        )
    target(*arguments, rank, world)


def _in_group(target: Callable[..., None], arguments: Any, rank: int, world: int) -> None:
    if world > 1:
        dist.init_process_group("gloo")
    target(*arguments, rank, world)
