"""What is to be trained, where, and the workers for it; shared by trials and the engine that is built after them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pytorch_lightning.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from fl_lightning.engines.client_optimizer import ClientOptimizer
from fl_lightning.engines.learner_copy import Convert, LearnerCopy
from fl_lightning.engines.local_step import Work
from fl_lightning.engines.worker import Worker
from fl_lightning.learner import Layout, check_trainable
from fl_lightning.methods import Methods
from fl_lightning.round.client_schedule import ClientSchedule, ShownScheduler
from fl_lightning.round.cohort import Cohort
from fl_lightning.round.context import ClientRates, Round
from fl_lightning.round.global_model import GlobalModel
from fl_lightning.settings import Settings

STREAMS = 16  # on a GPU; PyTorch hands out 32


@dataclass(frozen=True)
class Setting:
    """A run, as far as its engine depends on it.

    Args:
        engine, workers, capture, clients_at_once: as they were asked for.
        w: the server's model ``(D,)``.
        optimizer: of the clients, over the learner's parameters.
        rank, world_size, processes_here: this process's, of the run, and of the run on this machine.
        broadcast: gives rank 0's value in every process.
        forward_context: around each forward pass.
        convert: ``(learner, batch) -> batch``; None: as it is.
        schedule: the learner's lr scheduler, where it is stepped.
        keeps_loss: whether a callback asks for the mean loss of local steps.
    """

    engine: str
    workers: int | str
    capture: bool | str
    clients_at_once: int | str
    learner: Any
    layout: Layout
    w: Tensor
    optimizer: Optimizer
    work: Work
    cohort: Cohort
    participants: Callable[[int], tuple[int, ...]]
    rank: int
    world_size: int
    processes_here: int
    broadcast: Callable[[Any], Any]
    forward_context: Callable[[], AbstractContextManager[Any]]
    convert: Convert | None
    schedule: ClientSchedule | None = None
    keeps_loss: bool = False

    @property
    def usable_cores(self) -> int:
        """Cores of this process, which shares the machine's with the run's other processes there."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, cores // self.processes_here)

    @property
    def most_at_once(self) -> int:
        """The most clients that one process trains in a round."""
        return -(-self.cohort.most // self.world_size)

    @property
    def most_beside(self) -> int:
        """Clients side by side: the process's cores; on a GPU as many as fit into its memory, up to ``STREAMS``."""
        device = self.w.device
        if device.type == "cpu":
            return self.usable_cores
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        one = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)  # of the steps tried
        return max(1, min(STREAMS, int(0.8 * free) // max(1, one + 4 * self.w.nbytes)))

    @property
    def convolutions(self) -> bool:
        return any(isinstance(part, nn.Conv2d) for part in self.learner.modules())

    def lengths(self) -> list[int]:
        """K_i of the clients that one process trains in round 0."""
        return [self.cohort.steps(i) for i in self.participants(0)[:: self.world_size]]

    def largest(self) -> int:
        """The client of round 0 with the most batches."""
        return max(self.participants(0), key=self.cohort.data.batches_per_epoch)

    def round(self, steps: Mapping[int, int], buffers: Mapping[str, Tensor]) -> Round:
        """A round 0 for trials: clients with numbers of steps of their own, and no state."""
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
            rates=ClientRates(1.0, torch.tensor(float(group["lr"]), dtype=torch.float64, device=w.device)),
            read=lambda key, client: None,
            server_states={},
        )


def setting_of(
    trainer: Any,
    settings: Settings,
    model: GlobalModel,
    optimizer: Optimizer,
    schedule: ClientSchedule | None,
    work: Work,
    cohort: Cohort,
    participants: Callable[[int], tuple[int, ...]],
    transfers: Sequence[str],
) -> Setting:
    """The setting of a run on a Trainer; ``transfers``: the learner's own hooks on its batches."""
    check_trainable(model.learner, model.layout)
    mixed = trainer.precision == "bf16-mixed"
    return Setting(
        engine=settings.engine,
        workers=settings.workers if isinstance(settings.workers, str) else int(settings.workers),
        capture=settings.capture,
        clients_at_once=(
            settings.clients_at_once if isinstance(settings.clients_at_once, str) else int(settings.clients_at_once)
        ),
        learner=model.learner,
        layout=model.layout,
        w=model.w,
        optimizer=optimizer,
        schedule=schedule,
        work=work,
        cohort=cohort,
        participants=participants,
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        processes_here=int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or int(trainer.num_devices),
        broadcast=trainer.strategy.broadcast,
        forward_context=partial(in_bfloat16, model.w.device.type) if mixed else torch.enable_grad,
        convert=conversion(trainer.precision_plugin, trainer.strategy.root_device, transfers),
    )


def in_bfloat16(device: str) -> AbstractContextManager[Any]:
    """Gradients on and autocast, around the learner alone."""
    stack = ExitStack()
    stack.enter_context(torch.enable_grad())
    stack.enter_context(torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False))
    return stack


