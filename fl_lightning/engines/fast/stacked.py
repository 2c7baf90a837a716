"""Several clients as one batch of models by ``torch.func``: for small networks, above all on a GPU.

Clients with fewer steps than the rest of their group neither move nor change a row once they have
finished. Batches of unequal size are grouped by size. Results agree with the other engines up to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fl_lightning.client.client_optimizer import (
    ClientOptimizer,
    is_flat,
    is_plain_sgd,
    moves_without_gradient,
)
from fl_lightning.client.client_trainer import ClientTrainer, add_error_note, begin
from fl_lightning.client.flat_learner import FlatLearner
from fl_lightning.client.local_step import LocalStep
from fl_lightning.client.sample_gradients import StepAsForward, check_registered
from fl_lightning.client.step_logs import START, in_one_step, of_steps, reduce_into
from fl_lightning.engines.engine import Collect
from fl_lightning.engines.engine_context import LearnerCopies
from fl_lightning.engines.threads import largest_first
from fl_lightning.engines.trials.batch_check import first_line
from fl_lightning.learner.attributes import Attributes
from fl_lightning.learner.modules import check_gradient_hooks
from fl_lightning.machine.device_memory import to_device
from fl_lightning.machine.random_state import RandomState, random_state_kept, seed_client
from fl_lightning.round.client_group import LOSS, ClientGroup
from fl_lightning.round.clients import Clients
from fl_lightning.round.context import Round

BatchGroup = tuple[list[int], list[Tensor], TreeSpec]


class Stack:
    """n clients' models ``x`` ``(n, D)`` and their gradients.

    It takes the place of a :class:`FlatLearner` in local steps.
    """

    per_parameter = None
    hooks = None
    missing = ()  # a learner whose loss does not depend on all parameters is not stacked

    def __init__(self, copy: FlatLearner, n: int) -> None:
        self.copy = copy
        self.x = copy.x.new_empty(n, copy.x.shape[1])
        self.g = torch.zeros_like(self.x)
        self.buffers: dict[str, Tensor] = {}
        self.logged: dict[str, tuple[Tensor, Tensor]] = {}
        self._counts: dict[str, int] = {}
        self._caller = StepAsForward(copy.learner, copy.step)

    def gradient(self, groups: list[BatchGroup], step: int, log: bool = True) -> Tensor:
        """∇ℓ at each client's x ``(n, D)``; zeros for clients without a batch."""
        self.copy.logging = log
        self.copy.present.index = step
        n = len(self.x)
        missing = set(range(n))
        for rows, leaves, spec in groups:
            missing.difference_update(rows)
            everyone = len(rows) == n
            # An index that is made from a list in each use would make a GPU wait each time.
            place = slice(None) if everyone else to_device(rows, self.x.device)
            x = self.x if everyone else self.x[place]
            views: dict[str, Tensor] = {}
            for name, (where, shape) in self.copy.layout.items():
                views["learner." + name] = x[:, where].view(len(rows), *shape)
            version = x._version
            gradients, logs = self._stacked(views, leaves, spec, step)
            # A step may change weights in place (Embedding's max_norm), and these are only a copy.
            if not everyone and x._version != version:
                self.x[place] = x
            parts = [gradients[name].reshape(len(rows), -1) for name in views]
            if everyone:
                torch.cat(parts, dim=1, out=self.g)
            else:
                self.g[place] = torch.cat(parts, dim=1)
            for name, values in logs.items():
                self._log(name, place, values)
        if missing:
            self.g.index_fill_(0, to_device(sorted(missing), self.x.device), 0)
        return self.g

    def _log(self, name: str, place: slice | Tensor, values: Tensor) -> None:
        """Add the values that the clients in these rows logged in a step."""
        kind = self.copy.logs.kinds.get(name, "mean")
        if name not in self.logged:
            zeros = torch.zeros(2, len(self.x), dtype=torch.float64, device=self.x.device)
            self.logged[name] = (zeros[0].fill_(START[kind]), zeros[1])
        total, number = self.logged[name]
        sums = total[place]
        reduce_into(sums, values, kind)
        total[place] = sums
        number[place] += self._counts[name]

    def _stacked(
        self, parameters: dict[str, Tensor], leaves: list[Tensor], spec: TreeSpec, step: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        Aux = tuple[Tensor, dict[str, Tensor]]

        def loss(parameters: dict[str, Tensor], leaves: list[Tensor]) -> tuple[Tensor, Aux]:
            self.copy.logged = {}
            batch = tree_unflatten(leaves, spec)
            with self.copy.forward_context():
                arguments = (batch, step) if self.copy.takes_index else (batch,)
                output = functional_call(self._caller, parameters, arguments)
            logged = self.copy.logged
            self.copy.logged = {}
            value = self.copy.loss_in(output)
            if self.copy.logging and self.copy.keeps_loss:
                logged[LOSS] = [value.detach()]
            kinds = self.copy.logs.kinds
            self._counts = {name: len(values) for name, values in logged.items()}
            logs = {name: in_one_step(values, kinds.get(name)) for name, values in logged.items()}
            return value, (value, logs)

        gradients_of = vmap(grad(loss, has_aux=True), randomness="different")
        with torch.enable_grad():
            gradients, (losses, logs) = gradients_of(parameters, leaves)
        check_registered(losses)
        return gradients, logs

    def take_logs(self) -> tuple[dict[str, Tensor], dict[str, list[bool]]]:
        """Numbers over each client's steps, ``(n,)`` float64, and which clients logged."""
        logged = self.logged
        self.logged = {}
        numbers: dict[str, Tensor] = {}
        who: dict[str, list[bool]] = {}
        for name, (total, number) in logged.items():
            numbers[name] = of_steps(total, number, self.copy.logs.kinds.get(name))
            who[name] = (number > 0).tolist()
        return numbers, who

    @contextmanager
    def shifted(self, e: Tensor) -> Iterator[None]:
        """Within, gradients are taken at x + e; x stays as it is."""
        x = self.x
        self.x = self.x + e
        try:
            yield
        finally:
            self.x = x

    @contextmanager
    def at(self, point: Tensor) -> Iterator[None]:
        """Within, gradients are taken at ``point``, into memory of their own."""
        present = self.x, self.g
        self.x = point.expand_as(self.x)
        self.g = torch.empty_like(self.g)
        try:
            yield
        finally:
            self.x, self.g = present

    def load_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Buffers are the learner's own: a learner that changes them cannot be stacked."""

    def groups(self, batches: list[tuple[int, Any]]) -> list[BatchGroup]:
        """Clients' batches ``[(row, batch)]``, stacked where structure and shapes are alike."""
        alike: dict[Any, tuple[list[int], list[list[Tensor]], TreeSpec]] = {}
        for row, batch in batches:
            if self.copy.convert is not None:
                batch = self.copy.convert(self.copy.learner, batch)
            leaves, spec = tree_flatten(batch)
            key = (str(spec), *((leaf.shape, leaf.dtype) for leaf in leaves))
            rows, gathered, _ = alike.setdefault(key, ([], [], spec))
            rows.append(row)
            gathered.append(leaves)
        groups: list[BatchGroup] = []
        for rows, gathered, spec in alike.values():
            stacked = [torch.stack(leaves) for leaves in zip(*gathered, strict=True)]
            groups.append((rows, stacked, spec))
        return groups


class Stacked:
    """Trains ``at_once`` clients of a round together.

    Args:
        worker: the one that trains in the learner itself, for gradients of one client's whole
            objective.
        optimizer_of: makes the client optimizer of a stack.
    """

    def __init__(
        self,
        worker: ClientTrainer,
        optimizer_of: Callable[[Tensor, Tensor], ClientOptimizer],
        at_once: int,
    ) -> None:
        self.worker = worker
        self.work = worker.work
        self.copy = worker.copy
        self._optimizer_of = optimizer_of
        self.at_once = at_once

    def train(
        self,
        round: Round,
        leaves: list[tuple[int, int]],
        collect: Collect,
        client_done: Callable[[], None],
    ) -> None:
        check_gradient_hooks(self.copy.learner)
        waiting = largest_first(round, list(leaves))
        with self.copy.tied(round.evaluated), random_state_kept(self.copy.x):
            # While clients are stacked, the learner's own parameters are not any client's model.
            # NaN shows code that reads them by mistake.
            self.copy.x.fill_(torch.nan)
            for begun in range(0, len(waiting), self.at_once):
                group = waiting[begun : begun + self.at_once]
                trained = self.train_group(round, [client for _, client in group])
                for (leaf, _), alone in zip(group, trained, strict=True):
                    alone.buffers = self.copy.buffers
                    collect(leaf, alone)
                    client_done()

    def train_group(self, round: Round, ids: list[int]) -> list[ClientGroup]:
        """Train a group, up to ``on_local_end``, and return each client as a group of one."""
        work = self.work
        stack = Stack(self.copy, len(ids))
        stack.x.copy_(round.w)
        group = work.group(round, ids, stack.x, self._full_gradient)
        optimizer = self._optimizer_of(stack.x, stack.g)
        try:
            seed_client(work.seed, round.t, ids[0])
            # Clients have different numbers of batches, so the Trainer must not show a single
            # number.
            self.copy.begin(work.data)
            begin(work, group)
            rates = round.rates.of_client(round.steps[ids[0]])
            optimizer.begin(rates, None)
            # Learner code may read the optimizer over its own parameters.
            self.worker.optimizer.begin(rates, None)
            step = LocalStep(work, stack, group, optimizer)
            # Use one limit per client, because clients that have finished must not count as
            # clipped.
            if step.limit is not None:
                step.limit = stack.x.new_full((len(ids), 1), step.limit)
            for index, groups in enumerate(self._batches(stack, group, step.limit)):
                step(groups, index)
            group.local_step = None
            means, logged = stack.take_logs()
            group.logs.update(means)
            if step.clipped is not None:
                steps = Clients(group).steps[:, 0].to(torch.int64)
                group.logs["clipped_steps"] = step.clipped / steps
            work.methods.run("on_local_end", Clients(group))
        except Exception as error:
            add_error_note(error, f"in round {round.t}, one of the clients {ids}")
            raise
        single = [one(group, row, logged) for row in range(len(ids))]
        if work.keep_optimizer_state:
            for each in single:
                each.optimizer_rows = optimizer.state()
        return single

    def _batches(
        self, stack: Stack, group: ClientGroup, limit: Tensor | None
    ) -> Iterator[list[BatchGroup]]:
        """One step's batches at a time; clients without a batch are put back after the step.

        Their clipping ``limit`` ``(n, 1)`` is lifted, so that they do not count as clipped.
        """
        round = group.round
        steps = [round.steps[i] for i in group.ids]
        sources = []
        for i, k in zip(group.ids, steps, strict=True):
            sources.append(iter(self.work.client_batches(i, round.t, k, stack.x.device)))
        for step in range(max(steps)):
            training = [row for row, k in enumerate(steps) if step < k]
            finished = [row for row, k in enumerate(steps) if step >= k]
            kept = Kept(group, finished) if finished else None
            if limit is not None and finished:
                limit.index_fill_(0, to_device(finished, limit.device), torch.inf)
            # This generator resumes here after the step, before it yields the next one.
            yield stack.groups([(row, next(sources[row])) for row in training])
            if kept is not None:
                kept.restore()

    def _full_gradient(self, group: ClientGroup, at: Tensor) -> Tensor:
        rows = at.expand_as(group.x)
        gradients = []
        with torch.no_grad():
            for i, point in zip(group.ids, rows, strict=True):
                single = ClientGroup(group.round, [i], self.copy.x)
                gradients.append(self.worker.full_gradient(single, point))
        return torch.cat(gradients)

    def close(self) -> None:
        """Nothing to give back."""


class Kept:
    """Copies of what finished clients have, before the rest of their group takes a step."""

    def __init__(self, group: ClientGroup, finished: list[int]) -> None:
        self.group = group
        self.finished = finished
        self.place = place = to_device(finished, group.x.device)
        self.x = group.x[place]
        self.rates_used = None if group.rates_used is None else group.rates_used[place]
        self.rows = {key: (rows._version, rows[place]) for key, rows in group.rows.items()}
        self.given = [(given, dict(given)) for given in (group.uploads, group.logs)]
        self.attributes = {
            name: (value, value._version, value[finished])
            for name, value in group.attributes_of_clients().items()
        }

    def restore(self) -> None:
        group = self.group
        group.x[self.place] = self.x
        if group.rates_used is not None and self.rates_used is not None:
            group.rates_used[self.place] = self.rates_used
        for key, rows in group.rows.items():
            version, values = self.rows.get(key, (None, None))
            # Rows that were first read in this step get back the values that they were loaded with.
            if values is None:
                declared = group.declared[key]
                ids = [group.ids[row] for row in self.finished]
                values = torch.stack([group.load(key, declared, i) for i in ids])
                version = group.change_counts[key]
            if rows._version != version:
                rows[self.place] = values
        for present, earlier in self.given:
            for key, value in earlier.items():
                # A different tensor means that a hook assigned the value in this step.
                if present[key] is not value:
                    present[key] = present[key].clone()
                    present[key][self.place] = value[self.place]
        self._restore_attributes()

    def _restore_attributes(self) -> None:
        """Put back rows of attributes that a hook assigned or changed in place in this step."""
        for name, present in self.group.attributes_of_clients().items():
            earlier, version, values = self.attributes.get(name, (None, None, None))
            if values is None or (present is earlier and present._version == version):
                continue
            # A hook may have assigned a tensor that belongs to others.
            if present is not earlier:
                present = self.group.attributes[name] = present.clone()
            present[self.finished] = values


def one(group: ClientGroup, row: int, logged: dict[str, list[bool]]) -> ClientGroup:
    """One client of a group as a group of one, without what its learner did not log."""
    alone = group.alone(row)
    alone.logs = {
        name: value for name, value in alone.logs.items() if name not in logged or logged[name][row]
    }
    return alone


def why_not_stacked(copies: LearnerCopies) -> str:
    """Why clients cannot be stacked, from declarations and then from a step; empty: they can."""
    context = copies.context
    optimizer = context.optimizer
    if not is_flat(optimizer, context.learner):
        return f"{type(optimizer).__name__} does not treat every coordinate alike"
    if context.work.accumulate > 1:
        return f"accumulate={context.work.accumulate}: a step of each client is several batches"
    if context.work.keep_optimizer_state and not is_plain_sgd(optimizer):
        return "keep_optimizer_state"
    schedule = context.schedule
    if schedule is not None and schedule.another is not None and not context.cohort.equal_steps:
        return "its lr scheduler depends on how many local steps a client takes"
    if held_once := context.held_once(context.learner):
        return held_once
    if copies.as_buffers:
        return f"its training_step changes the frozen parameter {copies.as_buffers[0]}"
    if (hooks := copies.original.hooks) is not None:
        return f"its {hooks.names[0]} takes one client's batch"
    before = RandomState(context.w)
    try:
        # Try a copy, so that the learner keeps its attributes.
        return what_a_stack_breaks(copies)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)[:120]}"
    finally:
        before.restore()


