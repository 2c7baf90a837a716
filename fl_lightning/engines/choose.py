"""Which engine trains the clients: the one asked for, the one a resumed run began with, or the faster one, measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor

from fl_lightning import client_optimizer
from fl_lightning.client_optimizer import ClientOptimizer
from fl_lightning.devices import keep_memory
from fl_lightning.engines.attributes import Attributes
from fl_lightning.engines.capture import NOT_CAPTURED
from fl_lightning.engines.concurrent import Concurrent
from fl_lightning.engines.local import RandomState, Work
from fl_lightning.engines.measure import (
    CHANNELS_LAST,
    TINY_SECONDS,
    Copy,
    channels_last,
    draws,
    makespan,
    replayed_seconds,
    step_seconds,
    uncapturable,
)
from fl_lightning.engines.replica import Convert, Replica, check_trainable
from fl_lightning.engines.sequential import Engine, Sequential
from fl_lightning.engines.stacked import Stack, Stacked
from fl_lightning.engines.streams import Streams
from fl_lightning.errors import UserError

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

Facts = dict[str, str]
CLEARLY = 1.1  # how much faster something unusual has to be, so that the choice is stable where it matters little
STREAMS = 16  # on a GPU; PyTorch hands out 32


def choose(module: FederatedModule) -> tuple[Engine, Facts]:
    """The run's engine, and what is remembered of it: engine, workers, intra-op threads a client, and why.

    Raises:
        UserError: the engine asked for cannot train this learner.
    """
    learner, w = module.learner, module.global_vector
    if w.is_cuda and not torch.backends.cudnn.benchmark:  # as Trainer(benchmark=True) sets it
        repeatable()
    keep_memory()
    check_trainable(learner, module.layout)
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        if any(c.__name__ == "BaseFinetuning" for c in type(callback).__mro__):
            raise UserError(
                f"callback {type(callback).__name__} unfreezes parameters during a fit, and the set of trainable "
                "parameters is fixed at its start. Set requires_grad in the learner's __init__, setup or "
                "configure_model; for another set, begin another fit with init_from."
            )
    x = torch.empty(1, module.layout.size, dtype=w.dtype, device=w.device)
    mixed = module.trainer.precision == "bf16-mixed"
    context = module.forward_context if mixed else torch.enable_grad
    replica = Replica(learner, module.layout, x, context, conversion(module))

    def with_optimizer(replica: Replica) -> Copy:
        return replica, ClientOptimizer(module._client, learner, replica.x, replica.g, module.layout)

    decay = client_optimizer.weight_decays(module._client)[0]
    work = Work(module.data, module.methods, module.run_seed, module.clip_norm, module.keep_optimizer_state, decay)
    copies: list[Copy] = []

    def copied(number: int) -> list[Copy]:
        copies.extend(with_optimizer(replica.another()) for _ in range(number - len(copies)))
        return copies[:number]

    held: Facts = (module.resume_from or {}).get("engine") or module.engine_facts
    if held.get("engine") and module.engine in ("auto", held["engine"]):
        facts = {**held, "why": "as when the run began"}
        if held.get("server_threads", "") not in ("", str(torch.get_num_threads())):
            torch.set_num_threads(int(held["server_threads"]))
    elif module.engine == "auto":
        facts = module.trainer.strategy.broadcast(measured(module, copied) if module.trainer.is_global_zero else {})
    else:
        facts = {"engine": module.engine, "why": "asked for"}
    facts["server_threads"] = str(torch.get_num_threads())
    if facts.get("memory") == "channels_last":
        for one in [replica, *(made for made, _ in copies)]:
            one.convert = channels_last(one.convert)
    if facts["engine"] == "stacked":
        at_once = facts.get("clients", "auto") if module.clients_at_once == "auto" else module.clients_at_once
        number = min(stack_size(module) if at_once == "auto" else int(at_once), most_at_once(module))
        reason = unstackable(module, replica)
        if not reason:
            facts |= {"clients": str(number), "threads": str(torch.get_num_threads())}

            def optimizer_of(x: Tensor, gradient: Tensor) -> ClientOptimizer:
                return ClientOptimizer(module._client, learner, x, gradient, module.layout)

            return Stacked(work, replica, optimizer_of, number, module.note), facts
        try:
            beside = w.device.type in ("cpu", "cuda") and not draws(module, *copied(1)[0])
        except Exception:  # it cannot be copied, or its step fails, which the first round will say
            beside = False
        instead = "concurrent" if beside else "sequential"
        module.note(f"engine='stacked' cannot train {type(learner).__name__} ({reason}); engine='{instead}' does")
        facts = {**facts, "engine": instead, "why": f"it cannot be stacked: {reason}"}
    if facts["engine"] != "concurrent":
        if module.capture is True:
            module.note(f"{NOT_CAPTURED}engine='{facts['engine']}' trains, and engine='concurrent' alone captures")
        facts = {"engine": "sequential", "threads": str(torch.get_num_threads()), **facts}
        return Sequential(work, *with_optimizer(replica), threads=int(facts["threads"])), facts
    workers = facts.get("workers", "0") if module.workers == "auto" else str(module.workers)
    if w.device.type not in ("cpu", "cuda"):
        raise UserError(
            f"engine='concurrent' on {w.device.type}: it trains clients on threads of a CPU or streams of a CUDA GPU. "
            "Use engine='sequential', or trainer.accelerator=cpu."
        )
    (first,) = copied(1)
    if facts.get("why") == "asked for" and (drawn := draws(module, *first)):
        way_out = ", or keep such state in a buffer" if "changes" in drawn else ""
        raise UserError(
            f"engine='concurrent' cannot train {type(learner).__name__}: {drawn}. Clients side by side share the "
            "process's random generators and each has its own copy of the learner, so results would depend on which "
            f"copy trained which client. Use engine='sequential' (or 'auto'){way_out}."
        )
    work.draws = False
    if w.is_cuda:
        torch.cuda.reset_peak_memory_stats(w.device)
    reason = not_captured(module, first)
    if reason and module.capture is True:
        module.note(NOT_CAPTURED + reason)
    number = min(int(workers) or most_beside(module), most_at_once(module))
    facts |= {"workers": str(number), "threads": "1", "capture": f"no: {reason}" if reason else "yes"}

    def tell(what: str) -> None:
        if what.startswith(NOT_CAPTURED):
            facts["capture"] = f"no: {what.removeprefix(NOT_CAPTURED)}"
        module.note(what)

    side_by_side = Concurrent if w.device.type == "cpu" else Streams
    alike = not module.methods.in_steps_of_others()
    return side_by_side(work, learner, copied(number), tell, not reason, alike), facts


def not_captured(module: FederatedModule, first: Copy) -> str:
    """Why local steps are not captured, or an empty string; a few are tried on a copy of the learner."""
    foreign = module.methods.in_steps_of_others()
    if not module.capture:
        return "not asked for"
    if not type(module._client).__module__.startswith("torch.optim"):
        return f"{type(module._client).__name__} is not one of torch's optimizers"
    if foreign and module.capture == "auto":
        return f"{foreign} is not a packaged method; capture=True captures it too"
    return uncapturable(module, *first)


def repeatable() -> None:
    """On a GPU: kernels that leave the same bits each time."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True


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
    before = RandomState(replica.x)
    ids = module.participants(0)
    try:
        trial = replica.another()  # so that the learner keeps its attributes
        stack = Stack(trial, 2)
        stack.x.copy_(module.global_vector.detach().expand_as(stack.x))
        trial.x.fill_(torch.nan)  # where only a learner that reads parameters past the stack would look
        attributes = Attributes(trial.learner, metrics=True)
        own = {name: id(buffer) for name, buffer in trial.buffers.items()}
        with torch.no_grad():
            two = (ids[0], ids[-1])
            batches = [next(iter(module.data.client_batches(i, 0, 1, device=stack.x.device))) for i in two]
            finite = stack.gradient(stack.groups(list(enumerate(batches))), 0).isfinite().all()
        if not bool(finite):
            return "its loss is not finite, or reads parameters that are not its modules'"
        if changed := [name for name, buffer in trial.buffers.items() if own.get(name) != id(buffer)]:
            return f"its training_step assigns to the buffer {changed[0]}"
        if attribute := attributes.changed():
            return f"its training_step changes {attribute}"
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"
    finally:
        before.restore()
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


