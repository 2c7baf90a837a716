"""Contracts of client hooks, watched in a small run: what they must not draw, set or read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fl_lightning.callback import Clients, FederatedCallback
from fl_lightning.lab.contracts import snapshots
from fl_lightning.lab.contracts.check_report import Failed, NotApplicable, where
from fl_lightning.lab.contracts.federation import fit
from fl_lightning.lab.contracts.small_runs import Method
from fl_lightning.machine.random_state import RandomState

# (name of the hook, the call, the clients) -> what it returned
Guard = Callable[[str, Callable[[], Any], Clients], Any]


def in_a_run(method: Method, guard: Guard) -> None:
    """Call the hooks that take clients through ``guard``, in a run of two rounds."""

    def watched(hook: Any, subject: Any, *more: Any) -> Any:
        if not isinstance(subject, Clients):
            return hook(subject, *more)
        return guard(hook.__name__, partial(hook, subject, *more), subject)

    def watch(module: Any) -> None:
        module.run.methods.watch = watched

    fit([method.factory()], rounds=2, started=watch)


def draws(method: Method) -> None:
    """Require that no hook of clients draws from the process's random generators."""

    def guard(hook: str, call: Callable[[], Any], clients: Clients) -> Any:
        before = RandomState()
        returned = call()
        if before.drawn_since():
            raise Failed(
                f"{hook} draws from a random generator of the process",
                "such numbers depend on which clients train together, and in which order. Draw "
                'from self.generator("a name", clients.round, client) for each client in '
                "clients.client_ids",
            )
        return returned

    in_a_run(method, guard)


def untouched_self(method: Method) -> None:
    def guard(hook: str, call: Any, clients: Clients) -> Any:
        owner = getattr(call.func, "__self__", None)
        if not isinstance(owner, FederatedCallback):
            return call()
        before = snapshots.take(owner)
        returned = call()
        changed = snapshots.changes(before, snapshots.take(owner))
        if changed:
            raise Failed(
                f"{hook} set or changed {', '.join(changed)}",
                "hooks that take clients run in several threads with different clients: keep the "
                "value in Scratch (for one round) or in ClientState (for the whole run), as "
                "self.name[clients]",
            )
        return returned

    in_a_run(method, guard)


class ReadsValue(Exception):
    """An operation reads a tensor's value, or gives a shape that depends on one."""


class Reads(TorchDispatchMode):
    """Within this context, :class:`ReadsValue` is raised by operations that read a value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = torch.Tag.data_dependent_output in func.tags
        shapes = torch.Tag.dynamic_output_shape in func.tags
        if func is torch.ops.aten.index.Tensor:
            shapes = any(index is not None and index.dtype == torch.bool for index in args[1])
        if reads or shapes:
            raise ReadsValue(func)
        return func(*args, **(kwargs or {}))


class LeavesTorch(TorchFunctionMode):
    """Within this context, methods that copy a tensor out of torch raise :class:`ReadsValue`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.numpy, Tensor.tolist, Tensor.__array__):
            raise ReadsValue(func)
        return func(*args, **(kwargs or {}))


def traceable(method: Method) -> None:
    """Require that no hook of clients reads a tensor's value, or branches on one."""
    if method.cls.reads_values:
        raise NotApplicable("it says that its hooks read values, so its steps are not captured")

    def guard(hook: str, call: Callable[[], Any], clients: Clients) -> Any:
        group = clients._group
        # What the framework does for a hook may read values: it evaluates on the samples.
        group.evaluate = _unwatched(group.evaluate)
        group.full_gradient = _unwatched(group.full_gradient)
        try:
            with Reads(), LeavesTorch():  # type: ignore[no-untyped-call]
                return call()
        except ReadsValue as error:
            raise Failed(
                f"{hook} reads a tensor's value or branches on it: {where(error)}",
                "no .item(), float(), tolist(), numpy(), `if tensor`, boolean indexing or nonzero "
                "in client hooks: they would stop a GPU and cannot be captured in a graph; use "
                "torch.where, clamp, multiplication",
            ) from error

    in_a_run(method, guard)


def _unwatched(function: Any) -> Any:
    def call(*given: Any) -> Any:
        with _disable_current_modes():
            return function(*given)

    return call
