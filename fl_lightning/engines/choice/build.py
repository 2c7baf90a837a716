"""Which engine trains the clients: the one asked for, the one a resumed run began with, or the faster one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from fl_lightning.engines.choice import trial
from fl_lightning.engines.choice.batch_sizes import check_batch_sizes
from fl_lightning.engines.choice.plan import EnginePlan
from fl_lightning.engines.choice.rehearsal import Obstacle, Rehearsal, rehearse, unproven
from fl_lightning.engines.choice.traces import traces_undone
from fl_lightning.engines.choice.workshop import Setting, Workshop
from fl_lightning.engines.engine import Engine
from fl_lightning.engines.random_state import random_state_kept
from fl_lightning.engines.replay.capture import Capture
from fl_lightning.engines.sequential import Sequential
from fl_lightning.engines.stacked import Stacked
from fl_lightning.engines.streams import Streams, own_stream
from fl_lightning.engines.threads import Threads
from fl_lightning.engines.worker import Worker
from fl_lightning.errors import UserError
from fl_lightning.learner import IN_STEPS, gradient_hook

# a step that is not captured and takes less is mostly Python, which one thread runs at a time
PYTHON_SECONDS = 0.002
# rounds of less local work are not worth measuring, and the choice would be left to noise
TINY_SECONDS = 0.02
NOT_CAPTURED = "local steps are not captured, and run one by one: "
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Decision:
    """What the first process found, for all: a plan, what speaks against side by side, or why nothing can start.

    ``told``: what the user should know of the batch sizes; ``buffers``: those that a step changed.
    """

    plan: EnginePlan
    obstacle: Obstacle | None = None
    failure: str = ""
    told: str = ""
    buffers: tuple[str, ...] = ()


def choose(
    setting: Setting, held: EnginePlan | None, note: Tell, uncaptured: Tell
) -> tuple[Engine, EnginePlan]:
    """The run's engine and its plan.

    Args:
        held: the plan of the run that is resumed.
        note: takes what the user should know, such as that an engine trains that was not asked for.
        uncaptured: called with the reason when a later round turns out not to be captured.

    Raises:
        UserError: the engine asked for cannot train this learner, a packaged network does not fit the data, or a batch
            is too small for the learner.
        Exception: of the learner's first step, where a copy of the learner meets one.
    """
    workshop = Workshop(setting)
    resumed = held is not None and goes_on(setting, held)
    if held is not None and resumed:
        decision = Decision(held)
        if held.server_threads not in (0, torch.get_num_threads()):
            torch.set_num_threads(held.server_threads)
    else:
        decision = decided(workshop, () if held is None else held.written)
    plan = replace(decision.plan, server_threads=torch.get_num_threads())
    obstacle = decision.obstacle
    if decision.told:
        note(decision.told)
    workshop.treat_as_buffers(plan.written)
    tell_of_buffers(setting, plan, decision.buffers, note)
    if resumed and plan.channels_last:
        workshop.use_channels_last()
    if plan.engine == "stacked":
        with nothing_left(setting):
            plan = stackable(workshop, plan, obstacle, note)
        if plan.engine == "stacked":
            return Stacked(workshop.on_learner(), workshop.optimizer, plan.at_once, note), plan
    elif plan.engine == "concurrent" and setting.engine == "concurrent" and not resumed:
        check_beside(setting, obstacle, note)
    if plan.engine == "concurrent":
        return concurrent(workshop, plan, note, uncaptured)
    if obstacle is not None and obstacle.keeps:
        note(
            f"{type(setting.learner).__name__} keeps state outside its buffers ({obstacle.reason}): under "
            "engine='sequential' it runs on from client to client, and no checkpoint holds it. In a buffer "
            "(register_buffer) it would start at the server's for each client"
        )
    if obstacle is not None and obstacle.told:
        note(obstacle.told)
    if setting.capture is True:
        note(f"{NOT_CAPTURED}engine='{plan.engine}' trains, and engine='concurrent' alone captures")
    return Sequential(workshop.on_learner(), plan.threads), plan


def goes_on(setting: Setting, held: EnginePlan) -> bool:
    """Whether a resumed run keeps the plan that it began with."""
    if setting.engine not in ("auto", held.engine):
        return False
    # These came since: side by side they would not be called.
    alone = bool(setting.looking) or bool(gradient_hook(setting.learner))
    return held.engine == "sequential" or not alone


def tell_of_buffers(
    setting: Setting, plan: EnginePlan, changed: tuple[str, ...], note: Tell
) -> None:
    """Name the buffers that steps change and that stay the server's."""
    policy = setting.policy
    policy.written = plan.written
    buffers = dict(setting.learner.named_buffers())
    present = [name for name in changed if name in buffers]
    policy.tell([name for name in present if policy.untold(name, buffers[name])], note)


