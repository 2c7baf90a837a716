"""Which engine trains the clients: the one asked for, the one a resumed run began with, or the faster one, measured."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor

from fl_lightning import client_optimizer
from fl_lightning.client_optimizer import ClientOptimizer
from fl_lightning.engines.concurrent import Concurrent
from fl_lightning.engines.local import RandomState, Work, local_steps
from fl_lightning.engines.replica import Convert, Replica, buffer_values
from fl_lightning.engines.sequential import Engine, Sequential
from fl_lightning.engines.stacked import Stack, Stacked
from fl_lightning.errors import UserError
from fl_lightning.methods import Methods

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

Copy = tuple[Replica, ClientOptimizer]
Facts = dict[str, str]
CLEARLY = 1.1  # how much faster concurrent has to be, so that the choice is stable where it matters little
MEASURED_SECONDS = 0.03  # of each kind, each time; three times
TINY_SECONDS = 0.02  # rounds of less local work are not worth measuring, and the choice would be left to noise


def choose(module: FederatedModule) -> tuple[Engine, Facts]:
    """The run's engine, and what is remembered of it: engine, workers, intra-op threads a client, and why.

    Raises:
        UserError: the engine asked for cannot train this learner.
    """
    learner, w = module.learner, module.global_vector
    x = torch.empty(1, module.layout.size, dtype=w.dtype, device=w.device)
    mixed = module.trainer.precision == "bf16-mixed"
    context = module.forward_context if mixed else torch.enable_grad
    replica = Replica(learner, module.layout, x, context, conversion(module))

    def with_optimizer(replica: Replica) -> Copy:
        return replica, ClientOptimizer(module._client, learner, replica.x, replica.g, module.layout)

    decay = client_optimizer.weight_decays(module._client)[0]
    work = Work(
        module.data, module.methods, module.run_seed, module.clip_norm, module.keep_optimizer_state, decay
    )
    copies: list[Copy] = []

    def copied(number: int) -> list[Copy]:
        copies.extend(with_optimizer(replica.another()) for _ in range(number - len(copies)))
        return copies[:number]

    held: Facts = (module.resume_from or {}).get("engine") or {}
    if held.get("engine") and module.engine in ("auto", held["engine"]):
        facts = {**held, "why": "as when the run began"}
        torch.set_num_threads(int(held.get("threads", torch.get_num_threads())))
    elif module.engine == "auto":
        facts = module.trainer.strategy.broadcast(measured(module, copied) if module.trainer.is_global_zero else {})
    else:
        facts = {"engine": module.engine, "why": "asked for"}
    if facts["engine"] == "stacked":
        at_once = facts.get("clients", "auto") if module.clients_at_once == "auto" else module.clients_at_once
        number = min(stack_size(module) if at_once == "auto" else int(at_once), most_at_once(module))
        reason = unstackable(module, replica)
        if not reason:
            facts |= {"clients": str(number), "threads": str(torch.get_num_threads())}

            def optimizer_of(x: Tensor, gradient: Tensor) -> ClientOptimizer:
                return ClientOptimizer(module._client, learner, x, gradient, module.layout)

            return Stacked(work, replica, optimizer_of, number, module.note), facts
        instead = "concurrent" if w.device.type == "cpu" and not draws(module, *copied(1)[0]) else "sequential"
        module.note(f"engine='stacked' cannot train {type(learner).__name__} ({reason}); engine='{instead}' does")
        facts = {"engine": instead, "why": f"it cannot be stacked: {reason}"}
    if facts["engine"] != "concurrent":
        facts = {"engine": "sequential", "threads": str(torch.get_num_threads()), **facts}
        return Sequential(work, *with_optimizer(replica)), facts
    workers = facts.get("workers", "0") if module.workers == "auto" else str(module.workers)
    number = min(int(workers) or usable_cores(module), most_at_once(module))
    if w.device.type != "cpu":
        raise UserError(
            f"engine='concurrent' on {w.device.type}: it trains clients on threads of a CPU. Use "
            "engine='sequential', or trainer.accelerator=cpu."
        )
    copies = copied(number)
    if facts.get("why") == "asked for" and (drawn := draws(module, *copies[0])):
        raise UserError(
            f"engine='concurrent' cannot train {type(learner).__name__}: {drawn}, and all threads of a process share "
            "its random generators, so results would be left to chance. Use engine='sequential' (or 'auto')."
        )
    work.draws = False
    facts |= {"workers": str(number), "threads": "1"}
    return Concurrent(work, learner, copies, module.note), facts


def stack_size(module: FederatedModule) -> int:
    """Clients of a group: as many as fit into a gigabyte, counting eight vectors of D each."""
    w = module.global_vector
    return max(1, 2**30 // (8 * w.nbytes))


def unstackable(module: FederatedModule, replica: Replica) -> str:
    """Why the learner, its optimizer or hooks cannot be stacked, or an empty string; a step is tried."""
    if not client_optimizer.is_flat(module._client, module.learner):
        return f"{type(module._client).__name__} does not treat every coordinate alike"
    if module.keep_optimizer_state and not client_optimizer.is_plain_sgd(module._client):
        return "keep_optimizer_state"
    if replica.has_batch_hooks:
        return "its on_train_batch hooks take one client's batch"
    stack, before = Stack(replica, 2), RandomState(replica.x)
    stack.x.copy_(module.global_vector.detach().expand_as(stack.x))
    buffers = buffer_values(module.learner)
    ids = module.participants(0)
    try:
        with replica.tied(module.evaluated_vector.detach()), torch.no_grad():
            two = (ids[0], ids[-1])
            batches = [next(iter(module.data.client_batches(i, 0, 1, device=stack.x.device))) for i in two]
            stack.gradient(stack.groups(list(enumerate(batches))), 0)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"
    finally:
        before.restore()
        replica.load_buffers(buffers)
    return ""


def conversion(module: FederatedModule) -> Convert | None:
    """How a client's batch becomes what the learner gets: its own transfer hooks, the Trainer's precision."""
    hooks, plugin, device = module.transfers, module.trainer.precision_plugin, module.device
    if not hooks and type(plugin).convert_input is Precision.convert_input:
        return None

    def convert(learner: Any, batch: Any) -> Any:
        for hook in hooks:
            extra = (device, 0) if hook == "transfer_batch_to_device" else (0,)
            batch = getattr(learner, hook)(batch, *extra)
        return plugin.convert_input(batch)

    return convert


def usable_cores(module: FederatedModule) -> int:
    """Cores of this process, which shares the machine's with the run's other processes there."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or int(module.trainer.num_devices)
    return max(1, cores // beside)


def most_at_once(module: FederatedModule) -> int:
    """The most clients that one process trains in a round."""
    n, m = module.cohort
    return -(-(n if module.sampling == "uniform" else m) // module.trainer.world_size)


def measured(module: FederatedModule, copied: Callable[[int], list[Copy]]) -> Facts:
    """Time a few real steps of real clients in copies of the learner, one by one and side by side."""
    threads = torch.get_num_threads()
    alone = {"engine": "sequential", "threads": str(threads)}
    workers = usable_cores(module) if module.workers == "auto" else int(module.workers)
    workers = min(workers, most_at_once(module))
    if module.global_vector.device.type != "cpu":
        return {**alone, "why": "on a CPU alone clients train side by side"}
    if workers < 2:
        return {**alone, "why": "one core, or one client, for each process"}
    try:
        copies = copied(workers)
    except Exception as error:
        return {**alone, "why": f"{type(module.learner).__name__} cannot be copied ({type(error).__name__}: {error})"}
    try:
        if drawn := draws(module, *copies[0]):
            return {**alone, "why": f"{drawn}, so clients train one after the other"}
        lengths = [module.steps(0, i) for i in module.participants(0)[:: module.trainer.world_size]]
        alone_seconds, beside_seconds = step_seconds(module, copies, worth=TINY_SECONDS / sum(lengths))
    except Exception as error:  # the first round will meet it, and say where
        return {**alone, "why": f"not measured ({type(error).__name__})"}
    if beside_seconds is None:
        return {**alone, "why": f"a round's local steps take less than {1000 * TINY_SECONDS:g} ms"}
    one_by_one, side_by_side = sum(lengths) * alone_seconds, makespan(lengths, workers) * beside_seconds
    why = (
        f"measured: a round's local steps take {one_by_one:.3g} s one client after the other on {threads} "
        f"thread{'s' * (threads > 1)}, {side_by_side:.3g} s with {workers} side by side"
    )
    if side_by_side * CLEARLY < one_by_one:
        return {"engine": "concurrent", "workers": str(workers), "threads": "1", "why": why}
    return {**alone, "why": why}


def makespan(lengths: Iterable[float], workers: int) -> float:
    """How long the busiest of the workers is busy, longest first."""
    busy = [0.0] * workers
    for length in sorted(lengths, reverse=True):
        heapq.heappush(busy, heapq.heappop(busy) + length)
    return max(busy)


def draws(module: FederatedModule, replica: Replica, optimizer: ClientOptimizer) -> str:
    """What draws from the process's random generators in one step, if anything does; they are left as they were."""
    before = RandomState(replica.x)
    client = module.participants(0)[0]
    try:
        batches = list(module.data.client_batches(client, 0, 1, device=replica.x.device))
        if before.moved():
            return "its data set draws random numbers when a batch is read"
        prepare(module, replica, optimizer)
        with torch.no_grad():
            local_steps(replica, None, iter(batches), optimizer, Methods([]), None)  # type: ignore[arg-type]
        return "its training_step draws random numbers (dropout, say)" if before.moved() else ""
    finally:
        before.restore()
        replica.reset()


def prepare(module: FederatedModule, replica: Replica, optimizer: ClientOptimizer) -> None:
    replica.follow(module.learner)
    replica.x.copy_(module.global_vector.detach())
    replica.load_buffers(buffer_values(module.learner))
    optimizer.begin(1.0, None)


def step_seconds(module: FederatedModule, copies: list[Copy], worth: float) -> tuple[float, float | None]:
    """Seconds of a local step: one client on all intra-op threads, and with as many clients at once as copies.

    The latter is None where a step takes less than ``worth``.
    """
    ids = module.participants(0)
    with ThreadPoolExecutor(len(copies), initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def some(j: int, steps: int) -> None:
            with torch.no_grad():
                batches = module.data.client_batches(ids[j % len(ids)], 0, steps, device=copies[j][0].x.device)
                local_steps(copies[j][0], None, batches, copies[j][1], Methods([]), None)  # type: ignore[arg-type]

        def alone(steps: int) -> float:
            return timed(lambda: some(0, steps)) / steps

        def beside(steps: int) -> float:
            return timed(lambda: list(pool.map(some, range(len(copies)), [steps] * len(copies)))) / steps

        for replica, optimizer in copies:
            prepare(module, replica, optimizer)
        try:
            alone(1)
            first = alone(1)
            if first < worth:
                return first, None
            beside(1)
            steps = max(1, min(50, int(MEASURED_SECONDS / first)))
            repeats = [(alone(steps), beside(steps)) for _ in range(3 if steps > 1 else 2)]
        finally:
            for replica, _ in copies:
                replica.reset()
    return min(a for a, _ in repeats), min(b for _, b in repeats)


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
