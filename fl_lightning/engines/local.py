"""A client's round: local steps in the order of methods.md's section 1, the same in every engine."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client_optimizer import ClientOptimizer
from fl_lightning.engines.capture import Capture
from fl_lightning.engines.replica import Replica
from fl_lightning.methods import Methods, checked_rows
from fl_lightning.rounds import Clients, Round
from fl_lightning.sampling import generator


class Model(Protocol):
    """What local steps train: one client's replica, or several stacked."""

    x: Tensor

    @property
    def buffers(self) -> dict[str, Tensor]: ...

    def gradient(self, batch: Any, step: int, log: bool = True) -> Tensor: ...

    def moved(self, e: Tensor) -> AbstractContextManager[None]: ...

    def load_buffers(self, values: dict[str, Tensor]) -> None: ...


def local_steps(
    replica: Model,
    clients: Clients,
    batches: Iterator[Any],
    optimizer: ClientOptimizer,
    methods: Methods,
    clip_norm: float | None,
    draws: bool = True,
    capture: Capture | None = None,
) -> Tensor | None:
    """All local steps of the clients; returns ``(n,)`` in how many the clipping was active (None without clipping)."""
    perturb, mix = methods.owner("perturbation"), methods.owner("on_loss_gradient")
    corrections, step_ends = methods["on_local_gradient"], methods["on_local_step_end"]
    changed = mix is not None or bool(corrections) or clip_norm is not None
    apart = optimizer.plain and isinstance(replica, Replica) and not changed  # nobody asks for it as a vector
    gradient_of: Callable[..., Any] = replica.gradient
    if apart and isinstance(replica, Replica):
        gradient_of = replica.gradients
    if clip_norm is not None:
        clients.clipped = torch.zeros(len(replica.x), dtype=torch.int64, device=replica.x.device)
    others = True

    def take(batch: Any, step: Any) -> None:
        nonlocal others
        if perturb is None:
            gradient = gradient_of(batch, step)
        else:
            before = RandomState(replica.x, others) if draws else None
            with perturbed(replica, clients, batch, step, perturb, before):
                gradient = gradient_of(batch, step, log=False)
            if others and before is not None:  # NumPy's state is slow to read: a learner uses it at once or never
                others = before.moved()
        if mix is not None:
            gradient = methods.gradient(mix, clients, gradient)
        for correct in corrections:
            gradient = methods.gradient(correct, clients, gradient)
        if clip_norm is not None:
            factor = (clip_norm / clients.norm(gradient)).clamp(max=1)
            gradient = gradient * factor
            clients.clipped.add_((factor < 1)[:, 0])
        if apart:
            optimizer.step_each(gradient)
        else:
            optimizer.step(gradient)
        for end in step_ends:
            end(clients)

    if capture is not None and isinstance(replica, Replica):
        capture.run(take, batches, clients, optimizer, replica)
    else:
        for step, batch in enumerate(batches):
            take(batch, step)
    return None if clip_norm is None else clients.clipped


@contextmanager
def perturbed(
    replica: Model, clients: Clients, batch: Any, step: int, perturb: Any, before: RandomState | None
) -> Iterator[None]:
    """Within, gradients are at x + e, with the random numbers of the first pass; its buffers come back afterwards."""
    first = replica.gradient(batch, step)
    after = {name: buffer.clone() for name, buffer in replica.buffers.items()}
    e = checked_rows(perturb, perturb(clients, first), first)
    if before is not None:
        before.restore()
    try:
        with replica.moved(e):
            yield
    finally:
        replica.load_buffers(after)


class RandomState:
    """The process's generators as they are now: torch's (of the CPU, and of the device of ``x``), NumPy's, Python's.

    ``others=False``: torch's alone.
    """

    def __init__(self, x: Tensor | None = None, others: bool = True) -> None:
        self.torch, self.others = torch.get_rng_state(), others
        self.numpy: Any = np.random.get_state() if others else None
        self.python: Any = random.getstate() if others else None
        self.device = x.device if x is not None and x.is_cuda else None
        self.cuda = torch.cuda.get_rng_state(self.device) if self.device is not None else None

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        if self.others:
            np.random.set_state(self.numpy)
            random.setstate(self.python)
        if self.cuda is not None and self.device is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        now = RandomState()
        return not (
            (self.cuda is None or torch.equal(self.cuda, torch.cuda.get_rng_state(self.device)))  # type: ignore[arg-type]
            and torch.equal(self.torch, now.torch)
            and self.python == now.python
            and self.numpy[2:] == now.numpy[2:]
            and bool((self.numpy[1] == now.numpy[1]).all())
        )


