"""A worker trains one client at a time, in a copy of the learner, with an optimizer of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fl_lightning.aggregation import metric_states
from fl_lightning.client.client_optimizer import ClientOptimizer
from fl_lightning.client.flat_learner import FlatLearner
from fl_lightning.client.forward_hooks import ForwardHooks
from fl_lightning.client.frozen_parameters import FrozenParameters
from fl_lightning.client.local_step import LocalStep, LocalTraining
from fl_lightning.errors import WrongKind
from fl_lightning.learner.parameters import check_same_parameters
from fl_lightning.machine.random_state import random_state_kept, seed_client
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.clients import Clients
from fl_lightning.round.context import Round
from fl_lightning.round.partial_training import mask_of

Stop = Callable[[], bool]  # whether a client is to stop before its next step


class ClientTrainer:
    """Trains clients one after the other, each from the server's model.

    Args:
        copy: of the learner; in the sequential engine, the learner itself.
        step_runner: its ``run(step, batches, clients, optimizer, copy)`` takes all local steps of a
            client, and its ``forget()`` ends a round; None: each step runs as it is.
        stream: on a GPU, where it computes; None: where its caller does.

    ``checks_frozen``: whether a step that writes a frozen parameter is refused.
    """

    def __init__(
        self,
        work: LocalTraining,
        copy: FlatLearner,
        optimizer: ClientOptimizer,
        step_runner: Any = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.work = work
        self.copy = copy
        self.optimizer = optimizer
        self.step_runner = step_runner
        self.stream = stream
        # Comparing would wait for the device, so on streams the engine does it once per round.
        self.checks_frozen = stream is None
        if work.methods.look:
            copy.forward_hooks = ForwardHooks(work.methods, copy, work.draws)

    def train(
        self, round: Round, client: int, stop: Stop | None = None, replay: bool = True
    ) -> ClientGroup:
        """Train one client, up to ``on_local_end``; the result is valid until the next one begins.

        Raises:
            Stopped: ``stop()`` was true before a step.
            Exception: from the learner, the data or a method, with a note that names round, client
                and step.
        """
        work = self.work
        copy = self.copy
        optimizer = self.optimizer
        group = work.group(round, [client], copy.x, self.full_gradient)
        clients = Clients(group)
        steps = round.steps[client]
        batches = NumberedBatches(work.client_batches(client, round.t, steps, copy.x.device), stop)
        try:
            copy.load(round, client)
            if copy.forward_hooks is not None:
                copy.forward_hooks.begin(group)
            in_all = work.batches_in(client, steps)
            group.batches = in_all if work.counts_batches else None
            copy.begin(work.data, lambda: clients.client_ids[0], in_all)
            # Seed before the first hook, so that a client's draws depend only on (seed, round,
            # client), and not on the client that this worker trained before.
            if work.draws:
                seed_client(work.seed, round.t, client)
            begin(work, group)
            optimizer.begin(round.rates.of_client(steps), self.optimizer_rows(round, client))
            # Another client, or a full gradient in `on_local_start`, may have left values in the
            # logs and in the learner's metrics.
            copy.reset()
            step = LocalStep(work, copy, group, optimizer)
            frozen = FrozenParameters(copy) if self.checks_frozen else None
            if self.step_runner is not None and replay:
                self.step_runner.run(step, iter(batches), group, optimizer, copy)
            else:
                for index, batch in enumerate(batches):
                    step(batch, index)
            check_same_parameters(copy.learner, copy.slots_of_parameters)
            if frozen is not None:
                frozen.check(round.t)
            group.local_step = None
            if copy.forward_hooks is not None:
                copy.forward_hooks.end()
            # Take the logs before `on_local_end`, which may read the mean loss among them.
            group.metrics = copy.take_metrics()
            for name, value in {**copy.take_logs(), **metric_states.alone(group.metrics)}.items():
                group.logs[name] = value.reshape(1)
            if step.clipped is not None:
                group.logs["clipped_steps"] = step.clipped / steps
            work.methods.run("on_local_end", clients)
        except Exception as error:
            place = f"in round {round.t}, client {client}, local step {batches.step}"
            add_error_note(error, f"{place} (all counted from 0)")
            raise
        group.buffers = copy.buffers
        group.optimizer_rows = optimizer.state() if work.keep_optimizer_state else {}
        return group

    def full_gradient(self, group: ClientGroup, at: Tensor) -> Tensor:
        """∇f_i ``(1, D)`` at ``at`` ``(D,)`` or ``(1, D)`` over all samples, without weight decay.

        x, buffers and random generators stay as they are.
        """
        (client,) = group.ids
        work = self.work
        copy = self.copy
        at = at.view(1, -1)
        buffers = {name: buffer.clone() for name, buffer in copy.buffers.items()}
        point = copy.x.clone()
        gradient = copy.g.clone()
        total = torch.zeros_like(copy.x)
        present = copy.present
        index = present.index
        who = present.who
        steps = present.steps
        forward_hooks = copy.forward_hooks
        latest = None if forward_hooks is None else forward_hooks.latest
        copy.begin(work.data, lambda: Clients(group).client_ids[0])
        with random_state_kept(at) if work.draws else nullcontext():
            if work.draws:
                seed_client(work.seed, group.round.t, client, "full")
            # A change through `.data` does not count as a change of x, which has its old value
            # again at the end.
            copy.x.data.copy_(at)
            try:
                for step, (batch, number) in enumerate(work.full_batches(client, copy.x.device)):
                    # Every batch is evaluated with the same buffers, so that the objective is one
                    # function.
                    copy.load_buffers(buffers)
                    share = number / group.round.sizes[client]
                    total += copy.gradient(batch, step, log=False) * share
            finally:
                copy.x.data.copy_(point)
                copy.g.copy_(gradient)
                copy.load_buffers(buffers)
                present.begin(work.data, who, steps)
                present.index = index
                if forward_hooks is not None:
                    forward_hooks.latest = latest
        return total

    def optimizer_rows(self, round: Round, client: int) -> dict[str, Tensor] | None:
        """The client's optimizer state from its latest round, where it is kept."""
        if not self.work.keep_optimizer_state:
            return None
        rows = {name: round.read(name, client) for name in round.optimizer_rows}
        return {name: row for name, row in rows.items() if row is not None}

    def forget(self) -> None:
        """Drop recordings: in a new round, what they hold fixed may have changed."""
        if self.step_runner is not None:
            self.step_runner.forget()

    def __enter__(self) -> None:
        """Compute on the worker's stream, after all that the caller's stream was given so far."""
        self._context: AbstractContextManager[Any] = nullcontext()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            self._context = torch.cuda.stream(self.stream)
        self._context.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self._context.__exit__(*failure)


