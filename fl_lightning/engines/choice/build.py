"""Which engine trains the clients: the one asked for, a resumed run's own, or the faster by measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fl_lightning.engines.choice import trial
from fl_lightning.engines.choice.plan import EnginePlan
from fl_lightning.engines.choice.workshop import Setting, Workshop
from fl_lightning.engines.engine import Engine
from fl_lightning.engines.replay.capture import Capture
from fl_lightning.engines.sequential import Sequential
from fl_lightning.engines.stacked import Stacked
from fl_lightning.engines.streams import Streams, own_stream
from fl_lightning.engines.threads import Threads
from fl_lightning.engines.worker import Worker
from fl_lightning.errors import UserError

CLEARLY = 1.1  # how much faster the unusual has to be, so that the choice is stable where it matters little
NOT_CAPTURED = "local steps are not captured, and run one by one: "
Tell = Callable[[str], None]


def choose(setting: Setting, held: EnginePlan | None, note: Tell, uncaptured: Tell) -> tuple[Engine, EnginePlan]:
    """The run's engine and its plan.

    Args:
        held: the plan of the run that is resumed.
        note: takes what the user should know, such as that an engine trains that was not asked for.
        uncaptured: called with the reason when a later round turns out not to be captured.

    Raises:
        UserError: the engine asked for cannot train this learner.
    """
    workshop = Workshop(setting)
    asked = False
    if held is not None and setting.engine in ("auto", held.engine):
        plan = held
        if plan.server_threads not in (0, torch.get_num_threads()):
            torch.set_num_threads(plan.server_threads)
    elif setting.engine == "auto":
        plan = setting.broadcast(measured(workshop) if setting.rank == 0 else None)
    else:
        plan, asked = EnginePlan(setting.engine, "asked for", threads=torch.get_num_threads()), True
    plan = replace(plan, server_threads=torch.get_num_threads())
    if plan.channels_last:
        workshop.use_channels_last()
    if plan.engine == "stacked":
        plan, asked = stackable(workshop, plan, note), False
    if plan.engine == "stacked":
        return Stacked(workshop.on_learner(), workshop.optimizer, plan.at_once, note), plan
    if plan.engine == "concurrent":
        return concurrent(workshop, plan, asked, note, uncaptured)
    if setting.capture is True:
        note(f"{NOT_CAPTURED}engine='{plan.engine}' trains, and engine='concurrent' alone captures")
    return Sequential(workshop.on_learner(), plan.threads), plan


def concurrent(
    workshop: Workshop, plan: EnginePlan, asked: bool, note: Tell, uncaptured: Tell
) -> tuple[Engine, EnginePlan]:
    """Clients side by side, on threads of a CPU or streams of a GPU."""
    setting = workshop.setting
    device = setting.w.device
    if device.type not in ("cpu", "cuda"):
        raise UserError(
            f"engine='concurrent' on {device.type}: it trains clients on threads of a CPU or streams of a CUDA GPU. "
            "Use engine='sequential', or trainer.accelerator=cpu."
        )
    if asked and (obstacle := trial.obstacle_beside(workshop)):
        way_out = ", or keep such state in a buffer" if obstacle.in_attributes else ""
        raise UserError(
            f"engine='concurrent' cannot train {type(setting.learner).__name__}: {obstacle.reason}. Clients side by "
            "side share the process's random generators and each has its own copy of the learner, so results would "
            f"depend on which copy trained which client. Use engine='sequential' (or 'auto'){way_out}."
        )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    reason = trial.why_not_captured(workshop)
    if reason and setting.capture is True:
        note(NOT_CAPTURED + reason)
    wanted = plan.workers if setting.workers == "auto" else int(setting.workers)
    number = min(wanted or setting.most_beside, setting.most_at_once)
    plan = replace(plan, workers=number, threads=1, captured=not reason, not_captured=reason)
    work, alike = replace(setting.work, draws=False), not setting.work.methods.in_steps_of_others()
    workers = []
    for copy, optimizer in workshop.copies(number):
        stream = own_stream(copy.x)
        recorder = Capture(uncaptured, stream, alike) if plan.captured else None
        workers.append(Worker(work, copy, optimizer, recorder, stream))
    if device.type == "cpu":
        return Threads(workers, setting.learner, note), plan
    return Streams(workers, setting.learner), plan


def stackable(workshop: Workshop, plan: EnginePlan, note: Tell) -> EnginePlan:
    """The plan with the size of a stack, or the next best engine where the learner cannot be stacked."""
    setting = workshop.setting
    if not (reason := trial.why_not_stacked(workshop)):
        at_once = plan.at_once if setting.clients_at_once == "auto" else int(setting.clients_at_once)
        gigabyte = max(1, 2**30 // (8 * setting.w.nbytes))  # eight vectors of D a client
        return replace(plan, at_once=min(at_once or gigabyte, setting.most_at_once), threads=torch.get_num_threads())
    try:
        beside = setting.w.device.type in ("cpu", "cuda") and trial.obstacle_beside(workshop) is None
    except Exception:  # it cannot be copied, or its step fails, which the first round will say
        beside = False
    instead = "concurrent" if beside else "sequential"
    name = type(setting.learner).__name__
    note(f"engine='stacked' cannot train {name} ({reason}); engine='{instead}' does")
    return replace(plan, engine=instead, why=f"it cannot be stacked: {reason}")


def measured(workshop: Workshop) -> EnginePlan:
    """``"auto"``: time a few real steps of real clients in copies of the learner, one by one and side by side."""
    setting = workshop.setting
    alone = EnginePlan("sequential", threads=torch.get_num_threads())
    kind = setting.w.device.type
    if kind not in ("cpu", "cuda"):
        return replace(alone, why="clients train side by side on CPUs and CUDA GPUs")
    workers = setting.usable_cores if setting.workers == "auto" else int(setting.workers)
    workers = min(workers, setting.most_at_once)
    if kind == "cpu" and workers < 2 and setting.usable_cores > 1 and setting.workers != 1:
        return replace(alone, why="one client for each process")
    try:
        workshop.copies(workers if kind == "cpu" else 1)
    except Exception as error:
        name = type(setting.learner).__name__
        return replace(alone, why=f"{name} cannot be copied ({type(error).__name__}: {error})")
    try:
        if obstacle := trial.obstacle_beside(workshop):
            return replace(alone, why=f"{obstacle.reason}, so clients train one after the other")
        return measured_on_gpu(workshop) if kind == "cuda" else measured_on_cpu(workshop, workers)
    except Exception as error:  # the first round will meet it, and say where
        return replace(alone, why=f"not measured ({type(error).__name__})")


def measured_on_cpu(workshop: Workshop, workers: int) -> EnginePlan:
    """Side by side unless one after the other is clearly faster; the same bits, as both use one thread a client."""
    setting = workshop.setting
    if workers < 2:  # on a thread of its own all the same, where local steps are captured
        return EnginePlan("concurrent", "one at a time, as asked or one core", workers=1)
    captured = not trial.why_not_captured(workshop)
    seconds = trial.step_seconds(workshop, workers, captured)
    if seconds is None:
        return EnginePlan("sequential", f"a round's local steps take less than {1000 * trial.TINY_SECONDS:g} ms")
    lengths = setting.lengths()
    one_by_one = sum(lengths) * seconds["alone"]
    side_by_side = trial.makespan(lengths, workers) * seconds["beside"]
    why = (
        f"measured, on one thread a client: a round's local steps take {one_by_one:.3g} s one client after the other, "
        f"{side_by_side:.3g} s with {workers} side by side{' and captured' if captured else ''}"
    )
    together = side_by_side < one_by_one * CLEARLY
    kind = "beside" if together else "alone"
    images = seconds.get(kind + trial.CHANNELS_LAST)
    prefers = images is not None and images * CLEARLY < seconds[kind]
    if images is not None and prefers:
        why += f", and images in channels-last memory {images / seconds[kind]:.2f} of that"
    if together:
        return EnginePlan("concurrent", why, workers=workers, channels_last=prefers)
    return EnginePlan("sequential", why, channels_last=prefers)


def measured_on_gpu(workshop: Workshop) -> EnginePlan:
    """Side by side; images in the memory format whose step takes less time."""
    seconds = trial.replayed_seconds(workshop)
    told = ", ".join(f"{1000 * value:.3g} ms{name}" for name, value in seconds.items())
    prefers = seconds.get(trial.CHANNELS_LAST, seconds[""]) * CLEARLY < seconds[""]
    why = f"on a GPU clients train on streams; a local step of one takes {told}"
    return EnginePlan("concurrent", why, channels_last=prefers)
