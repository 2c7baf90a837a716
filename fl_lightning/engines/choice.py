"""The engine of a run: the one asked for, the one that a resumed run began with, or auto's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fl_lightning.engines.auto import decide
from fl_lightning.engines.engine import Engine
from fl_lightning.engines.engine_context import EngineContext, LearnerCopies
from fl_lightning.engines.engine_plan import EnginePlan
from fl_lightning.engines.registry import BuildRequest, Notify, build, unsupported
from fl_lightning.engines.trials.batch_check import check_batch_sizes, first_line
from fl_lightning.engines.trials.dry_run import tried_apart
from fl_lightning.engines.trials.sample_trial import why_one_by_one
from fl_lightning.engines.trials.trial_steps import FirstSteps, Reason, take_first_steps
from fl_lightning.errors import UserError, refuse_both
from fl_lightning.round.settings import AUTO, DEBUG, SEQUENTIAL, STACKED


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
    context: EngineContext, held: EnginePlan | None, note: Notify, uncaptured: Notify
) -> tuple[Engine, EnginePlan]:
    """The run's engine and its plan.

    Args:
        held: the plan of the run that is resumed.
        note: takes what the user should know, such as that an engine trains that was not asked for.
        uncaptured: called with the reason when a later round turns out not to be captured.

    Raises:
        UserError: the engine asked for cannot train this learner, or a batch is too small for it.
        Exception: of the learner's first step, where a copy of the learner meets one.
    """
    if reason := unsupported(context.engine, context):
        raise UserError(reason)
    copies = LearnerCopies(context)
    resumed = held is not None and plan_fits(context, held)
    if held is not None and resumed:
        decision = Decision(held)
        if held.server_threads not in (0, torch.get_num_threads()):
            torch.set_num_threads(held.server_threads)
        if max(held.threads, held.server_threads) > context.usable_cores:
            note(more_threads(max(held.threads, held.server_threads), context.usable_cores))
    else:
        decision = decided(copies, () if held is None else held.as_buffers)
    plan = replace(decision.plan, server_threads=torch.get_num_threads())
    for text in decision.notes:
        note(text)
    copies.treat_as_buffers(plan.as_buffers)
    tell_of_buffers(context, plan, decision.buffers, note)
    if resumed:
        copies.prepare(plan)
    if context.work.methods.reduced_by:
        ready_for_samples(copies, decision, note)
    by_name = context.engine != AUTO and not resumed
    return build(BuildRequest(copies, plan, decision.one_by_one, by_name, note, uncaptured))


def ready_for_samples(copies: LearnerCopies, decision: Decision, note: Notify) -> None:
    """Decide whether gradients of single samples are taken together or one by one.

    Raises:
        UserError: the learner carries values from sample to sample, and a method protects these.
    """
    context = copies.context
    work = context.work
    learner = type(context.learner).__name__
    found = decision.one_by_one
    if work.methods.protects_samples and found is not None and found.keeps:
        raise UserError(
            f"method: {work.methods.protects_samples} cannot train {learner}: {found.text}. So the "
            "gradient of one sample would depend on other samples, and no noise would hide that. "
            "Keep no such state in training_step."
        )
    name = work.methods.reduced_by
    hooks = copies.original.hooks
    takes_batch = [] if hooks is None else [n for n in hooks.names if n not in hooks.before_step]
    if takes_batch:
        raise UserError(
            f"method: {name} cannot train {learner}, which overrides {takes_batch[0]}: that is "
            f"called with a batch or its gradient, and {name} takes the gradient of each sample. "
            "Remove it."
        )
    if context.looking:
        other = type(context.looking[0]).__name__
        gets = "gets the clients' batches (on_train_batch_start)"
        refuse_both(name, other, f"{other} {gets}, and {name} takes the gradient of each sample")
    work.samples_at_once = work.methods.samples_at_once
    if work.samples_at_once == 1:
        return
    with tried_apart(context):
        reason = why_one_by_one(copies)
    if reason:
        work.samples_at_once = 1
        note(
            f"{work.methods.reduced_by} takes the gradients of single samples one by one, and not "
            f"together by torch.func.vmap, because {reason}"
        )


def more_threads(threads: int, cores: int) -> str:
    """The note about a resumed run that began with more cores."""
    return (
        f"this run began with {threads} threads within an operation, and this process has {cores} "
        f"{'core' if cores == 1 else 'cores'} for itself. It keeps {threads}, because another "
        "number gives other bits; rounds take longer than with as many threads as cores"
    )


def planned_as(engine: str) -> str:
    """The name in plans and checkpoints of an engine that was asked for."""
    return SEQUENTIAL if engine == DEBUG else engine


def plan_fits(context: EngineContext, held: EnginePlan) -> bool:
    """Tell whether a resumed run keeps the plan that it began with."""
    if planned_as(context.engine) not in (AUTO, held.engine) or unsupported(held.engine, context):
        return False
    # Such callbacks and hooks were added later; with parallel clients they would not be called.
    return held.engine == SEQUENTIAL or not context.held_once(context.learner)


def tell_of_buffers(
    context: EngineContext, plan: EnginePlan, changed: tuple[str, ...], note: Notify
) -> None:
    """Name the buffers that steps change and that stay the server's."""
    policy = context.policy
    policy.as_buffers = plan.as_buffers
    buffers = dict(context.learner.named_buffers())
    present = [name for name in changed if name in buffers]
    policy.name_kept([name for name in present if policy.untold(name, buffers[name])], note)


def decided(copies: LearnerCopies, as_buffers: tuple[str, ...]) -> Decision:
    """What the first process finds out, for all; ``as_buffers``: frozen parameters known to be."""
    context = copies.context
    failure: Exception | None = None
    decision: Decision | None = None
    copies.treat_as_buffers(as_buffers)
    # Only the network and the optimizer decide this. A choice by measured time would give two runs
    # of one command different bits.
    channels_last = context.prefers_channels_last and context.engine != STACKED
    fused = context.fuses
    copies.prepare(EnginePlan("", channels_last=channels_last, fused=fused))
    if context.rank == 0:
        try:
            with tried_apart(context):
                first_steps = take_first_steps(copies)
                notes = notes_of(copies, first_steps)
                decision = replace(
                    planned(copies, first_steps), notes=notes, buffers=first_steps.buffers
                )
        except Exception as error:
            failure = error
            text = f"the first process could not start: {first_line(error)}"
            decision = Decision(EnginePlan(""), failure=text)
    agreed: Decision = context.broadcast(decision)
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
    if not first_steps.untried:
        check_batch_sizes(copies)
    if not first_steps.untrained:
        return ()
    return (
        f"learner {type(copies.context.learner).__name__}: in a first local step none of its "
        "trainable parameters got a gradient, so clients learn nothing from their data. Its loss "
        "has to depend on them: look for torch.no_grad(), detach() and parameters that the "
        "forward pass does not use",
    )


def planned(copies: LearnerCopies, first_steps: FirstSteps) -> Decision:
    """The engine asked for, or auto's."""
    context = copies.context
    one_by_one = first_steps.one_by_one
    if context.engine == AUTO:
        plan, one_by_one = decide(copies, first_steps)
    else:
        threads = torch.get_num_threads()
        plan = EnginePlan(planned_as(context.engine), "asked for", threads=threads)
        if one_by_one is None and "cannot be copied" in first_steps.untried:
            one_by_one = Reason(first_steps.untried)
    return Decision(replace(plan, as_buffers=copies.as_buffers), one_by_one)
