"""The engine of a run: the one asked for, the one that a resumed run began with, or auto's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fl_lightning.engines.auto import decide
from fl_lightning.engines.batch_check import check_batch_sizes, first_line
from fl_lightning.engines.debug import Debug
from fl_lightning.engines.door import fast_ways, refused, why_closed
from fl_lightning.engines.dry_run import DryRun, tried_apart
from fl_lightning.engines.engine import Engine
from fl_lightning.engines.forked import Forked, why_not_forked
from fl_lightning.engines.looks import FirstLook, Looks
from fl_lightning.engines.plan import EnginePlan
from fl_lightning.engines.proof import (
    FirstSteps,
    Reason,
    compare_two_copies,
    take_first_steps,
)
from fl_lightning.engines.sequential import Sequential
from fl_lightning.engines.situation import LearnerCopies, Situation
from fl_lightning.engines.threads import Threads
from fl_lightning.engines.worker import Worker
from fl_lightning.errors import UserError
from fl_lightning.learner.modules import gradient_hook

NOT_CAPTURED = "local steps are not captured, and run one by one: "
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Decision:
    """What the first process found out, for all of them.

    Args:
        one_by_one: why clients have to train one after the other.
        failure: why nothing can start.
        notes: what the user should know of the batch sizes and of the gradients.
        buffers: those that a step changed, by name.
    """

    plan: EnginePlan
    one_by_one: Reason | None = None
    failure: str = ""
    notes: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()


def choose(
    situation: Situation, held: EnginePlan | None, note: Tell, uncaptured: Tell
) -> tuple[Engine, EnginePlan]:
    """The run's engine and its plan.

    Args:
        held: the plan of the run that is resumed.
        note: takes what the user should know, such as that an engine trains that was not asked for.
        uncaptured: called with the reason when a later round turns out not to be captured.

    Raises:
        UserError: the engine asked for cannot train this learner, a packaged network does not fit
            the data, or a batch is too small for the learner.
        Exception: of the learner's first step, where a copy of the learner meets one.
    """
    check_door(situation)
    check_stacked(situation)
    copies = LearnerCopies(situation)
    resumed = held is not None and plan_fits(situation, held)
    if held is not None and resumed:
        decision = Decision(held)
        if held.server_threads not in (0, torch.get_num_threads()):
            torch.set_num_threads(held.server_threads)
        if max(held.threads, held.server_threads) > situation.usable_cores:
            note(more_threads(max(held.threads, held.server_threads), situation.usable_cores))
    else:
        decision = decided(copies, () if held is None else held.as_buffers)
    plan = replace(decision.plan, server_threads=torch.get_num_threads())
    one_by_one = decision.one_by_one
    for text in decision.notes:
        note(text)
    copies.treat_as_buffers(plan.as_buffers)
    check_looks(copies)
    tell_of_buffers(situation, plan, decision.buffers, note)
    if resumed:
        copies.prepare(plan)
    if plan.engine == "stacked":
        with tried_apart(situation):
            plan = stackable(copies, plan, one_by_one, note)
        if plan.engine == "stacked":
            made: Engine = fast_ways().Stacked(
                copies.on_learner(), copies.optimizer, plan.at_once, note
            )
            return made, plan
    elif plan.engine == "concurrent" and situation.engine == "concurrent" and not resumed:
        plan = beside(situation, plan, one_by_one, note)
    if plan.engine == "concurrent" and plan.processes:
        return in_processes(copies, plan, note)
    if plan.engine == "concurrent":
        return concurrent(copies, plan, note, uncaptured)
    if one_by_one is not None and one_by_one.keeps:
        name = type(situation.learner).__name__
        note(kept_outside(name, one_by_one.text, situation.world_size))
    if one_by_one is not None and one_by_one.note:
        note(one_by_one.note)
    if situation.capture is True:
        note(f"{NOT_CAPTURED}engine='{plan.engine}' trains, and only engine='concurrent' captures")
    if situation.engine == "debug":
        return Debug(copies.on_learner(), plan.threads), plan
    return Sequential(copies.on_learner(), plan.threads), plan


def more_threads(threads: int, cores: int) -> str:
    """The note about a resumed run that began with more cores."""
    return (
        f"this run began with {threads} threads within an operation, and this process has {cores} "
        f"{'core' if cores == 1 else 'cores'} for itself. It keeps {threads}, because another "
        "number gives other bits; rounds take longer than with as many threads as cores"
    )


def kept_outside(learner: str, what: str, processes: int) -> str:
    """What a user should know of a learner that keeps state outside its buffers."""
    apart = (
        f". Each of the {processes} processes has its own, of the clients that it trains, so the "
        "model is not the one that a single process trains"
    )
    return (
        f"{learner} keeps state outside its buffers ({what}): under engine='sequential' it runs on "
        "from client to client, beginning with steps that are tried before round 0 where copies of "
        "the learner share it, and no checkpoint holds it. In a buffer (register_buffer) it would "
        f"start at the server's for each client{apart if processes > 1 else ''}"
    )


def check_door(situation: Situation) -> None:
    """Refuse what only a fast way can do, if these are switched off."""
    if not why_closed():
        return
    if situation.engine == "stacked":
        raise refused("engine='stacked'", "engine='auto'")
    if situation.capture is True:
        raise refused("capture=True", "capture='auto'")
    if situation.engine == "concurrent" and situation.w.is_cuda:
        raise refused("engine='concurrent' on a GPU", "engine='auto'")


def check_stacked(situation: Situation) -> None:
    """Refuse stacked clients to methods that look at what one client's modules give.

    Raises:
        UserError: naming the method.
    """
    method = situation.work.methods.look
    if method and situation.engine == "stacked":
        raise UserError(
            f"engine='stacked' cannot train with {method}, which reads the outputs of the "
            "learner's modules in one client's step (taps, local_loss, local_output), but stacked "
            "clients take each step together. Use engine='auto', 'concurrent' or 'sequential'."
        )


def check_looks(copies: LearnerCopies) -> None:
    """Refuse taps that name no module, or none that a step calls, and labels of another kind.

    It is a step of round 0's first client on a copy, in every process.

    Raises:
        UserError: naming method and tap.
    """
    situation = copies.situation
    methods = situation.work.methods
    if not methods.look:
        return
    looks = Looks(methods, copies.original, draws=False)
    # A hook that runs later may add modules.
    for tap in () if situation.hooks_first else looks.every:
        tap.module(situation.learner)
    copy = None
    try:
        with tried_apart(situation):
            trial = DryRun(copies)
            copy = trial.copy
            copy.looks = FirstLook(methods, copy)
            trial.run(situation.cohort.tried(0)[0], 1)
    except UserError:
        raise
    except Exception:
        # If a step cannot be tried on a copy, round 0 meets the error and reports it.
        return
    finally:
        if copy is not None:
            copy.looks = None
            copy.reset()


def plan_fits(situation: Situation, held: EnginePlan) -> bool:
    """Tell whether a resumed run keeps the plan that it began with."""
    asked = "sequential" if situation.engine == "debug" else situation.engine
    if asked not in ("auto", held.engine):
        return False
    if held.engine == "stacked" and situation.work.methods.look:
        return False
    streams = held.engine == "concurrent" and situation.w.is_cuda
    if why_closed() and (streams or held.engine == "stacked"):
        return False
    # Such callbacks and hooks were added later; with parallel clients they would not be called.
    alone = bool(situation.looking) or bool(gradient_hook(situation.learner))
    return held.engine == "sequential" or not alone


def tell_of_buffers(
    situation: Situation, plan: EnginePlan, changed: tuple[str, ...], note: Tell
) -> None:
    """Name the buffers that steps change and that stay the server's."""
    policy = situation.policy
    policy.as_buffers = plan.as_buffers
    buffers = dict(situation.learner.named_buffers())
    present = [name for name in changed if name in buffers]
    policy.name_kept([name for name in present if policy.untold(name, buffers[name])], note)


