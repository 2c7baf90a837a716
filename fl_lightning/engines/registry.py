"""The engines by name: what each can train, how it is planned, and what it builds.

A new engine is a name in `round/settings.py` (a constant and an entry of ``EngineName``), a class
here, and its entry in ``ENGINES``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fl_lightning.client.client_trainer import ClientTrainer
from fl_lightning.engines.debug import Debug
from fl_lightning.engines.engine import Engine
from fl_lightning.engines.engine_context import EngineContext, LearnerCopies
from fl_lightning.engines.engine_plan import EnginePlan
from fl_lightning.engines.fast_switch import fast_package, refusal, why_off
from fl_lightning.engines.forked import Forked, why_not_forked
from fl_lightning.engines.sequential import Sequential
from fl_lightning.engines.threads import Threads
from fl_lightning.engines.trials.dry_run import measure_step, tried_apart
from fl_lightning.engines.trials.trial_steps import Reason, compare_two_copies
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


class EngineBuilder(ABC):
    """A way of training a round's clients.

    ``name`` is what users give as ``engine``; ``planned_as`` is the name in plans and checkpoints.
    """

    name: str
    planned_as: str

    def supports(self, context: EngineContext) -> str | None:
        """Why it cannot train this run, as the error for a user who asks for it; None: it can.

        No step has been tried yet.
        """
        return None

    @abstractmethod
    def build(self, request: BuildRequest) -> tuple[Engine, EnginePlan]:
        """The engine, or another one if the trial steps show that this one cannot train; its plan.

        Raises:
            UserError: the user asked for this engine, and the trial steps show that it cannot.
        """


class SequentialBuilder(EngineBuilder):
    """Clients one after another."""

    name = SEQUENTIAL
    planned_as = SEQUENTIAL
    engine: type[Sequential] = Sequential

    def build(self, request: BuildRequest) -> tuple[Engine, EnginePlan]:
        found = request.one_by_one
        if found is not None and found.keeps:
            request.note(kept_outside(request.learner, found.text, request.context.world_size))
        if found is not None and found.note:
            request.note(found.note)
        if request.context.capture is True:
            request.note(
                f"{NOT_CAPTURED}engine='{self.planned_as}' trains, and only "
                f"engine='{CONCURRENT}' captures"
            )
        return self.engine(request.copies.on_learner(), request.plan.threads), request.plan


class DebugBuilder(SequentialBuilder):
    """Clients one after another, watched; the bits are those of ``sequential``."""

    name = DEBUG
    engine = Debug


class ConcurrentBuilder(EngineBuilder):
    """Several clients side by side: on threads, in forked processes, or on streams of a GPU."""

    name = CONCURRENT
    planned_as = CONCURRENT

    def supports(self, context: EngineContext) -> str | None:
        device = context.w.device.type
        if device not in ("cpu", "cuda"):
            return (
                f"engine='{self.name}' on {device}: it trains clients on threads of a CPU or "
                f"streams of a CUDA GPU. Use engine='{SEQUENTIAL}', or trainer.accelerator=cpu."
            )
        return refusal(f"engine='{self.name}' on a GPU") if device == "cuda" else None

    def build(self, request: BuildRequest) -> tuple[Engine, EnginePlan]:
        draws = request.one_by_one is not None and request.one_by_one.draws
        not_forked = why_not_forked(request.context) if draws or request.plan.processes else ""
        if request.asked:
            if draws and not not_forked:
                request = replace(request, plan=replace(request.plan, processes=True))
            else:
                self._ask(request, not_forked)
        if not request.plan.processes:
            return self._in_this_process(request)
        plan = request.with_workers()
        worker = request.copies.on_learner()
        if not_forked:
            request.note(
                f"clients train one after the other, because {not_forked}. The results are the "
                "same, bit for bit"
            )
            return Sequential(worker, plan.threads), plan
        return Forked(worker, plan.workers, request.note), plan

    def _ask(self, request: BuildRequest, not_forked: str) -> None:
        """Refuse what the trial steps show, and note what they cannot show."""
        found = request.one_by_one
        if found is not None:
            also = f", and {not_forked}" if not_forked else ""
            way_out = ", or keep such state in a buffer" if found.keeps else ""
            raise UserError(
                f"engine='{self.name}' cannot train {request.learner}: {found.text}{also}. "
                "Parallel clients share the process's random generators and use several copies of "
                "the learner, so results would depend on which copy trained which client. Use "
                f"engine='{SEQUENTIAL}' (or '{AUTO}'){way_out}."
            )
        request.note(
            f"you asked for engine='{self.name}', so only first steps of {request.learner} were "
            f"tried. Unlike engine='{AUTO}', that does not prove that each copy of the learner "
            "trains a client to the same bits. If the learner keeps state outside its buffers "
            "(its own generator, a counter), results depend on chance"
        )

    def _in_this_process(self, request: BuildRequest) -> tuple[Engine, EnginePlan]:
        context = request.context
        device = context.w.device
        closed = why_off()
        reason = closed or request.plan.not_captured
        if not reason and not request.plan.captured:
            with tried_apart(context):
                reason = fast_package().why_not_captured(request.copies)
        if reason and context.capture is True:
            request.note(NOT_CAPTURED + reason)
        plan = replace(request.with_workers(), captured=not reason, not_captured=reason)
        work = replace(context.work, draws=False)
        alike = not work.methods.in_steps_of_others()
        workers = []
        for copy, optimizer in request.copies.make(plan.workers):
            stream = None if closed else fast_package().own_stream(copy.x)
            step_runner = None
            if plan.captured:
                step_runner = fast_package().Capture(request.uncaptured, stream, alike)
            workers.append(ClientTrainer(work, copy, optimizer, step_runner, stream))
        if device.type == "cpu":
            return Threads(workers, context.learner, request.note), plan
        streams: Engine = fast_package().Streams(workers, context.learner)
        return streams, plan


class StackedBuilder(EngineBuilder):
    """Many clients as one batch of models. Another engine trains what cannot be stacked."""

    name = STACKED
    planned_as = STACKED

    def supports(self, context: EngineContext) -> str | None:
        method = context.work.methods.look
        closed = refusal(f"engine='{self.name}'")
        if closed or not method:
            return closed
        return (
            f"engine='{self.name}' cannot train with {method}, which reads the outputs of the "
            "learner's modules in one client's step (taps, local_loss, local_output), but stacked "
            f"clients take each step together. Use engine='{AUTO}', '{CONCURRENT}' or "
            f"'{SEQUENTIAL}'."
        )

    def build(self, request: BuildRequest) -> tuple[Engine, EnginePlan]:
        copies = request.copies
        context = request.context
        with tried_apart(context):
            if reason := fast_package().why_not_stacked(copies):
                beside = request.one_by_one is None and not ENGINES[CONCURRENT].supports(context)
                instead = CONCURRENT if beside and is_proven(copies) else SEQUENTIAL
        if reason:
            request.note(
                f"engine='{self.name}' cannot train {request.learner} ({reason}); "
                f"engine='{instead}' does"
            )
            why = f"it cannot be stacked: {reason}"
            plan = replace(request.plan, engine=instead, why=why)
            return ENGINES[instead].build(replace(request, plan=plan, asked=False))
        asked = context.clients_at_once
        at_once = request.plan.at_once if asked == AUTO else int(asked)
        # A client takes about eight vectors of D numbers.
        gigabyte = max(1, 2**30 // (8 * context.w.nbytes))
        number = min(at_once or gigabyte, context.most_at_once)
        plan = replace(request.plan, at_once=number, threads=torch.get_num_threads())
        made: Engine = fast_package().Stacked(
            copies.on_learner(), copies.optimizer, number, request.note
        )
        return made, plan


ENGINES: dict[str, EngineBuilder] = {
    kind.name: kind
    for kind in (SequentialBuilder(), ConcurrentBuilder(), StackedBuilder(), DebugBuilder())
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


def is_proven(copies: LearnerCopies) -> bool:
    """Tell whether steps on two copies show that clients may train in parallel, for ``auto``."""
    try:
        return compare_two_copies(copies) is None
    except Exception:  # no step can be tried yet; round 0 will report where it fails
        return False
