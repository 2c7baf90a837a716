"""The engines by name: what each can train, how it is planned, and what it builds.

A new engine is a name in `round/settings.py` (a constant and an entry of ``EngineName``), a class
here, and its entry in ``ENGINES``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fl_lightning.engines.debug import Debug
from fl_lightning.engines.door import fast_ways, refusal, why_closed
from fl_lightning.engines.dry_run import measure_step, tried_apart
from fl_lightning.engines.engine import Engine
from fl_lightning.engines.engine_plan import EnginePlan
from fl_lightning.engines.forked import Forked, why_not_forked
from fl_lightning.engines.proof import Reason, compare_two_copies
from fl_lightning.engines.sequential import Sequential
from fl_lightning.engines.situation import LearnerCopies, Situation
from fl_lightning.engines.threads import Threads
from fl_lightning.engines.worker import Worker
from fl_lightning.errors import UserError
from fl_lightning.round.settings import AUTO, CONCURRENT, DEBUG, SEQUENTIAL, STACKED

NOT_CAPTURED = "local steps are not captured, and run one by one: "
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Draft:
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
    note: Tell
    uncaptured: Tell

    @property
    def situation(self) -> Situation:
        return self.copies.situation

    @property
    def learner(self) -> str:
        """The name of the learner's class."""
        return type(self.situation.learner).__name__

    def with_workers(self) -> EnginePlan:
        """The plan with its number of workers: as asked for or planned, or as many as fit."""
        situation = self.situation
        wanted = self.plan.workers if situation.workers == AUTO else int(situation.workers)
        if not wanted:
            on_cpu = situation.w.device.type == "cpu"
            wanted = situation.most_beside if on_cpu or measure_step(self.copies) else 1
        number = min(wanted, situation.most_at_once)
        return replace(self.plan, workers=number, threads=1)


class EngineKind(ABC):
    """A way of training a round's clients.

    ``name`` is what users give as ``engine``; ``planned_as`` is the name in plans and checkpoints.
    """

    name: str
    planned_as: str

    def supports(self, situation: Situation) -> str | None:
        """Why it cannot train this run, as the error for a user who asks for it; None: it can.

        No step has been tried yet.
        """
        return None

    @abstractmethod
    def build(self, draft: Draft) -> tuple[Engine, EnginePlan]:
        """The engine, or another one if the trial steps show that this one cannot train; its plan.

        Raises:
            UserError: the user asked for this engine, and the trial steps show that it cannot.
        """


class SequentialKind(EngineKind):
    """Clients one after another."""

    name = SEQUENTIAL
    planned_as = SEQUENTIAL
    engine: type[Sequential] = Sequential

    def build(self, draft: Draft) -> tuple[Engine, EnginePlan]:
        found = draft.one_by_one
        if found is not None and found.keeps:
            draft.note(kept_outside(draft.learner, found.text, draft.situation.world_size))
        if found is not None and found.note:
            draft.note(found.note)
        if draft.situation.capture is True:
            draft.note(
                f"{NOT_CAPTURED}engine='{self.planned_as}' trains, and only "
                f"engine='{CONCURRENT}' captures"
            )
        return self.engine(draft.copies.on_learner(), draft.plan.threads), draft.plan


class DebugKind(SequentialKind):
    """Clients one after another, watched; the bits are those of ``sequential``."""

    name = DEBUG
    engine = Debug


