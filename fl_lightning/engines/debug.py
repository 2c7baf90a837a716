"""``engine="debug"``: the bits of sequential, and errors that carry what they are about."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fl_lightning.client.client_trainer import ClientTrainer, EachStep, add_error_note
from fl_lightning.engines.sequential import Sequential
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.clients import Clients
from fl_lightning.round.server import Server


@dataclass(frozen=True)
class At:
    """The place of a run when a hook or ``training_step`` raised an error, which has it as ``at``.

    Args:
        round: t, from 0.
        client: number of the client; None: at the server.
        step: number of the local step, from 0; None: outside of a client's steps.
        hook: ``"training_step"``, or a method's hook, such as ``"ControlVariates.on_local_end"``.
        arguments: arguments of a method's hook by name, as they were before the call. ``clients``
            has ``x`` ``(n, D)`` and the rows of states that were read so far; ``server`` has ``w``
            and ``update`` ``(D,)``.
        batch: batch of the local step; None outside of a client's steps.
    """

    round: int
    client: int | None
    step: int | None
    hook: str
    arguments: dict[str, Any]
    batch: Any


class Debug(Sequential):
    """Trains as :class:`Sequential` does, and keeps each hook's arguments until it has returned."""

    def __init__(self, worker: ClientTrainer, threads: int) -> None:
        super().__init__(worker, threads)
        worker.step_runner = StepByStep()
        # Watch server hooks too, which are called between two calls of `train`.
        worker.work.methods.watch = watched

    def close(self) -> None:
        self.worker.work.methods.watch = None


class StepByStep(EachStep):
    """Takes a client's local steps without recording them."""

    @contextmanager
    def around(self, clients: ClientGroup, index: int, batch: Any) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            place = At(clients.round.t, clients.ids[0], index, "training_step", {}, batch)
            leave(error, place)
            raise


def watched(hook: Callable[..., Any], subject: Clients | Server, *more: Any) -> Any:
    """Call a method's hook; its error has ``at``."""
    name = getattr(hook, "__qualname__", repr(hook))
    if hasattr(hook, "__self__"):
        name = f"{type(hook.__self__).__name__}.{hook.__name__}"
    # A hook may change its arguments, so keep a copy of them.
    names = list(inspect.signature(hook).parameters)
    arguments = dict(zip(names, [seen(subject), *map(copied, more)], strict=False))
    try:
        return hook(subject, *more)
    except Exception as error:
        if isinstance(subject, Server):
            leave(error, At(subject.round, None, None, name, arguments, None))
            raise
        group = subject._group
        step = group.local_step
        index = None if step is None else int(step.index)
        batch = None if step is None else getattr(step, "batch", None)
        leave(error, At(group.round.t, group.ids[0], index, name, arguments, batch))
        raise


def leave(error: Exception, at: At) -> None:
    """Put ``at`` on an error that has none yet."""
    if hasattr(error, "at"):
        return
    error.at = at  # type: ignore[attr-defined]
    add_error_note(
        error, f"in {at.hook}; this error's attribute `at` has its arguments and the batch"
    )


def seen(subject: Clients | Server) -> dict[str, Any]:
    """Return the tensors that a hook can change."""
    if isinstance(subject, Server):
        return {"w": subject.w.clone(), "update": subject.update.clone()}
    group = subject._group
    rows = {key: value.clone() for key, value in group.rows.items()}
    return {"ids": list(group.ids), "x": group.x.clone(), **rows}


def copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