def seed_client(seed: int, round: int, client: int, purpose: str = "learner") -> None:
    """Random numbers drawn inside the learner are a function of (seed, round, client)."""
    draw = int(generator(seed, purpose, round, client).integers(2**63))
    torch.default_generator.manual_seed(draw)  # torch.manual_seed formats a stack trace for CUDA's queue: 1 ms
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(draw)
    np.random.seed(draw % 2**32)
    random.seed(draw)


@contextmanager
def random_state_kept(x: Tensor) -> Iterator[None]:
    """Leave the global random generators as they were."""
    before = RandomState(x)
    try:
        yield
    finally:
        before.restore()


def full_gradient(work: Work, replica: Replica, clients: Clients, at: Tensor) -> Tensor:
    """∇f_i at ``at`` ``(D,)`` or ``(1, D)`` over all samples, plus λ_wd · at; x, buffers and randomness stay."""
    (client,) = clients.client_ids
    at = at.view(1, -1)
    buffers = {name: buffer.clone() for name, buffer in replica.buffers.items()}
    point, held = replica.x.clone(), replica.g.clone()
    total = torch.zeros_like(replica.x)
    with random_state_kept(at) if work.draws else nullcontext():
        if work.draws:
            seed_client(work.seed, clients.round, client, "full")
        replica.x.copy_(at)
        try:
            for step, (batch, number) in enumerate(work.data.full_batches(client, device=replica.x.device)):
                replica.load_buffers(buffers)
                total += replica.gradient(batch, step, log=False) * (number / clients._round.sizes[client])
        finally:
            replica.x.copy_(point)
            replica.g.copy_(held)
            replica.load_buffers(buffers)
    return total + work.weight_decay * at


@dataclass
class Work:
    """What local training needs besides the round: the same for all rounds of a run.

    ``draws``: whether learner or data may draw from the process's random generators, which are then seeded a client.
    """

    data: Any
    methods: Methods
    seed: int
    clip_norm: float | None
    keep_optimizer_state: bool
    weight_decay: float
    draws: bool = True


def train_client(
    work: Work,
    replica: Replica,
    optimizer: ClientOptimizer,
    round: Round,
    client: int,
    factor: float,
    buffers: dict[str, Tensor],
    stop: threading.Event | None = None,
    capture: Capture | None = None,
) -> Clients:
    """One client's round in a replica, from the server's model and buffers to ``on_local_end``.

    Raises:
        Stopped: ``stop`` was set meanwhile.
        Exception: from the learner, the data or a method, with a note that names round, client and step.
    """
    replica.x.copy_(round.w)
    replica.load_buffers(buffers)
    clients = Clients(round, [client], replica.x)
    counted = Counted(work.data.client_batches(client, round.t, round.steps[client], device=replica.x.device), stop)
    try:
        if work.draws:
            seed_client(work.seed, round.t, client)
        start(work, clients)
        optimizer.begin(factor, kept_optimizer_state(work, round, client))
        replica.reset()  # what another client, or a full gradient, left in the learner's metrics
        clipped = local_steps(
            replica, clients, iter(counted), optimizer, work.methods, work.clip_norm, work.draws, capture
        )
        for name, mean in replica.take_logs().items():
            clients.logs[name] = mean.reshape(1)
        if clipped is not None:
            clients.logs["clipped_steps"] = clipped / round.steps[client]
        work.methods.run("on_local_end", clients)
    except Exception as error:
        replica.logged = {}
        if hasattr(error, "add_note"):
            error.add_note(f"in round {round.t}, client {client}, local step {counted.step} (all counted from 0)")
        raise
    return clients


def start(work: Work, clients: Clients) -> None:
    """From the server's model, and parts that clients keep, to where methods let them start."""
    if clients._round.parts is not None:
        clients._round.parts.start(clients, clients._round)
    before = clients.x._version
    work.methods.run("on_local_start", clients)
    if clients.x._version != before and not work.methods.move_starts:
        raise TypeError("an on_local_start changed clients.x, and its class has moves_start = False")
    clients.begin(moved=work.methods.move_starts)


class Stopped(Exception):
    """Another client of the round failed, or the run was interrupted."""


class Counted:
    """Batches, with the number of the present one in ``step``; ends with :class:`Stopped` when ``stop`` is set."""

    def __init__(self, batches: Iterator[Any], stop: threading.Event | None) -> None:
        self.batches, self.stop, self.step = batches, stop, 0

    def __iter__(self) -> Iterator[Any]:
        for self.step, batch in enumerate(self.batches):  # noqa: B020
            if self.stop is not None and self.stop.is_set():
                raise Stopped
            yield batch


def kept_optimizer_state(work: Work, round: Round, client: int) -> dict[str, Tensor] | None:
    """The client's optimizer state of its latest round, where it is kept."""
    if not work.keep_optimizer_state:
        return None
    names = round.optimizer_rows
    rows = {name: round.read(name, client) for name in names}
    return {name: row for name, row in rows.items() if row is not None}
