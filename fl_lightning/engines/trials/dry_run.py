"""Real steps of real clients on copies of the learner, before round 0."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fl_lightning.aggregation.metric_states import MetricStates
from fl_lightning.client.client_trainer import ClientTrainer
from fl_lightning.engines.engine import intra_op_threads
from fl_lightning.engines.engine_context import EngineContext, LearnerCopies
from fl_lightning.learner.buffers import buffer_values
from fl_lightning.machine.random_state import random_state_kept

# Each step is timed this many times, and the shortest time counts: other work can only add to a
# time.
TIMED = 3


class DryRun:
    """Trains clients in the j-th copy of the learner for trials; the run does not change.

    ``draws``: the process's random generators are seeded for each client, as in a round.
    """

    def __init__(
        self,
        copies: LearnerCopies,
        j: int = 0,
        step_runner: Any = None,
        draws: bool = False,
    ) -> None:
        self.copies = copies
        self.context = copies.context
        self.copy, optimizer = copies.for_trials(j + 1)[j]
        stream = None if step_runner is None else step_runner.stream
        work = replace(copies.trial_work, draws=draws)
        self.worker = ClientTrainer(work, self.copy, optimizer, step_runner, stream)
        # Trials find out which frozen parameters the steps write.
        self.worker.checks_frozen = False
        self.buffers = buffer_values(self.context.learner, copies.as_buffers)
        self.metrics: list[MetricStates] = []  # of the learner, after each call of `run`
        self.logged: dict[str, Tensor] = {}  # what the latest call of `run` logged, by name
        self.wrote = ""  # an object of the run that the steps wrote, through the Trainer

    def run(self, client: int, steps: int) -> list[Tensor]:
        """Take ``steps`` steps of a client from the server's model.

        Returns:
            The client's model, its buffers and its logs, in a fixed order.
        """
        with torch.no_grad(), self.worker, self.copy.present.lending() as lent:
            round = self.context.round({client: steps}, self.buffers)
            try:
                clients = self.worker.train(round, client)
            finally:
                self.wrote = self.wrote or lent.reached
            if isinstance(clients.metrics, MetricStates):
                self.metrics.append(clients.metrics)
            self.logged = dict(clients.logs)
            logs = [value for _, value in sorted(clients.logs.items())]
            buffers = [buffer.clone() for buffer in clients.buffers.values()]
            return [self.copy.x.clone(), *buffers, *logs]


def step_seconds(copies: LearnerCopies) -> float:
    """Return the processor seconds of a local step on one thread, measured once, after earlier
    steps; other work on the machine hardly changes them.
    """
    if copies.step_seconds is None:
        client = copies.context.cohort.tried(0)[0]
        trial = DryRun(copies)
        seconds = []
        with intra_op_threads(1):
            for _ in range(TIMED):
                before = time.thread_time()
                trial.run(client, 1)
                seconds.append(time.thread_time() - before)
        copies.step_seconds = min(seconds)
    return copies.step_seconds


def measure_step(copies: LearnerCopies) -> bool:
    """Take two local steps on a GPU, so that torch's statistics have the peak of their memory.

    The second step has the optimizer's state, which the first one makes.

    Returns:
        Whether the steps could be taken.
    """
    context = copies.context
    client = context.largest()
    # Copies and what holds them refer to each other, so only a collection frees their memory.
    copies.forget_trials()
    gc.collect()
    torch.cuda.reset_peak_memory_stats(context.w.device)
    try:
        with tried_apart(context):
            DryRun(copies).run(client, min(context.cohort.steps_tried(client), 2))
    except Exception:  # if it is not only that memory does not suffice, round 0 meets it again
        return False
    finally:
        copies.forget_trials()
        gc.collect()
    return True


@contextmanager
def tried_apart(context: EngineContext) -> Iterator[None]:
    """Within this context steps may be tried; generators, and the attributes of callbacks that are
    called with each batch, are restored afterwards.
    """
    before = [dict(vars(callback)) for callback in context.looking]
    with random_state_kept(context.w):
        try:
            yield
        finally:
            for callback, attributes in zip(context.looking, before, strict=True):
                vars(callback).clear()
                vars(callback).update(attributes)
