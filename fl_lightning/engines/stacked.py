"""Several clients as one batch of models by ``torch.func``: for small networks, above all on a GPU.

Clients with fewer steps than others of their group neither move nor change a row once they have finished. Batches of
unequal size are grouped by size. Results agree with the other engines to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fl_lightning.client_optimizer import ClientOptimizer
from fl_lightning.engines.concurrent import WAITING_BYTES
from fl_lightning.engines.local import Work, full_gradient, local_steps, random_state_kept, seed_client
from fl_lightning.engines.replica import Replica
from fl_lightning.engines.sequential import Collect
from fl_lightning.rounds import Clients, Round

Group = tuple[list[int], list[Tensor], TreeSpec]


class _Step(nn.Module):
    """A learner's ``training_step`` as a forward, so that parameters can be put in."""

    def __init__(self, learner: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.learner = learner
        self.step = step

    def forward(self, *arguments: Any) -> Any:
        return self.step(*arguments)


class Stack:
    """n clients' models ``x`` ``(n, D)`` and their gradients; in place of a :class:`Replica` in local steps."""

    def __init__(self, replica: Replica, n: int) -> None:
        self.replica = replica
        self.x = replica.x.new_empty(n, replica.x.shape[1])
        self.g = torch.zeros_like(self.x)
        self.buffers: dict[str, Tensor] = {}
        self.logged: dict[str, tuple[Tensor, Tensor]] = {}
        self._caller = _Step(replica.learner, replica.step)

    def gradient(self, groups: list[Group], step: int, log: bool = True) -> Tensor:
        """∇ℓ at each client's x ``(n, D)``; zeros for clients without a batch."""
        self.replica.logging = log
        n = len(self.x)
        for rows, leaves, spec in groups:
            everyone = len(rows) == n
            x = self.x if everyone else self.x[rows]
            names = ["learner." + name for name in self.replica.layout]
            views = [x[:, where].view(len(rows), *shape) for where, shape in self.replica.layout.values()]
            gradients, logs = self._stacked(dict(zip(names, views, strict=True)), leaves, spec, step)
            parts = [gradients[name].reshape(len(rows), -1) for name in names]
            if everyone:
                torch.cat(parts, dim=1, out=self.g)
            else:
                self.g[rows] = torch.cat(parts, dim=1)
            for name, values in logs.items():
                if name not in self.logged:
                    zeros = torch.zeros(2, n, dtype=torch.float64, device=self.x.device)
                    self.logged[name] = (zeros[0], zeros[1])
                total, number = self.logged[name]
                total[rows] += values.double()
                number[rows] += 1
        if len(missing := set(range(n)) - {row for rows, _, _ in groups for row in rows}):
            self.g[sorted(missing)] = 0
        return self.g

    def _stacked(
        self, parameters: dict[str, Tensor], leaves: list[Tensor], spec: TreeSpec, step: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        def loss(parameters: dict[str, Tensor], leaves: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            self.replica.logged = {}
            batch = tree_unflatten(leaves, spec)
            with self.replica.forward_context():
                arguments = (batch, step) if self.replica.takes_index else (batch,)
                output = functional_call(self._caller, parameters, arguments)
            logged, self.replica.logged = self.replica.logged, {}
            value = output["loss"] if isinstance(output, dict) else output
            return value, {k: torch.stack([v.reshape(()) for v in vs]).mean() for k, vs in logged.items()}

        return vmap(grad(loss, has_aux=True), randomness="different")(parameters, leaves)  # type: ignore[no-any-return]

    def take_logs(self) -> dict[str, Tensor]:
        """Means over each client's steps, ``(n,)`` float64; nan where a client did not log."""
        means = {name: total / number for name, (total, number) in self.logged.items()}
        self.logged = {}
        return means

    def load_buffers(self, values: dict[str, Tensor]) -> None:
        """Buffers are the learner's own: a learner that changes them cannot be stacked."""

    def groups(self, batches: list[tuple[int, Any]]) -> list[Group]:
        """Clients' batches stacked by shape: ``[(row, batch)]``."""
        alike: dict[Any, tuple[list[int], list[list[Tensor]], TreeSpec]] = {}
        for row, batch in batches:
            if self.replica.convert is not None:
                batch = self.replica.convert(self.replica.learner, batch)
            leaves, spec = tree_flatten(batch)
            key = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            rows, gathered, _ = alike.setdefault(key, ([], [], spec))
            rows.append(row)
            gathered.append(leaves)
        return [
            (rows, [torch.stack(each) for each in zip(*gathered, strict=True)], spec)
            for rows, gathered, spec in alike.values()
        ]


class Stacked:
    """Trains ``at_once`` clients of a round together.

    Args:
        optimizer_of: makes the client optimizer of a stack.
        warn: told when a group did not fit in memory and is halved.
    """

    def __init__(
        self,
        work: Work,
        replica: Replica,
        optimizer_of: Callable[[Tensor, Tensor], ClientOptimizer],
        at_once: int,
        warn: Callable[[str], None],
    ) -> None:
        self.work, self.replica, self._optimizer_of = work, replica, optimizer_of
        self.at_once, self._warn = at_once, warn

    def run(
        self,
        round: Round,
        leaves: list[tuple[int, int]],
        factor: float,
        buffers: dict[str, Tensor],
        rest: Tensor,
        collect: Collect,
        tell: Callable[[], None],
    ) -> None:
        round.full_gradient = self._full_gradient
        if len(leaves) * rest.nbytes <= WAITING_BYTES:
            leaves = sorted(leaves, key=lambda leaf: -round.steps[leaf[1]])
        with self.replica.tied(rest), random_state_kept(rest):
            waiting = list(leaves)
            while waiting:
                group = waiting[: self.at_once]
                try:
                    clients, optimizer = self.train(round, [client for _, client in group], factor)
                except RuntimeError as error:
                    if not out_of_memory(error) or self.at_once == 1:
                        raise
                    self.at_once = max(1, self.at_once // 2)
                    self._warn(f"memory ran out: from here on {self.at_once} clients are stacked at once")
                    continue
                waiting = waiting[len(group) :]
                for row, (leaf, _) in enumerate(group):
                    collect(leaf, one(clients, row), optimizer, self.replica)
                    tell()

    def train(self, round: Round, ids: list[int], factor: float) -> tuple[Clients, ClientOptimizer]:
        """A group's round, from the server's model to ``on_local_end``."""
        work, stack = self.work, Stack(self.replica, len(ids))
        stack.x.copy_(round.w)
        clients = Clients(round, ids, stack.x)
        optimizer = self._optimizer_of(stack.x, stack.g)
        try:
            seed_client(work.seed, round.t, ids[0])
            if round.parts is not None:
                round.parts.start(clients, round)
            work.methods.run("on_local_start", clients)
            clients.begin(moved=bool(work.methods["on_local_start"]) or round.parts is not None)
            optimizer.begin(factor, None)
            clipped = local_steps(
                stack, clients, self._batches(stack, clients), optimizer, work.methods, work.clip_norm
            )
            clients.logs.update(stack.take_logs())
            if clipped is not None:
                clients.logs["clipped_steps"] = clipped / clients.steps[:, 0]
            work.methods.run("on_local_end", clients)
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"in round {round.t}, one of the clients {ids}")
            raise
        return clients, optimizer

    def _batches(self, stack: Stack, clients: Clients) -> Iterator[list[Group]]:
        """One step's batches at a time; after each step, clients that had none are put back to where they were."""
        round, device = clients._round, stack.x.device
        steps = [round.steps[i] for i in clients.client_ids]
        sources = [
            iter(self.work.data.client_batches(i, round.t, k, device=device))
            for i, k in zip(clients.client_ids, steps, strict=True)
        ]
        for step in range(max(steps)):
            training = [row for row, k in enumerate(steps) if step < k]
            finished = [row for row, k in enumerate(steps) if step >= k]
            kept = Kept(clients, finished) if finished else None
            yield stack.groups([(row, next(sources[row])) for row in training])
            if kept is not None:
                kept.restore()

    def _full_gradient(self, clients: Clients, at: Tensor) -> Tensor:
        rows = at.expand_as(clients.x)
        single = [Clients(clients._round, [i], self.replica.x) for i in clients.client_ids]
        with torch.no_grad():
            return torch.cat([full_gradient(self.work, self.replica, c, rows[j]) for j, c in enumerate(single)])

    def close(self) -> None:
        """Nothing to give back."""


class Kept:
    """The models and declared rows of clients that have finished, as they were before a step of the others."""

    def __init__(self, clients: Clients, finished: list[int]) -> None:
        self.clients, self.finished = clients, finished
        self.x = clients.x[finished]
        self.rows = {key: (rows._version, rows[finished]) for key, rows in clients._rows.items()}

    def restore(self) -> None:
        self.clients.x[self.finished] = self.x
        for key, rows in self.clients._rows.items():
            before, values = self.rows.get(key, (None, None))
            if values is None:
                declared = self.clients._declared[key]
                ids = [self.clients.client_ids[row] for row in self.finished]
                values = torch.stack([self.clients._load(key, declared, i) for i in ids])
                before = self.clients._versions[key]
            if rows._version != before:
                rows[self.finished] = values


def one(clients: Clients, row: int) -> Clients:
    """One client of a group by itself, as views."""
    own, part = copy.copy(clients), slice(row, row + 1)
    for cached in ("ids", "steps", "sizes", "weights"):
        own.__dict__.pop(cached, None)
    own.client_ids, own._x = [clients.client_ids[row]], clients.x[part]
    own._rows = {key: rows[part] for key, rows in clients._rows.items()}
    own.uploads = {key: value[part] for key, value in clients.uploads.items()}
    own.logs = {key: value[part] for key, value in clients.logs.items() if not bool(value[row].isnan())}
    for name in ("_start", "kept_origin", "kept_elapsed", "kept_mask"):
        value = getattr(clients, name)
        setattr(own, name, None if value is None else value[part])
    return own


def out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error)