def decided(copies: LearnerCopies, as_buffers: tuple[str, ...]) -> Decision:
    """What the first process finds out, for all; ``as_buffers``: frozen parameters known to be."""
    situation = copies.situation
    failure: Exception | None = None
    decision: Decision | None = None
    copies.treat_as_buffers(as_buffers)
    # Only the network and the optimizer decide this. A choice by measured time would give two runs
    # of one command different bits.
    channels_last = situation.prefers_channels_last and situation.engine != "stacked"
    fused = situation.fuses
    copies.prepare(EnginePlan("", channels_last=channels_last, fused=fused))
    if situation.rank == 0:
        try:
            with tried_apart(situation):
                first_steps = take_first_steps(copies)
                notes = notes_of(copies, first_steps)
                decision = replace(
                    planned(copies, first_steps), notes=notes, buffers=first_steps.buffers
                )
        except Exception as error:
            failure = error
            text = f"the first process could not start: {first_line(error)}"
            decision = Decision(EnginePlan(""), failure=text)
    agreed: Decision = situation.broadcast(decision)
    if failure is not None:
        raise failure
    if agreed.failure:
        raise UserError(agreed.failure)
    return replace(agreed, plan=replace(agreed.plan, channels_last=channels_last, fused=fused))


def notes_of(copies: LearnerCopies, first_steps: FirstSteps) -> tuple[str, ...]:
    """What the user should know before round 0.

    Raises:
        UserError: a batch is too small for the learner.
    """
    notes = []
    if not first_steps.untried and (of_batches := check_batch_sizes(copies)):
        notes.append(of_batches)
    if first_steps.untrained:
        notes.append(
            f"learner {type(copies.situation.learner).__name__}: in a first local step none of its "
            "trainable parameters got a gradient, so clients learn nothing from their data. Its "
            "loss has to depend on them: look for torch.no_grad(), detach() and parameters that "
            "the forward pass does not use"
        )
    return tuple(notes)