class EachStep(ABC):
    """A step runner that takes each step as it is, within :meth:`around`."""

    stream: torch.cuda.Stream | None = None

    def run(self, step: Any, batches: Iterator[Any], clients: ClientGroup, *others: Any) -> None:
        for index, batch in enumerate(batches):
            with self.around(clients, index, batch):
                step(batch, index)

    @abstractmethod
    def around(
        self, clients: ClientGroup, index: int, batch: Any
    ) -> AbstractContextManager[Any]: ...

    def forget(self) -> None:  # noqa: B027
        """Nothing is kept from one round to the next."""


def begin(work: LocalTraining, group: ClientGroup) -> None:
    """Bring clients from the server's model to their starts: kept parts, then methods' changes."""
    group.take_kept_parts()
    methods = work.methods
    at_zero = methods.partial_training.untrained == "zero"
    group.untrained = mask_of(methods, group)
    version = group.x._version
    methods.run("on_local_start", Clients(group))
    if group.x._version != version and not methods.move_starts:
        raise WrongKind(
            "a method's on_local_start changed clients.x, but its class has moves_start = False"
        )
    # Do this after the methods, which may have moved untrained coordinates.
    group.hold(torch.zeros_like(group.round.w) if at_zero else group.round.w)
    group.begin(own_starts=methods.move_starts or at_zero)


class Stopped(Exception):
    """An earlier client of the cohort failed, or the run was interrupted."""


class NumberedBatches:
    """An iterable of batches; ``step`` is the index of the current batch, from 0.

    Iterating raises :class:`Stopped` once ``stop()`` is true.
    """

    def __init__(self, batches: Iterator[Any], stop: Stop | None) -> None:
        self.batches = batches
        self.stop = stop
        self.step = 0

    def __iter__(self) -> Iterator[Any]:
        for self.step, batch in enumerate(self.batches):  # noqa: B020
            if self.stop is not None and self.stop():
                raise Stopped
            yield batch


def add_error_note(error: Exception, where: str) -> None:
    """Add a note to an error, where Python has notes."""
    if hasattr(error, "add_note"):
        error.add_note(where)
