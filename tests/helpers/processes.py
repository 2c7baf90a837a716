"""Several real processes, forked from the tests' own, as a launcher or a process group has them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fl_lightning.lab.contracts.federation import held_port
from fl_lightning.machine import federated_strategy
from tests.helpers.fake_gpu import GPU, inner, on_gpu, place


def started(target: Callable[..., None], world: int, *arguments: Any) -> list[Any]:
    """``target(*arguments, rank, world)`` in each of ``world`` processes, as a launcher starts
    them."""
    held = held_port()
    port = held.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    children: list[Any] = [
        fork.Process(target=_under_torchelastic, args=(target, arguments, r, world, port))
        for r in range(world)
    ]
    children[0].held = held  # open until the processes are forgotten
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
    """One and two processes leave the same bits. ``target(folder, rank, world)`` saves
    ``<world>.pt``."""
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


@contextmanager
def nccl_over_gloo() -> Iterator[None]:
    """Within ``fake_gpu(2)``, processes join by gloo and keep NCCL's rule: what they send lies on
    the GPU, and what they send as an object holds no such tensor."""
    begin = dist.init_process_group

    joined_by: list[str] = []

    def joined(backend: str, *_: Any, timeout: Any = None, **__: Any) -> None:
        joined_by.append(backend)
        begin("gloo", timeout=timeout)

    def of_tensors(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            sent = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            by_nccl = joined_by == ["nccl"] and group in (None, dist.group.WORLD)
            if by_nccl and not all(map(on_gpu, sent)):
                raise RuntimeError(f"No backend type associated with device type cpu, at {place()}")
            mean = kwargs.get("op") == dist.ReduceOp.AVG  # gloo has none
            given = {**kwargs, "op": dist.ReduceOp.SUM} if mean else kwargs
            done = real(*inner(args), group=group, **given)
            for each in sent if mean else ():
                rounding = None if each.is_floating_point() else "trunc"
                each.div_(dist.get_world_size(), rounding_mode=rounding)
            return done

        return call

    def of_objects(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            GPU[-1].sends_objects = True
            try:
                return real(*args, **kwargs)
            finally:
                GPU[-1].sends_objects = False

        return call

    def same_start(model: torch.nn.Module) -> None:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    barrier = dist.barrier
    tensors = ("all_gather", "all_reduce", "broadcast", "reduce")
    objects = ("all_gather_object", "broadcast_object_list")
    patches = {name: of_tensors(getattr(dist, name)) for name in tensors}
    patches |= {name: of_objects(getattr(dist, name)) for name in objects}
    patches |= {"init_process_group": joined, "get_backend": lambda *_: joined_by[0]}
    patches["barrier"] = lambda *_, **__: barrier()
    begins_alike = mock.patch.object(federated_strategy, "_sync_module_states", same_start)
    with mock.patch.multiple(dist, **patches), begins_alike:
        yield
