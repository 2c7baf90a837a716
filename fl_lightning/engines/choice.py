"""The engine of a run: the one asked for, the one that a resumed run began with, or auto's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fl_lightning.client.forward_hooks import FirstForwardCheck, ForwardHooks
from fl_lightning.engines.auto import decide
from fl_lightning.engines.engine import Engine
from fl_lightning.engines.engine_context import EngineContext, LearnerCopies
from fl_lightning.engines.engine_plan import EnginePlan
from fl_lightning.engines.fast_switch import refusal
from fl_lightning.engines.registry import ENGINES, BuildRequest, Notify
from fl_lightning.engines.trials.batch_check import check_batch_sizes, first_line
from fl_lightning.engines.trials.dry_run import DryRun, tried_apart
from fl_lightning.engines.trials.trial_steps import FirstSteps, Reason, take_first_steps
from fl_lightning.errors import UserError
from fl_lightning.round.settings import AUTO, SEQUENTIAL, STACKED


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
        UserError: the engine asked for cannot train this learner, a packaged network does not fit
            the data, or a batch is too small for the learner.
        Exception: of the learner's first step, where a copy of the learner meets one.
    """
    asked = ENGINES.get(context.engine)  # None: auto
    reason = None if asked is None else asked.supports(context)
    if reason is None and context.capture is True:
        reason = refusal("capture=True", "capture='auto'")
    if reason is not None:
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
    kernels = kernels_of(context.w.device)
    so_far = kernels
    if held is not None and held.kernels not in ("", kernels):
        note(other_kernels(held.kernels, kernels))
        # A later resume says so, too, whatever it runs on.
        same = held.kernels.endswith(kernels)
        so_far = held.kernels if same else f"{held.kernels}, then {kernels}"
    plan = replace(decision.plan, server_threads=torch.get_num_threads(), kernels=so_far)
    for text in decision.notes:
        note(text)
    copies.treat_as_buffers(plan.as_buffers)
    check_forward_hooks(copies)
    tell_of_buffers(context, plan, decision.buffers, note)
    if resumed:
        copies.prepare(plan)
    kind = ENGINES[plan.engine] if asked is None else asked
    by_name = asked is not None and not resumed
    return kind.build(BuildRequest(copies, plan, decision.one_by_one, by_name, note, uncaptured))


def more_threads(threads: int, cores: int) -> str:
    """The note about a resumed run that began with more cores."""
    return (
        f"this run began with {threads} threads within an operation, and this process has {cores} "
        f"{'core' if cores == 1 else 'cores'} for itself. It keeps {threads}, because another "
        "number gives other bits; rounds take longer than with as many threads as cores"
    )


def kernels_of(device: torch.device) -> str:
    """Return the processor's instructions and the GPU's name, by which torch chooses kernels."""
    capability = torch.backends.cpu.get_cpu_capability()
    if device.type == "cpu":
        return f"a processor with {capability}"
    return f"{torch.cuda.get_device_name(device)} beside a processor with {capability}"


def other_kernels(before: str, now: str) -> str:
    """The note about a run that is resumed on other hardware."""
    return (
        f"the rounds up to this checkpoint ran on {before}, and this is {now}. torch computes with "
        "other kernels on each, so the resumed run agrees to rounding, and not bit for bit, with "
        "one that was never interrupted"
    )


def check_forward_hooks(copies: LearnerCopies) -> None:
    """Refuse taps that name no module, or none that a step calls, and labels of another kind.

    It is a step of round 0's first client on a copy, in every process.

    Raises:
        UserError: naming method and tap.
    """
    context = copies.context
    methods = context.work.methods
    if not methods.look:
        return
    forward_hooks = ForwardHooks(methods, copies.original, draws=False)
    # A hook that runs later may add modules.
    for tap in () if context.hooks_first else forward_hooks.every:
        tap.module(context.learner)
    copy = None
    try:
        with tried_apart(context):
            trial = DryRun(copies)
            copy = trial.copy
            copy.forward_hooks = FirstForwardCheck(methods, copy, draws=False)
            trial.run(context.cohort.tried(0)[0], 1)
    except UserError:
        raise
    except Exception:
        # If a step cannot be tried on a copy, round 0 meets the error and reports it.
        return
    finally:
        if copy is not None:
            copy.forward_hooks = None
            copy.reset()


def plan_fits(context: EngineContext, held: EnginePlan) -> bool:
    """Tell whether a resumed run keeps the plan that it began with."""
    asked = ENGINES.get(context.engine)  # None: auto
    if asked is not None and asked.planned_as != held.engine:
        return False
    if ENGINES[held.engine].supports(context) is not None:
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
    notes = []
    if not first_steps.untried and (of_batches := check_batch_sizes(copies)):
        notes.append(of_batches)
    if first_steps.untrained:
        notes.append(
            f"learner {type(copies.context.learner).__name__}: in a first local step none of its "
            "trainable parameters got a gradient, so clients learn nothing from their data. Its "
            "loss has to depend on them: look for torch.no_grad(), detach() and parameters that "
            "the forward pass does not use"
        )
    return tuple(notes)


def planned(copies: LearnerCopies, first_steps: FirstSteps) -> Decision:
    """The engine asked for, or auto's."""
    context = copies.context
    one_by_one = first_steps.one_by_one
    if context.engine == AUTO:
        plan, one_by_one = decide(copies, first_steps)
    else:
        asked = ENGINES[context.engine].planned_as
        plan = EnginePlan(asked, "asked for", threads=torch.get_num_threads())
        if one_by_one is None and "cannot be copied" in first_steps.untried:
            one_by_one = Reason(first_steps.untried)
    return Decision(replace(plan, as_buffers=copies.as_buffers), one_by_one)