def what_a_stack_breaks(copies: LearnerCopies) -> str:
    """Take a step of two clients as a stack, and return the reason against stacking, if any."""
    context = copies.context
    ids = context.cohort.tried(0)
    copy = copies.original.another(aliased=False)
    stack = Stack(copy, 2)
    stack.x.copy_(context.w.detach().expand_as(stack.x))
    copy.begin(context.work.data)
    # Only a learner that reads parameters outside the stack would read these.
    copy.x.fill_(torch.nan)
    before = Attributes(copy.learner, metrics=True)
    own = {name: id(buffer) for name, buffer in copy.buffers.items()}
    batches = []
    for row, client in enumerate((ids[0], ids[-1])):
        read = context.work.data.client_batches(client, 0, 1, device=stack.x.device)
        batches.append((row, next(iter(read))))
    if moves_without_gradient(context.optimizer) and (name := without_gradient(copies, batches)):
        return f"its loss does not depend on {name}, which the optimizer would move all the same"
    copy.present.silent = True
    with torch.no_grad(), copy.present.lending() as lent:
        finite = stack.gradient(stack.groups(batches), 0).isfinite().all()
    if lent.reached:
        return f"its training_step writes to {lent.reached}"
    if not bool(finite):
        return "its loss is not finite, or reads parameters that are not its modules'"
    for name, buffer in copy.buffers.items():
        if own.get(name) != id(buffer):
            return f"its training_step assigns to the buffer {name}"
    changed = before.changed(Attributes(copy.learner, metrics=True))
    return f"its training_step changes {changed[0]}" if changed else ""


def without_gradient(copies: LearnerCopies, batches: list[tuple[int, Any]]) -> str:
    """The first parameter that a batch's loss gives no gradient; empty: each has one."""
    # Gradients in a stack are zero here, so take one client's step.
    alone = copies.original.another(aliased=False)
    alone.x.copy_(copies.context.w.detach())
    alone.begin(copies.context.work.data)
    alone.present.silent = True
    for _, batch in batches:
        with torch.no_grad(), alone.present.lending():
            alone.gradients(batch, 0, log=False)
        if alone.missing:
            return list(alone.layout)[alone.missing[0]]
    return ""