def conversion(precision: Any, device: torch.device, transfers: Sequence[str]) -> Convert | None:
    """How a client's batch becomes what the learner gets: its own transfer hooks, the Trainer's precision."""
    if not transfers and type(precision).convert_input is Precision.convert_input:
        return None

    def convert(learner: Any, batch: Any) -> Any:
        for hook in transfers:
            extra = (device, 0) if hook == "transfer_batch_to_device" else (0,)
            batch = getattr(learner, hook)(batch, *extra)
        return precision.convert_input(batch)

    return convert


class Workshop:
    """Makes workers for a setting, each once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        x = torch.empty(1, setting.layout.size, dtype=setting.w.dtype, device=setting.w.device)
        self.original = LearnerCopy(setting.learner, setting.layout, x, setting.forward_context, setting.convert)
        self.original.keeps_loss = setting.keeps_loss
        self.trial_work = replace(
            setting.work, methods=Methods([]), clip_norm=None, keep_optimizer_state=False, draws=False
        )
        self._copies: list[tuple[LearnerCopy, ClientOptimizer]] = []

    def optimizer(self, x: Tensor, gradient: Tensor) -> ClientOptimizer:
        """The clients' optimizer for models ``x`` ``(n, D)``."""
        return ClientOptimizer(self.setting.optimizer, self.setting.learner, x, gradient, self.setting.layout)

    def optimizer_of(self, copy: LearnerCopy) -> ClientOptimizer:
        """That of one copy, which its learner may look at."""
        setting, made = self.setting, self.optimizer(copy.x, copy.g)
        copy.optimizer = made.show(setting.optimizer, setting.learner, copy.learner)
        copy.scheduler = None if setting.schedule is None else ShownScheduler(setting.schedule, copy.optimizer)
        return made

    def on_learner(self) -> Worker:
        """The worker that trains in the learner itself."""
        return Worker(self.setting.work, self.original, self.optimizer_of(self.original))

    def copies(self, number: int) -> list[tuple[LearnerCopy, ClientOptimizer]]:
        """So many copies of the learner, with their optimizers."""
        while len(self._copies) < number:
            copy = self.original.another()
            self._copies.append((copy, self.optimizer_of(copy)))
        return self._copies[:number]

    def use_channels_last(self) -> None:
        """From here on with images in channels-last memory."""
        for copy in self.everywhere():
            copy.convert = channels_last(copy.convert)

    def everywhere(self) -> Iterator[LearnerCopy]:
        yield self.original
        yield from (copy for copy, _ in self._copies)


def channels_last(convert: Convert | None) -> Convert:
    """With images (four dimensions, floating point) in channels-last memory, which some convolutions prefer."""

    def change(leaf: Any) -> Any:
        image = isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.is_floating_point()
        return leaf.contiguous(memory_format=torch.channels_last) if image else leaf

    def converted(learner: Any, batch: Any) -> Any:
        return tree_map(change, batch if convert is None else convert(learner, batch))

    return converted