def most_beside(module: FederatedModule) -> int:
    """Clients side by side: the process's cores; on a GPU as many as fit into its memory, up to ``STREAMS``."""
    device = module.global_vector.device
    if device.type == "cpu":
        return usable_cores(module)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    one = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)  # of the steps tried
    return max(1, min(STREAMS, int(0.8 * free) // max(1, one + 4 * module.global_vector.nbytes)))


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
    if module.global_vector.device.type == "cuda":
        return measured_on_gpu(module, copied, alone)
    workers = usable_cores(module) if module.workers == "auto" else int(module.workers)
    workers = min(workers, most_at_once(module))
    if module.global_vector.device.type != "cpu":
        return {**alone, "why": "clients train side by side on CPUs and CUDA GPUs"}
    if workers < 2 and usable_cores(module) > 1 and module.workers != 1:
        return {**alone, "why": "one client for each process"}
    try:
        copies = copied(workers)
    except Exception as error:
        return {**alone, "why": f"{type(module.learner).__name__} cannot be copied ({type(error).__name__}: {error})"}
    try:
        if drawn := draws(module, *copies[0]):
            return {**alone, "why": f"{drawn}, so clients train one after the other"}
        if workers < 2:  # on a thread of its own all the same, where local steps are captured
            return {
                "engine": "concurrent",
                "workers": "1",
                "threads": "1",
                "why": "one at a time, as asked or one core",
            }
        lengths = [module.steps(0, i) for i in module.participants(0)[:: module.trainer.world_size]]
        captured = not not_captured(module, copies[0])
        seconds = step_seconds(module, copies, sum(lengths), captured)
    except Exception as error:  # the first round will meet it, and say where
        return {**alone, "why": f"not measured ({type(error).__name__})"}
    alone["threads"] = "1"  # as beside others, so that timing decides how fast a run is and not its bits
    if seconds is None:
        return {**alone, "why": f"a round's local steps take less than {1000 * TINY_SECONDS:g} ms"}
    one_by_one, side_by_side = sum(lengths) * seconds["alone"], makespan(lengths, workers) * seconds["beside"]
    why = (
        f"measured, on one thread a client: a round's local steps take {one_by_one:.3g} s one client after the other, "
        f"{side_by_side:.3g} s with {workers} side by side{' and captured' if captured else ''}"
    )
    together = side_by_side < one_by_one * CLEARLY
    facts = {"engine": "concurrent", "workers": str(workers), "threads": "1"} if together else alone
    kind = "beside" if together else "alone"
    images = seconds.get(f"{kind}, channels last")
    if images is not None and images * CLEARLY < seconds[kind]:
        facts["memory"] = "channels_last"
        why += f", and images in channels-last memory {images / seconds[kind]:.2f} of that"
    return {**facts, "why": why}


def measured_on_gpu(module: FederatedModule, copied: Callable[[int], list[Copy]], alone: Facts) -> Facts:
    """Side by side unless the learner draws random numbers; images in the memory format whose step takes less time."""
    try:
        first = copied(1)[0]
    except Exception as error:
        return {**alone, "why": f"{type(module.learner).__name__} cannot be copied ({type(error).__name__}: {error})"}
    try:
        if drawn := draws(module, *first):
            return {**alone, "why": f"{drawn}, so clients train one after the other"}
        seconds = replayed_seconds(module, *first)
    except Exception as error:  # the first round will meet it, and say where
        return {**alone, "why": f"not measured ({type(error).__name__})"}
    told = ", ".join(f"{1000 * value:.3g} ms{name}" for name, value in seconds.items())
    facts = {"engine": "concurrent", "why": f"on a GPU clients train on streams; a local step of one takes {told}"}
    if seconds.get(CHANNELS_LAST, seconds[""]) * CLEARLY < seconds[""]:
        facts["memory"] = "channels_last"
    return facts