def planned(copies: LearnerCopies, first_steps: FirstSteps) -> Decision:
    """The engine asked for, or auto's."""
    situation = copies.situation
    one_by_one = first_steps.one_by_one
    if situation.engine == "auto":
        plan, one_by_one = decide(copies, first_steps)
    else:
        # The engine "debug" trains clients one after another and watches them.
        asked = "sequential" if situation.engine == "debug" else situation.engine
        plan = EnginePlan(asked, "asked for", threads=torch.get_num_threads())
        if one_by_one is None and "cannot be copied" in first_steps.untried:
            one_by_one = Reason(first_steps.untried)
    return Decision(replace(plan, as_buffers=copies.as_buffers), one_by_one)


def beside(
    situation: Situation, plan: EnginePlan, one_by_one: Reason | None, note: Tell
) -> EnginePlan:
    """The plan of an engine that was asked for: in processes, where clients draw random numbers.

    Refuse learners whose first steps show that they cannot train in parallel, and note what the
    steps cannot show.

    Raises:
        UserError: with the reason, and the way out.
    """
    name = type(situation.learner).__name__
    if one_by_one is not None and one_by_one.draws:
        reason = why_not_forked(situation)
        if not reason:
            return replace(plan, processes=True)
        one_by_one = replace(one_by_one, text=f"{one_by_one.text}, and {reason}")
    if one_by_one is not None:
        way_out = ", or keep such state in a buffer" if one_by_one.keeps else ""
        raise UserError(
            f"engine='concurrent' cannot train {name}: {one_by_one.text}. Parallel clients share "
            "the process's random generators and use several copies of the learner, so results "
            "would depend on which copy trained which client. Use engine='sequential' (or "
            f"'auto'){way_out}."
        )
    note(
        f"you asked for engine='concurrent', so only first steps of {name} were tried. Unlike "
        "engine='auto', that does not prove that each copy of the learner trains a client to the "
        "same bits. If the learner keeps state outside its buffers (its own generator, a counter), "
        "results depend on chance"
    )
    return plan