def nothing_left(setting: Setting) -> ExitStack:
    """Within, steps may be tried: what these change outside of copies of the learner is put back."""
    stack = ExitStack()
    stack.enter_context(random_state_kept(setting.w))
    roots = [setting.learner, setting.work.data]
    for callback in setting.looking:
        own = {name: value for name, value in vars(callback).items() if name not in IN_STEPS}
        roots += own.values()
        stack.callback(vars(callback).update, own)
    stack.enter_context(traces_undone(roots))
    return stack


def decided(workshop: Workshop, written: tuple[str, ...]) -> Decision:
    """By the first process, for all; ``written``: frozen parameters known to be written."""
    setting, failure, decision = workshop.setting, None, None
    # The network alone decides: with a measured choice two runs of one command had other bits.
    channels_last = setting.prefers_channels_last and setting.engine != "stacked"
    if channels_last:
        workshop.use_channels_last()
    if setting.rank == 0:
        try:
            with nothing_left(setting):
                seen = rehearse(workshop)
                workshop.treat_as_buffers(tuple(dict.fromkeys((*written, *seen.written))))
                told = "" if seen.untried else check_batch_sizes(workshop)
                decision = replace(planned(workshop, seen), told=told, buffers=seen.buffers)
        except Exception as error:
            failure = error
            first = (str(error).strip().splitlines() or [""])[0]
            decision = Decision(
                EnginePlan(""), failure=f"the first process could not start: {first}"
            )
    agreed: Decision = setting.broadcast(decision)
    if failure is not None:
        raise failure
    if agreed.failure:
        raise UserError(agreed.failure)
    return replace(agreed, plan=replace(agreed.plan, channels_last=channels_last))


def planned(workshop: Workshop, seen: Rehearsal) -> Decision:
    """The engine asked for, or the faster one that is proven to work."""
    setting = workshop.setting
    plan, obstacle = (
        EnginePlan(setting.engine, "asked for", threads=torch.get_num_threads()),
        seen.obstacle,
    )
    if seen.untried and obstacle is None and setting.engine != "auto":
        obstacle = Obstacle(seen.untried) if "cannot be copied" in seen.untried else None
    if setting.engine == "auto":
        plan, obstacle = measured(workshop, seen)
    return Decision(replace(plan, written=workshop.written), obstacle)


def check_beside(setting: Setting, obstacle: Obstacle | None, note: Tell) -> None:
    """Refuse what one step showed not to work side by side; say what it cannot show.

    Raises:
        UserError: with the reason, and the way out.
    """
    name = type(setting.learner).__name__
    if obstacle is not None:
        way_out = ", or keep such state in a buffer" if obstacle.keeps else ""
        raise UserError(
            f"engine='concurrent' cannot train {name}: {obstacle.reason}. Clients side by "
            "side share the process's random generators and each has its own copy of the learner, so results would "
            f"depend on which copy trained which client. Use engine='sequential' (or 'auto'){way_out}."
        )
    note(
        f"engine='concurrent' was asked for: one step of {name} was looked at, and it is not proven, as under "
        "engine='auto', that a client leaves the same bits whichever copy trains it; state that it keeps outside its "
        "buffers (an own generator, a counter) would make results depend on chance"
    )


def concurrent(
    workshop: Workshop, plan: EnginePlan, note: Tell, uncaptured: Tell
) -> tuple[Engine, EnginePlan]:
    """Clients side by side, on threads of a CPU or streams of a GPU."""
    setting = workshop.setting
    device = setting.w.device
    if device.type not in ("cpu", "cuda"):
        raise UserError(
            f"engine='concurrent' on {device.type}: it trains clients on threads of a CPU or streams of a CUDA GPU. "
            "Use engine='sequential', or trainer.accelerator=cpu."
        )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if plan.captured or plan.not_captured:
        reason = plan.not_captured
    else:
        with nothing_left(setting):
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