class ConcurrentKind(EngineKind):
    """Several clients side by side: on threads, in forked processes, or on streams of a GPU."""

    name = CONCURRENT
    planned_as = CONCURRENT

    def supports(self, situation: Situation) -> str | None:
        device = situation.w.device.type
        if device not in ("cpu", "cuda"):
            return (
                f"engine='{self.name}' on {device}: it trains clients on threads of a CPU or "
                f"streams of a CUDA GPU. Use engine='{SEQUENTIAL}', or trainer.accelerator=cpu."
            )
        return refusal(f"engine='{self.name}' on a GPU") if device == "cuda" else None

    def build(self, draft: Draft) -> tuple[Engine, EnginePlan]:
        draws = draft.one_by_one is not None and draft.one_by_one.draws
        not_forked = why_not_forked(draft.situation) if draws or draft.plan.processes else ""
        if draft.asked:
            if draws and not not_forked:
                draft = replace(draft, plan=replace(draft.plan, processes=True))
            else:
                self._ask(draft, not_forked)
        if not draft.plan.processes:
            return self._in_this_process(draft)
        plan = draft.with_workers()
        worker = draft.copies.on_learner()
        if not_forked:
            draft.note(
                f"clients train one after the other, because {not_forked}. The results are the "
                "same, bit for bit"
            )
            return Sequential(worker, plan.threads), plan
        return Forked(worker, plan.workers, draft.note), plan

    def _ask(self, draft: Draft, not_forked: str) -> None:
        """Refuse what the trial steps show, and note what they cannot show."""
        found = draft.one_by_one
        if found is not None:
            also = f", and {not_forked}" if not_forked else ""
            way_out = ", or keep such state in a buffer" if found.keeps else ""
            raise UserError(
                f"engine='{self.name}' cannot train {draft.learner}: {found.text}{also}. Parallel "
                "clients share the process's random generators and use several copies of the "
                "learner, so results would depend on which copy trained which client. Use "
                f"engine='{SEQUENTIAL}' (or '{AUTO}'){way_out}."
            )
        draft.note(
            f"you asked for engine='{self.name}', so only first steps of {draft.learner} were "
            f"tried. Unlike engine='{AUTO}', that does not prove that each copy of the learner "
            "trains a client to the same bits. If the learner keeps state outside its buffers "
            "(its own generator, a counter), results depend on chance"
        )

    def _in_this_process(self, draft: Draft) -> tuple[Engine, EnginePlan]:
        situation = draft.situation
        device = situation.w.device
        closed = why_closed()
        reason = closed or draft.plan.not_captured
        if not reason and not draft.plan.captured:
            with tried_apart(situation):
                reason = fast_ways().why_not_captured(draft.copies)
        if reason and situation.capture is True:
            draft.note(NOT_CAPTURED + reason)
        plan = replace(draft.with_workers(), captured=not reason, not_captured=reason)
        work = replace(situation.work, draws=False)
        alike = not work.methods.in_steps_of_others()
        workers = []
        for copy, optimizer in draft.copies.make(plan.workers):
            stream = None if closed else fast_ways().own_stream(copy.x)
            recorder = None
            if plan.captured:
                recorder = fast_ways().Capture(draft.uncaptured, stream, alike)
            workers.append(Worker(work, copy, optimizer, recorder, stream))
        if device.type == "cpu":
            return Threads(workers, situation.learner, draft.note), plan
        streams: Engine = fast_ways().Streams(workers, situation.learner)
        return streams, plan


class StackedKind(EngineKind):
    """Many clients as one batch of models. Another engine trains what cannot be stacked."""

    name = STACKED
    planned_as = STACKED

    def supports(self, situation: Situation) -> str | None:
        method = situation.work.methods.look
        closed = refusal(f"engine='{self.name}'")
        if closed or not method:
            return closed
        return (
            f"engine='{self.name}' cannot train with {method}, which reads the outputs of the "
            "learner's modules in one client's step (taps, local_loss, local_output), but stacked "
            f"clients take each step together. Use engine='{AUTO}', '{CONCURRENT}' or "
            f"'{SEQUENTIAL}'."
        )

    def build(self, draft: Draft) -> tuple[Engine, EnginePlan]:
        copies = draft.copies
        situation = draft.situation
        with tried_apart(situation):
            if reason := fast_ways().why_not_stacked(copies):
                beside = draft.one_by_one is None and not ENGINES[CONCURRENT].supports(situation)
                instead = CONCURRENT if beside and is_proven(copies) else SEQUENTIAL
        if reason:
            draft.note(
                f"engine='{self.name}' cannot train {draft.learner} ({reason}); "
                f"engine='{instead}' does"
            )
            why = f"it cannot be stacked: {reason}"
            plan = replace(draft.plan, engine=instead, why=why)
            return ENGINES[instead].build(replace(draft, plan=plan, asked=False))
        asked = situation.clients_at_once
        at_once = draft.plan.at_once if asked == AUTO else int(asked)
        # A client takes about eight vectors of D numbers.
        gigabyte = max(1, 2**30 // (8 * situation.w.nbytes))
        number = min(at_once or gigabyte, situation.most_at_once)
        plan = replace(draft.plan, at_once=number, threads=torch.get_num_threads())
        made: Engine = fast_ways().Stacked(
            copies.on_learner(), copies.optimizer, number, draft.note
        )
        return made, plan


ENGINES: dict[str, EngineKind] = {
    kind.name: kind for kind in (SequentialKind(), ConcurrentKind(), StackedKind(), DebugKind())
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
