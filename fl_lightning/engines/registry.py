"""The engines by name: what each can train, and what it builds.

A new engine is a name in `round/settings.py` (a constant and an entry of ``EngineName``), a class
here, and the function in ``ENGINES`` that builds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fl_lightning.client.client_trainer import ClientTrainer
from fl_lightning.engines.debug import Debug
from fl_lightning.engines.engine import Engine
from fl_lightning.engines.engine_context import EngineContext, LearnerCopies
from fl_lightning.engines.engine_plan import EnginePlan
from fl_lightning.engines.fast.capture import Capture, own_stream, why_not_captured
from fl_lightning.engines.fast.gpu_streams import Streams
from fl_lightning.engines.fast.stacked import Stacked, why_not_stacked
from fl_lightning.engines.forked import Forked, why_not_forked
from fl_lightning.engines.sequential import Sequential
from fl_lightning.engines.threads import Threads
from fl_lightning.engines.trials.dry_run import measure_step, tried_apart
from fl_lightning.engines.trials.trial_steps import Reason
from fl_lightning.errors import UserError
from fl_lightning.round.settings import AUTO, CONCURRENT, DEBUG, SEQUENTIAL, STACKED

NOT_CAPTURED = "local steps are not captured, and run one by one: "
Notify = Callable[[str], None]


@dataclass(frozen=True)
class BuildRequest:
    """What an engine is built from.

    Args:
        plan: as decided before; building may change it.
        one_by_one: why clients have to train one after another, if trial steps found a reason.
        asked: whether the user asked for this engine by name, and it did not train the run before.
        note: takes what the user should know, such as that another engine trains.
        uncaptured: called with the reason if a later round turns out not to be captured.
    """

    copies: LearnerCopies
    plan: EnginePlan
    one_by_one: Reason | None
    asked: bool
    note: Notify
    uncaptured: Notify

    @property
    def context(self) -> EngineContext:
        return self.copies.context

    @property
    def learner(self) -> str:
        """The name of the learner's class."""
        return type(self.context.learner).__name__

    def with_workers(self) -> EnginePlan:
        """The plan with its number of workers: as asked for or planned, or as many as fit."""
        context = self.context
        wanted = self.plan.workers if context.workers == AUTO else int(context.workers)
        if not wanted:
            on_cpu = context.w.device.type == "cpu"
            wanted = context.most_beside if on_cpu or measure_step(self.copies) else 1
        number = min(wanted, context.most_at_once)
        return replace(self.plan, workers=number, threads=1)


def unsupported(engine: str, context: EngineContext) -> str:
    """Why an engine cannot train this run, as the error for a user who asks for it; empty: it can.

    No step has been tried yet.
    """
    device = context.w.device.type
    if engine == CONCURRENT and device not in ("cpu", "cuda"):
        return (
            f"engine='{engine}' on {device}: it trains clients on threads of a CPU or streams of "
            f"a CUDA GPU. Use engine='{SEQUENTIAL}', or trainer.accelerator=cpu."
        )
    method = context.work.methods.look
    if engine == STACKED and method:
        return (
            f"engine='{engine}' cannot train with {method}, which reads the outputs of the "
            "learner's modules in one client's step (taps, local_loss, local_output), but stacked "
            f"clients take each step together. Use engine='{AUTO}', '{CONCURRENT}' or "
            f"'{SEQUENTIAL}'."
        )
    if engine == STACKED and (method := context.work.methods.reduced_by):
        return (
            f"engine='{engine}' cannot train with {method}, which takes the gradient of each "
            f"sample. Use engine='{AUTO}', '{CONCURRENT}' or '{SEQUENTIAL}'."
        )
    return ""


def build(request: BuildRequest) -> tuple[Engine, EnginePlan]:
    """The planned engine, or another one if the trial steps show that it cannot train; its plan.

    Raises:
        UserError: the user asked for this engine, and the trial steps show that it cannot.
    """
    return ENGINES[request.plan.engine](request)


def _sequential(request: BuildRequest) -> tuple[Engine, EnginePlan]:
    """Clients one after another; watched, under ``engine="debug"``."""
    context = request.context
    found = request.one_by_one
    if found is not None and found.keeps:
        request.note(kept_outside(request.learner, found.text, context.world_size))
    if found is not None and found.note:
        request.note(found.note)
    if context.capture is True:
        request.note(f"{NOT_CAPTURED}only engine='{CONCURRENT}' captures")
    kind = Debug if context.engine == DEBUG else Sequential
    return kind(request.copies.on_learner(), request.plan.threads), request.plan