def stackable(
    workshop: Workshop, plan: EnginePlan, obstacle: Obstacle | None, note: Tell
) -> EnginePlan:
    """The plan with the size of a stack, or the next best engine where the learner cannot be stacked."""
    setting = workshop.setting
    if not (reason := trial.why_not_stacked(workshop)):
        at_once = (
            plan.at_once if setting.clients_at_once == "auto" else int(setting.clients_at_once)
        )
        gigabyte = max(1, 2**30 // (8 * setting.w.nbytes))  # eight vectors of D a client
        return replace(
            plan,
            at_once=min(at_once or gigabyte, setting.most_at_once),
            threads=torch.get_num_threads(),
        )
    beside = setting.w.device.type in ("cpu", "cuda") and obstacle is None
    instead = "concurrent" if beside else "sequential"
    name = type(setting.learner).__name__
    note(f"engine='stacked' cannot train {name} ({reason}); engine='{instead}' does")
    return replace(plan, engine=instead, why=f"it cannot be stacked: {reason}")


def measured(workshop: Workshop, seen: Rehearsal) -> tuple[EnginePlan, Obstacle | None]:
    """``"auto"``: side by side where a rehearsal proves that it may be, and where that is the faster way."""
    setting = workshop.setting
    alone = EnginePlan("sequential", threads=torch.get_num_threads())
    kind = setting.w.device.type
    if kind not in ("cpu", "cuda"):
        return replace(alone, why="clients train side by side on CPUs and CUDA GPUs"), seen.obstacle
    workers = setting.usable_cores if setting.workers == "auto" else int(setting.workers)
    workers = min(workers, setting.most_at_once)
    if kind == "cpu" and workers < 2 and setting.usable_cores > 1 and setting.workers != 1:
        return replace(alone, why="one client for each process"), seen.obstacle
    if seen.untried:
        return replace(alone, why=seen.untried), None
    try:
        obstacle = seen.obstacle
        if obstacle is None and kind == "cpu" and tiny(workshop):
            why = f"a round's local steps take less than {1000 * TINY_SECONDS:g} ms"
            return EnginePlan("sequential", why), None
        if obstacle := obstacle or unproven(workshop):
            return replace(
                alone, why=f"{obstacle.reason}, so clients train one after the other"
            ), obstacle
        reason = trial.why_not_captured(workshop)
        plan = (
            measured_on_gpu(workshop)
            if kind == "cuda"
            else measured_on_cpu(workshop, workers, reason)
        )
        return replace(plan, captured=not reason, not_captured=reason), None
    except Exception as error:  # the first round will meet it, and say where
        return replace(alone, why=f"not measured ({type(error).__name__}: {error})"), seen.obstacle


def tiny(workshop: Workshop) -> bool:
    """Whether a round is over before a choice would pay."""
    return sum(workshop.setting.lengths()) * trial.step_when_quiet(workshop) < TINY_SECONDS


def measured_on_cpu(workshop: Workshop, workers: int, reason: str) -> EnginePlan:
    """Side by side but for steps that would wait for Python; on one thread a client, so with the same bits either way.

    Args:
        reason: why steps are not captured; empty where they are.
    """
    once = trial.one_step(workshop)
    takes = f"a local step takes {1000 * once:.3g} ms on one thread, measured"
    if workers < 2:  # on a thread of its own all the same, where local steps are captured
        return EnginePlan(
            "concurrent",
            f"one at a time, as asked or one core; {takes}",
            1,
        )
    if reason and trial.step_when_quiet(workshop) < PYTHON_SECONDS:
        why = f"{takes}, and is not captured: clients side by side would wait for Python's lock"
        return EnginePlan("sequential", why)
    how = (
        "it is captured, so without Python's lock"
        if not reason
        else "of which Python's lock holds a smaller part"
    )
    return EnginePlan("concurrent", f"{takes}, {how}", workers=workers)


def measured_on_gpu(workshop: Workshop) -> EnginePlan:
    """Side by side, on streams."""
    takes = f"{1000 * trial.replayed_seconds(workshop):.3g} ms"
    why = f"on a GPU clients train on streams; a local step of one takes {takes}"
    return EnginePlan("concurrent", why)
