"""A client's round: local steps in the order of methods.md's section 1, the same in every engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.client_optimizer import ClientOptimizer
from fl_lightning.engines.replica import Replica
from fl_lightning.methods import Methods, checked_rows
from fl_lightning.rounds import Clients, Round
from fl_lightning.sampling import generator


def local_steps(
    replica: Replica,
    clients: Clients,
    batches: Iterator[Any],
    optimizer: ClientOptimizer,
    methods: Methods,
    clip_norm: float | None,
) -> Tensor | None:
    """All local steps of the clients; returns in how many the clipping was active (None without clipping)."""
    perturb, mix = methods.owner("perturbation"), methods.owner("on_loss_gradient")
    corrections, step_ends = methods["on_local_gradient"], methods["on_local_step_end"]
    clipped: Tensor | None = None
    for step, batch in enumerate(batches):
        if perturb is None:
            gradient = replica.gradient(batch, step)
        else:
            gradient = perturbed_gradient(replica, clients, batch, step, perturb)
        if mix is not None:
            gradient = methods.gradient(mix, clients, gradient)
        for correct in corrections:
            gradient = methods.gradient(correct, clients, gradient)
        if clip_norm is not None:
            factor = (clip_norm / clients.norm(gradient)).clamp(max=1)
            gradient = gradient * factor
            active = (factor < 1).sum()
            clipped = active if clipped is None else clipped + active
        optimizer.step(gradient)
        for end in step_ends:
            end(clients)
    return clipped


def perturbed_gradient(replica: Replica, clients: Clients, batch: Any, step: int, perturb: Any) -> Tensor:
    """The gradient at x + e, same batch and random numbers; x comes back from a copy, buffers from the first pass."""
    x = replica.x
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state(x.device) if x.is_cuda else None
    first = replica.gradient(batch, step)
    after = {name: buffer.clone() for name, buffer in replica.buffers.items()}
    e = checked_rows(perturb, perturb(clients, first), first)
    point = x.clone()
    x.add_(e)
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])
    if cuda is not None:
        torch.cuda.set_rng_state(cuda, x.device)
    try:
        return replica.gradient(batch, step, log=False)
    finally:
        x.copy_(point)
        replica.load_buffers(after)


def seed_client(seed: int, round: int, client: int, purpose: str = "learner") -> None:
    """Random numbers drawn inside the learner are a function of (seed, round, client)."""
    draw = int(generator(seed, purpose, round, client).integers(2**63))
    torch.manual_seed(draw)
    np.random.seed(draw % 2**32)
    random.seed(draw)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the global random generators as they were."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def full_gradient(work: Work, replica: Replica, clients: Clients, at: Tensor) -> Tensor:
    """∇f_i at ``at`` ``(D,)`` or ``(1, D)`` over all samples, plus λ_wd · at; x, buffers, randomness stay as they were."""
    (client,) = clients.client_ids
    at = at.view(1, -1)
    buffers = {name: buffer.clone() for name, buffer in replica.buffers.items()}
    point, held = replica.x.clone(), replica.g.clone()
    total = torch.zeros_like(replica.x)
    with random_state_kept():
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
    """What local training needs besides the round: the same for all rounds of a run."""

    data: Any
    methods: Methods
    seed: int
    clip_norm: float | None
    keep_optimizer_state: bool
    weight_decay: float


def train_client(work: Work, replica: Replica, optimizer: ClientOptimizer, round: Round, client: int, factor: float,
                 buffers: dict[str, Tensor]) -> Clients:
    """One client's round in a replica, from the server's model and buffers to ``on_local_end``.

    Raises:
        RuntimeError: from the learner or a method, with a note that names client and round.
    """
    replica.x.copy_(round.w)
    replica.load_buffers(buffers)
    clients = Clients(round, [client], replica.x)
    try:
        seed_client(work.seed, round.t, client)
        if round.parts is not None:
            round.parts.start(clients, round)
        work.methods.run("on_local_start", clients)
        clients.begin(moved=bool(work.methods["on_local_start"]) or round.parts is not None)
        optimizer.begin(factor, kept_optimizer_state(work, round, client))
        batches = work.data.client_batches(client, round.t, round.steps[client], device=replica.x.device)
        clipped = local_steps(replica, clients, batches, optimizer, work.methods, work.clip_norm)
        for name, mean in replica.take_logs().items():
            clients.logs[name] = mean.reshape(1)
        if clipped is not None:
            clients.logs["clipped_steps"] = (clipped / round.steps[client]).reshape(1)
        work.methods.run("on_local_end", clients)
    except Exception as error:
        error.add_note(f"in round {round.t}, client {client}") if hasattr(error, "add_note") else None
        raise
    return clients


def kept_optimizer_state(work: Work, round: Round, client: int) -> dict[str, Tensor] | None:
    """The client's optimizer state of its latest round, where it is kept."""
    if not work.keep_optimizer_state:
        return None
    names = round.optimizer_rows
    rows = {name: round.read(name, client) for name in names}
    return {name: row for name, row in rows.items() if row is not None}
