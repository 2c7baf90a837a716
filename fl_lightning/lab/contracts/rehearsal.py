"""Contracts of client hooks, called directly: groups of any size, no read of a value, no attribute
set on self.

One round is rehearsed on quadratics with filled state: on_local_start, two local steps,
on_local_end, transmit. Hooks that read the outputs of modules are watched in a round of the tiny
federation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fl_lightning.callback import Clients, Declaration, FederatedCallback
from fl_lightning.callback_list import LOOKING, CallbackList, checked_rows
from fl_lightning.client.local_step import LocalStep, LocalTraining
from fl_lightning.lab.contracts import snapshots
from fl_lightning.lab.contracts.check_report import Failed, where
from fl_lightning.lab.contracts.federation import Outcome, fit, require_same
from fl_lightning.lab.contracts.small_runs import Method
from fl_lightning.learner.layout import Layout
from fl_lightning.machine.random_state import RandomState
from fl_lightning.round.client_group import LOSS, ClientGroup
from fl_lightning.round.context import ClientRates, Round
from fl_lightning.round.transaction import RoundTransaction

STEPS = 2
# (name of the hook, the call) -> what it returned
Call = Callable[[str, Callable[[], Any]], Any]


def _plainly(hook: str, call: Callable[[], Any]) -> Any:
    return call()


class Stage:
    """A round with filled state, on which hooks are called."""

    def __init__(self, callback: FederatedCallback, w: Tensor, layout: Layout, m: int) -> None:
        self.callback = callback
        self.methods = CallbackList([callback], layout)
        self.curvature = 0.5 + self._random(1, m, w.numel())
        self.centre = self._random(2, m, w.numel()) - 0.5
        # Fill states with numbers: a hook that sees only zeros would show little.
        self.rows: dict[str, Tensor] = {}
        server_states: dict[str, Tensor] = {}
        for key, declared in self.methods.declared.items():
            if declared.keeps_rows:
                self.rows[key] = self._filled(key, declared, m, w)
            elif declared.at_server:
                server_states[key] = self._filled(key, declared, m, w)[0]
        self.round = Round(
            t=1,
            ids=list(range(m)),
            steps={i: 1 + i % 3 for i in range(m)},
            sizes={i: 2 + i for i in range(m)},
            weights={i: 2.0 + i for i in range(m)},
            num_clients=2 * m,
            w=w,
            w0=w - 0.1 if self.methods.start_from_w0 else None,
            evaluated=w,
            buffers={},
            layout=layout,
            rates=ClientRates(1.0, torch.tensor(0.1, dtype=torch.float64)),
            read=lambda key, client: self.rows[key][client] if key in self.rows else None,
            steps_of=lambda client, epochs: 1 + client % 2,
            server_states=server_states,
        )

    @staticmethod
    def _random(seed: int, *shape: int) -> Tensor:
        return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def _filled(self, key: str, declared: Declaration, m: int, w: Tensor) -> Tensor:
        like = declared.zeros(w)
        value = 0.1 * (0.5 + self._random(len(key), m, *like.shape))
        return value.to(like)

    def gradient(self, group: ClientGroup, at: Tensor) -> Tensor:
        ids = group.ids
        return self.curvature[ids] * (at - self.centre[ids])

    def evaluate(self, group: ClientGroup, at: Tensor, what: str) -> dict[str, Tensor]:
        ids = group.ids
        loss = (self.curvature[ids] * (at - self.centre[ids]) ** 2).sum(1, keepdim=True) / 2
        return defaultdict(lambda: loss, loss=loss)

    def group(self, ids: Sequence[int]) -> ClientGroup:
        """Return a group about to start, whose per-client columns are set as an engine sets
        them.
        """
        group = ClientGroup(
            self.round,
            list(ids),
            self.round.w.expand(len(ids), -1).clone(),
            self.gradient,
            self.evaluate,
        )
        # Three classes, with as many samples as the client has; client 0 has none of the last
        # class.
        group.label_counts = lambda client: [1, 1, client]
        # Each column is made when it is first read, so read all of them now.
        clients = Clients(group)
        _ = clients.ids, clients.steps, clients.sizes, clients.weights, clients.label_counts
        return group

    def rehearse(self, group: ClientGroup, call: Call = _plainly) -> list[tuple[str, Outcome]]:
        """Call the hooks of one round in order, each through ``call``.

        Returns:
            Each hook's name, and the state after it, with the value that the hook returned.
        """
        outcomes: list[tuple[str, Outcome]] = []
        methods = self.methods
        clients = Clients(group)
        methods.bind(RoundTransaction(self.round))

        def watched(hook: Callable[..., Any], subject: Any, *more: Any) -> Any:
            name = hook.__name__
            returned = call(name, partial(hook, subject, *more))
            # A hook that returns None has changed its gradient in place, or has none.
            left = more if returned is None else (returned,)
            outcome = state(group)
            for value in left:
                if isinstance(value, Tensor):
                    outcome["what it returned"] = value.clone()
            outcomes.append((name, outcome))
            return returned

        methods.watch = watched
        if (trains := methods.owner("trained")) is not None:
            group.untrained = ~methods.call(trains, clients)
        methods.run("on_local_start", clients)
        group.reset_untrained(
            methods.partial_training is not None and methods.partial_training.untrained == "zero"
        )
        group.begin(own_starts=True)
        model = StagedModel(self, group)
        optimizer: Any = model  # plain SGD
        step = LocalStep(LocalTraining(None, methods, seed=0, draws=False), model, group, optimizer)
        for k in range(STEPS):
            step(None, k)
        group.local_step = None
        if methods.reads_loss:
            group.logs[LOSS] = 1.0 + clients.ids
        methods.run("on_local_end", clients)
        if (transmit := methods.owner("transmit")) is not None:
            u = clients.x - self.round.w
            checked_rows(transmit, methods.call(transmit, clients, u), u)
        if (personal := methods.owner("personal")) is not None:
            checked_rows(personal, methods.call(personal, clients), group.x)
        return outcomes


class StagedModel:
    """The models ``x`` ``(n, D)`` of clients on a stage, and the plain SGD that moves them."""

    per_parameter = None
    hooks = None
    missing = ()
    by_step = False
    plain = True

    def __init__(self, stage: Stage, group: ClientGroup) -> None:
        self.stage = stage
        self.group = group
        self.x = group.x
        self.buffers: dict[str, Tensor] = {}

    def gradient(self, batch: Any, step: Any, log: bool = True) -> Tensor:
        return self.stage.gradient(self.group, self.x)

    @contextmanager
    def at(self, point: Tensor) -> Iterator[None]:
        x = self.x
        self.x = point.expand_as(x)
        yield
        self.x = x

    def shifted(self, e: Tensor) -> AbstractContextManager[None]:
        return self.at(self.x + e)

    def load_buffers(self, values: Any) -> None:
        """A stage has no buffers."""

    def set_untrained(self, untrained: Tensor | None) -> None:
        """Plain SGD keeps no state of coordinates."""

    def step(self, gradient: Tensor, missing: Sequence[int]) -> None:
        self.x.sub_(self.stage.round.rates.lr * gradient)


def state(group: ClientGroup) -> Outcome:
    """Return all values of the clients that a hook can have changed, one row per client."""
    rows = {"clients.x": group.x}
    rows |= {f"the rows of {key}": value for key, value in group.rows.items()}
    rows |= {f"the upload {key}": value for key, value in group.uploads.items()}
    rows |= {f"the log {name}": value for name, value in group.logs.items()}
    return {name: value.clone() for name, value in rows.items()}


GROUPS = (
    "a hook sees (n, D): per-client numbers are columns (n, 1), norms are clients.norm(v), sums "
    "over coordinates are .sum(1, keepdim=True), and no client's row enters another's"
)


@contextmanager
def in_a_group(n: int) -> Iterator[None]:
    """Within this context an error of a hook shows that the hook cannot train ``n`` clients."""
    try:
        yield
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise Failed(f"in a group of {n} clients: {where(error)}", GROUPS) from error


def groups(method: Method) -> None:
    """Compare groups of 1, 3 and D clients with the same clients one by one, after each hook."""
    callback, module = method.used
    size = module.layout.size
    # If n = D, a sum over the wrong axis still has the right shape: only its numbers are wrong.
    for n in (1, 3, size):
        stage = Stage(callback, module.global_vector.detach(), module.layout, size)
        with in_a_group(n):
            single = [stage.rehearse(stage.group([i])) for i in range(n)]
            together = stage.rehearse(stage.group(range(n)))
        group = f"{n} = D" if n == size else f"{n}"
        for (hook, ours), *alone in zip(together, *single, strict=True):
            theirs = {}
            for name in alone[0][1]:
                theirs[name] = torch.cat([rows[name] for _, rows in alone])
            require_same(theirs, ours, 1e-12, f"{hook} differs in a group of {group}", GROUPS)


def draws(method: Method) -> None:
    """Require that no hook of clients draws from the process's random generators."""
    callback, module = method.used

    def guard(hook: str, call: Callable[[], Any]) -> Any:
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

    stage = Stage(callback, module.global_vector.detach(), module.layout, 3)
    with in_a_group(1):
        stage.rehearse(stage.group([0]), guard)


