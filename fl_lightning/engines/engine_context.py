"""What is to be trained and where, and the copies of the learner that do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from fl_lightning.callback_list import CallbackList
from fl_lightning.client import batch_callbacks
from fl_lightning.client.client_optimizer import ClientOptimizer, can_be_fused, unheld
from fl_lightning.client.client_trainer import ClientTrainer
from fl_lightning.client.flat_learner import Convert, FlatLearner
from fl_lightning.client.forward_pass import conversion, forward_context
from fl_lightning.client.local_step import LocalTraining
from fl_lightning.client.run_optimizers import RunOptimizers
from fl_lightning.engines.engine_plan import EnginePlan
from fl_lightning.learner.buffers import BufferPolicy
from fl_lightning.learner.layout import Layout, check_trainable
from fl_lightning.learner.modules import gradient_hook, keeps_frozen
from fl_lightning.machine.lightning import is_foreign
from fl_lightning.round.client_schedule import ClientSchedule, ShownScheduler
from fl_lightning.round.cohort import Cohort
from fl_lightning.round.context import ClientRates, Round
from fl_lightning.round.global_model import GlobalModel
from fl_lightning.round.settings import DEBUG, SEQUENTIAL, Settings

STREAMS = 16  # largest number of streams on a GPU; PyTorch has a pool of 32


@dataclass(frozen=True)
class EngineContext:
    """What a run's engine depends on.

    Args:
        engine, workers, capture, clients_at_once: as the user gave them.
        w: the server's model ``(D,)``.
        optimizer: of the clients, over the learner's parameters.
        rank, world_size: this process's number, and how many processes the run has.
        broadcast: gives rank 0's value in every process.
        forward_context: around each forward pass.
        convert: ``(learner, batch) -> batch``; None: as it is.
        policy: what becomes of buffers.
        hooks_first: whether hooks that run later, at the start of training or of a round, may
            prepare the learner.
        schedule: the learner's lr scheduler, where it is stepped.
        keeps_loss: whether a callback asks for the mean loss of local steps.
        looking: callbacks that are called with each batch, and may change it.
        rounds: how many the run has; -1: no end.
        skips_nonfinite: whether clients whose model is not finite are left out, and the run goes
            on.
        usable_cores: how many cores this process has for itself.
    """

    engine: str
    workers: int | float | str
    capture: bool | str
    clients_at_once: int | float | str
    learner: Any
    layout: Layout
    w: Tensor
    optimizer: Optimizer
    work: LocalTraining
    cohort: Cohort
    rank: int
    world_size: int
    broadcast: Callable[[Any], Any]
    forward_context: Callable[[], AbstractContextManager[Any]]
    convert: Convert | None
    policy: BufferPolicy
    hooks_first: bool = False
    schedule: ClientSchedule | None = None
    keeps_loss: bool = False
    looking: tuple[Any, ...] = ()
    rounds: int = -1
    skips_nonfinite: bool = False
    usable_cores: int = 1

    @property
    def most_at_once(self) -> int:
        """The most clients that one process trains in a round."""
        return -(-self.cohort.most // self.world_size)

    @property
    def most_beside(self) -> int:
        """The most clients side by side: the process's cores; on a GPU as many as fit."""
        device = self.w.device
        if device.type == "cpu":
            return self.usable_cores
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        # The peak of these steps, with their copy of the learner and their optimizer's state.
        one = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        # They had no methods: add their rows and uploads, and four vectors of a client's round.
        declared = self.work.methods.declared.values()
        one += sum(each.bytes(self.w) for each in declared if not each.at_server)
        return max(1, min(STREAMS, int(0.8 * free) // max(1, one + 4 * self.w.nbytes)))

    @property
    def fuses(self) -> bool:
        """Whether clients step by the fused kernel of Adam or AdamW."""
        # Fused optimizer kernels exist for CPUs and CUDA GPUs.
        has_kernel = self.w.device.type in ("cpu", "cuda")
        return has_kernel and can_be_fused(self.optimizer, self.learner)

    @property
    def prefers_channels_last(self) -> bool:
        """Whether a module of the learner says ``prefers_channels_last = True``.

        Then its images lie in channels-last memory in local steps.
        """
        parts = self.learner.modules()
        return any(getattr(part, "prefers_channels_last", False) is True for part in parts)

    def held_once(self, copied: Any) -> str:
        """What copies do not have, so that clients train one after another; empty: nothing.

        ``copied``: a copy of the learner, on which steps were tried, or the learner itself.
        """
        if hooked := gradient_hook(self.learner) or gradient_hook(copied):
            return f"its {hooked} has a hook on its gradient, which copies do not have"
        if not self.looking:
            return ""
        name = type(self.looking[0]).__name__
        return f"the callback {name} is called with each client's batch, and there is one for all"

    @property
    def in_order(self) -> bool:
        """Whether the user asked for clients that train one after another."""
        return self.workers == 1 or self.engine in (SEQUENTIAL, DEBUG)

    def lengths(self) -> list[int]:
        """K_i of the clients that one process trains in round 0."""
        return [self.cohort.steps(i) for i in self.cohort.tried(0)[:: self.world_size]]

    def largest(self) -> int:
        """The client of round 0 with the most batches."""
        return max(self.cohort.tried(0), key=self.cohort.data.batches_per_epoch)

    def round(self, steps: Mapping[int, int], buffers: Mapping[str, Tensor]) -> Round:
        """A round 0 for trials: these clients, each with its number of steps, and no state."""
        w = self.w.detach()
        group = self.optimizer.param_groups[0]
        return Round(
            t=0,
            ids=sorted(steps),
            steps=dict(steps),
            sizes={i: 1 for i in steps},
            weights={i: 1.0 for i in steps},
            num_clients=self.cohort.m,
            w=w,
            w0=w,
            evaluated=w,
            buffers=buffers,
            layout=self.layout,
            rates=ClientRates(
                1.0, torch.tensor(float(group["lr"]), dtype=torch.float64, device=w.device)
            ),
            read=lambda key, client: None,
            server_states={},
        )


def engine_context_of(
    trainer: Any,
    settings: Settings,
    model: GlobalModel,
    optimizers: RunOptimizers,
    work: LocalTraining,
    cohort: Cohort,
) -> EngineContext:
    """What the engine of a Trainer's run depends on."""
    check_trainable(model.learner, model.layout)
    return EngineContext(
        engine=settings.engine,
        workers=settings.workers,
        capture=settings.capture,
        clients_at_once=settings.clients_at_once,
        learner=model.learner,
        layout=model.layout,
        w=model.w,
        optimizer=optimizers.clients,
        schedule=optimizers.schedule,
        work=work,
        cohort=cohort,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        broadcast=trainer.strategy.broadcast,
        forward_context=forward_context(trainer, model.w.device),
        convert=conversion(trainer, model.learner, trainer.datamodule),
        policy=BufferPolicy(model.learner, settings.buffers),
        looking=tuple(batch_callbacks.looking(trainer)),
        hooks_first=any(map(begins_rounds, [model.learner, *trainer.callbacks])),
        rounds=-1 if trainer.max_epochs is None else trainer.max_epochs,
        skips_nonfinite=settings.on_nonfinite == "skip",
    )


def begins_rounds(hooked: Any) -> bool:
    """Tell whether a user's learner or callback acts at the start of training or of a round."""
    hooks = ("on_train_start", "on_train_epoch_start")
    return any(is_foreign(getattr(hooked, hook, None)) for hook in hooks)


class LearnerCopies:
    """Makes copies of a run's learner, each with an optimizer, for trials and for workers."""

    def __init__(self, context: EngineContext) -> None:
        self.context = context
        w = context.w
        x = torch.empty(1, context.layout.size, dtype=w.dtype, device=w.device)
        self.original = FlatLearner(
            context.learner, context.layout, x, context.forward_context, context.convert
        )
        self.original.keeps_loss = context.keeps_loss
        self.original.unheld = unheld(context.optimizer, context.learner)
        self.trial_work = replace(
            context.work,
            methods=CallbackList([]),
            clip_norm=None,
            keep_optimizer_state=False,
            draws=False,
        )
        self.as_buffers: tuple[str, ...] = ()
        self.fused = False
        self.step_seconds: float | None = None  # once it was measured
        self._tried: list[tuple[FlatLearner, ClientOptimizer]] = []

    def optimizer(self, x: Tensor, gradient: Tensor) -> ClientOptimizer:
        """The clients' optimizer for models ``x`` ``(n, D)``."""
        context = self.context
        fused = self.fused and context.fuses
        return ClientOptimizer(
            context.optimizer, context.learner, x, gradient, context.layout, fused
        )

    def optimizer_of(self, copy: FlatLearner) -> ClientOptimizer:
        """The optimizer of one copy, which its learner may look at."""
        context = self.context
        made = self.optimizer(copy.x, copy.g)
        copy.optimizer = made.show(context.optimizer, context.learner, copy.learner)
        if context.schedule is not None:
            copy.scheduler = ShownScheduler(context.schedule, copy.optimizer)
        return made

    def on_learner(self) -> ClientTrainer:
        """The worker that trains in the learner itself."""
        return ClientTrainer(self.context.work, self.original, self.optimizer_of(self.original))

    def make(self, number: int) -> Iterator[tuple[FlatLearner, ClientOptimizer]]:
        """So many new copies of the learner, with their optimizers; those of trials are let go."""
        self.forget_trials()
        for _ in range(number):
            copy = self.original.another()
            yield copy, self.optimizer_of(copy)

    def for_trials(self, number: int) -> list[tuple[FlatLearner, ClientOptimizer]]:
        """So many copies, always the same; the first shares no tensor with the learner.

        Of a learner that says ``frozen_stay`` it shares the frozen parameters.
        """
        while len(self._tried) < number:
            # A step that writes frozen parameters would write the learner's own.
            copy = self.original.another(bool(self._tried) or keeps_frozen(self.original.learner))
            copy.present.silent = True
            self._tried.append((copy, self.optimizer_of(copy)))
        return self._tried[:number]

    def forget_trials(self) -> None:
        """Let go of the copies for trials; the next one gets new ones."""
        self._tried.clear()

    def treat_as_buffers(self, names: tuple[str, ...]) -> None:
        """Frozen parameters that the learner's steps write are buffers from here on."""
        self.as_buffers = names
        for copy in (self.original, *(copy for copy, _ in self._tried)):
            copy.treat_as_buffers(names)

    def prepare(self, plan: EnginePlan) -> None:
        """Lay images out, and step, as the plan says: bits depend on both."""
        self.fused = plan.fused
        if plan.channels_last:
            self.original.convert = channels_last(self.original.convert)


def channels_last(convert: Convert | None) -> Convert:
    """Convert a batch, and put images (four dimensions, floating point) into channels-last."""

    def change(leaf: Any) -> Any:
        image = isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.is_floating_point()
        return leaf.contiguous(memory_format=torch.channels_last) if image else leaf

    def converted(learner: Any, batch: Any) -> Any:
        return tree_map(change, batch if convert is None else convert(learner, batch))

    return converted