def in_processes(copies: LearnerCopies, plan: EnginePlan, note: Tell) -> tuple[Engine, EnginePlan]:
    """Train clients in parallel in forked processes, or one after another if none can be forked."""
    situation = copies.situation
    wanted = plan.workers if situation.workers == "auto" else int(situation.workers)
    number = min(wanted or situation.most_beside, situation.most_at_once)
    plan = replace(plan, workers=number, threads=1)
    worker = copies.on_learner()
    if reason := why_not_forked(situation):
        note(f"clients train one after the other, to the same bits, because {reason}")
        return Sequential(worker, plan.threads), plan
    return Forked(worker, number, note), plan


def concurrent(
    copies: LearnerCopies, plan: EnginePlan, note: Tell, uncaptured: Tell
) -> tuple[Engine, EnginePlan]:
    """Clients side by side, on threads of a CPU or streams of a GPU."""
    situation = copies.situation
    device = situation.w.device
    if device.type not in ("cpu", "cuda"):
        raise UserError(
            f"engine='concurrent' on {device.type}: it trains clients on threads of a CPU or "
            "streams of a CUDA GPU. Use engine='sequential', or trainer.accelerator=cpu."
        )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    closed = why_closed()
    reason = closed or plan.not_captured
    if not reason and not plan.captured:
        with tried_apart(situation):
            reason = fast_ways().why_not_captured(copies)
    if reason and situation.capture is True:
        note(NOT_CAPTURED + reason)
    wanted = plan.workers if situation.workers == "auto" else int(situation.workers)
    number = min(wanted or situation.most_beside, situation.most_at_once)
    plan = replace(plan, workers=number, threads=1, captured=not reason, not_captured=reason)
    work = replace(situation.work, draws=False)
    alike = not work.methods.in_steps_of_others()
    workers = []
    for copy, optimizer in copies.make(number):
        stream = None if closed else fast_ways().own_stream(copy.x)
        recorder = fast_ways().Capture(uncaptured, stream, alike) if plan.captured else None
        workers.append(Worker(work, copy, optimizer, recorder, stream))
    if device.type == "cpu":
        return Threads(workers, situation.learner, note), plan
    streams: Engine = fast_ways().Streams(workers, situation.learner)
    return streams, plan


def is_proven(copies: LearnerCopies) -> bool:
    """Tell whether steps on two copies show that clients may train in parallel, for ``auto``."""
    try:
        return compare_two_copies(copies) is None
    except Exception:  # no step can be tried yet; round 0 will report where it fails
        return False


def stackable(
    copies: LearnerCopies, plan: EnginePlan, one_by_one: Reason | None, note: Tell
) -> EnginePlan:
    """Return the plan with the size of a stack.

    If no client can be stacked, plan ``concurrent`` or ``sequential`` and note the reason.
    """
    situation = copies.situation
    reason = fast_ways().why_not_stacked(copies)
    if not reason:
        at_once = plan.at_once
        if situation.clients_at_once != "auto":
            at_once = int(situation.clients_at_once)
        # A client takes about eight vectors of D numbers.
        gigabyte = max(1, 2**30 // (8 * situation.w.nbytes))
        number = min(at_once or gigabyte, situation.most_at_once)
        return replace(plan, at_once=number, threads=torch.get_num_threads())
    beside = situation.w.device.type in ("cpu", "cuda") and one_by_one is None
    instead = "concurrent" if beside and is_proven(copies) else "sequential"
    name = type(situation.learner).__name__
    note(f"engine='stacked' cannot train {name} ({reason}); engine='{instead}' does")
    return replace(plan, engine=instead, why=f"it cannot be stacked: {reason}")