def in_a_round(method: Method, guard: Call) -> None:
    """Call the hooks that read modules in a round of a run, because a stage has no modules."""
    methods = CallbackList([method.used[0]])
    if not any(methods[hook] for hook in LOOKING):
        return

    def watch(module: Any) -> None:
        names: dict[Any, str] = {}
        for hook in LOOKING:
            names.update(dict.fromkeys(module.run.methods[hook], hook))

        def watched(hook: Any, subject: Any, *more: Any) -> Any:
            if hook not in names:
                return hook(subject, *more)
            return guard(names[hook], partial(hook, subject, *more))

        module.run.methods.watch = watched

    fit([method.factory()], rounds=1, started=watch)


def untouched_self(method: Method) -> None:
    callback, module = method.used

    def guard(hook: str, call: Callable[[], Any]) -> Any:
        owner = getattr(getattr(call, "func", None), "__self__", callback)
        if not isinstance(owner, FederatedCallback):
            owner = callback
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

    in_a_round(method, guard)
    stage = Stage(callback, module.global_vector.detach(), module.layout, 3)
    with in_a_group(3):
        stage.rehearse(stage.group(range(3)), guard)


class Reads(TorchDispatchMode):
    """Within this context, reading a tensor's value is an error, and so is a shape that depends
    on one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = torch.Tag.data_dependent_output in func.tags
        shapes = torch.Tag.dynamic_output_shape in func.tags
        if func is torch.ops.aten.index.Tensor:
            shapes = any(index is not None and index.dtype == torch.bool for index in args[1])
        if reads:
            raise DataDependentOutputException(func)
        if shapes:
            raise DynamicOutputShapeException(func)
        return func(*args, **(kwargs or {}))


def traceable(method: Method) -> None:
    """Call hooks on tensors without data: a hook that reads a value, or branches on one, fails."""
    callback, module = method.used
    stage = Stage(callback, module.global_vector.detach(), module.layout, 3)
    group = stage.group(range(3))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor
    stage.curvature = fake(stage.curvature)
    stage.centre = fake(stage.centre)
    stage.rows = {key: fake(value) for key, value in stage.rows.items()}
    real = stage.round
    stage.round = replace(
        real,
        w=fake(real.w),
        w0=None if real.w0 is None else fake(real.w0),
        evaluated=fake(real.evaluated),
        rates=replace(real.rates, lr=fake(real.rates.lr)),
        server_states={key: fake(value) for key, value in real.server_states.items()},
    )
    group.round = stage.round
    group.x = fake(group.x)
    group.columns = {name: fake(column) for name, column in group.columns.items()}

    def guard(hook: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            reads = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
            if not reads and ".numpy()" not in str(error):
                raise
            raise Failed(
                f"{hook} reads a tensor's value or branches on it: {where(error)}",
                "no .item(), float(), tolist(), numpy(), `if tensor`, boolean indexing or nonzero "
                "in client hooks: they would stop a GPU and cannot be captured in a graph; use "
                "torch.where, clamp, multiplication",
            ) from error

    def reading(hook: str, call: Callable[[], Any]) -> Any:
        with Reads():  # type: ignore[no-untyped-call]
            return guard(hook, call)

    in_a_round(method, reading)
    # A fake tensor has a shape but no numbers.
    with in_a_group(3), mode:
        stage.rehearse(group, guard)