def _concurrent(request: BuildRequest) -> tuple[Engine, EnginePlan]:
    """Several clients side by side: on threads, in forked processes, or on streams of a GPU."""
    draws = request.one_by_one is not None and request.one_by_one.draws
    not_forked = why_not_forked(request.context) if draws or request.plan.processes else ""
    if request.asked:
        if draws and not not_forked:
            request = replace(request, plan=replace(request.plan, processes=True))
        else:
            _ask(request, not_forked)
    if not request.plan.processes:
        return _in_this_process(request)
    plan = request.with_workers()
    worker = request.copies.on_learner()
    if not_forked:
        request.note(
            f"clients train one after the other, because {not_forked}. The results are the same, "
            "bit for bit"
        )
        return Sequential(worker, plan.threads), plan
    return Forked(worker, plan.workers, request.note), plan


def _ask(request: BuildRequest, not_forked: str) -> None:
    """Refuse what the trial steps show, and note what they cannot show."""
    found = request.one_by_one
    if found is not None:
        also = f", and {not_forked}" if not_forked else ""
        way_out = ", or keep such state in a buffer" if found.keeps else ""
        raise UserError(
            f"engine='{CONCURRENT}' cannot train {request.learner}: {found.text}{also}. Parallel "
            "clients share the process's random generators and use several copies of the learner, "
            "so results would depend on which copy trained which client. Use "
            f"engine='{SEQUENTIAL}' (or '{AUTO}'){way_out}."
        )
    request.note(
        f"you asked for engine='{CONCURRENT}', so only first steps of {request.learner} were "
        f"tried. Unlike engine='{AUTO}', that does not prove that each copy of the learner trains "
        "a client to the same bits. If the learner keeps state outside its buffers (its own "
        "generator, a counter), results depend on chance"
    )


def _in_this_process(request: BuildRequest) -> tuple[Engine, EnginePlan]:
    context = request.context
    reason = request.plan.not_captured
    if not reason and not request.plan.captured:
        with tried_apart(context):
            reason = why_not_captured(request.copies)
    if reason and context.capture is True:
        request.note(NOT_CAPTURED + reason)
    plan = replace(request.with_workers(), captured=not reason, not_captured=reason)
    work = replace(context.work, draws=False)
    alike = not work.methods.in_steps_of_others()
    workers = []
    for copy, optimizer in request.copies.make(plan.workers):
        stream = own_stream(copy.x)
        step_runner = Capture(request.uncaptured, stream, alike) if plan.captured else None
        workers.append(ClientTrainer(work, copy, optimizer, step_runner, stream))
    if context.w.device.type == "cpu":
        return Threads(workers, context.learner, request.note), plan
    return Streams(workers, context.learner), plan


def _stacked(request: BuildRequest) -> tuple[Engine, EnginePlan]:
    """Many clients as one batch of models. What cannot be stacked trains one after another."""
    copies = request.copies
    context = request.context
    with tried_apart(context):
        reason = why_not_stacked(copies)
    if reason:
        request.note(
            f"engine='{STACKED}' cannot train {request.learner} ({reason}); "
            f"engine='{SEQUENTIAL}' does"
        )
        why = f"it cannot be stacked: {reason}"
        plan = replace(request.plan, engine=SEQUENTIAL, why=why)
        return _sequential(replace(request, plan=plan))
    asked = context.clients_at_once
    at_once = request.plan.at_once if asked == AUTO else int(asked)
    # A client takes about eight vectors of D numbers.
    gigabyte = max(1, 2**30 // (8 * context.w.nbytes))
    number = min(at_once or gigabyte, context.most_at_once)
    plan = replace(request.plan, at_once=number, threads=torch.get_num_threads())
    return Stacked(copies.on_learner(), copies.optimizer, number), plan


# By the name that a plan has; "debug" trains as "sequential".
ENGINES: dict[str, Callable[[BuildRequest], tuple[Engine, EnginePlan]]] = {
    SEQUENTIAL: _sequential,
    CONCURRENT: _concurrent,
    STACKED: _stacked,
}


def kept_outside(learner: str, what: str, processes: int) -> str:
    """What a user should know of a learner that keeps state outside its buffers."""
    apart = (
        f". Each of the {processes} processes has its own, of the clients that it trains, so the "
        "model is not the one that a single process trains"
    )
    return (
        f"{learner} keeps state outside its buffers ({what}): under engine='{SEQUENTIAL}' it runs "
        "on from client to client, beginning with steps that are tried before round 0 where copies "
        "of the learner share it, and no checkpoint holds it. In a buffer (register_buffer) it "
        f"would start at the server's for each client{apart if processes > 1 else ''}"
    )
