"""``concurrent`` on a GPU: several clients in parallel, each on its own stream.

A client's local step is one CUDA graph.
The clients are started one after the other, each in a copy of the learner, and then collected; on
the device they overlap. Each runs the same kernels as if it ran alone, so results do not depend on
the number of clients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from fl_lightning.client.client_trainer import ClientTrainer
from fl_lightning.client.frozen_parameters import FrozenParameters
from fl_lightning.engines.engine import Collect
from fl_lightning.learner.modules import check_gradient_hooks
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.context import Round

# From this number of steps per client on, capturing saves more than it costs.
WORTH = 8


class Streams:
    """One stream for each worker; the learner itself stays at the global model.

    Args:
        workers: workers with ``draws=False``, because numbers drawn on several streams would depend
            on how the streams interleave.
        learner: the original; the workers' copies follow changes by its hooks between rounds.
    """

    def __init__(self, workers: list[ClientTrainer], learner: Any) -> None:
        self.workers = workers
        self.learner = learner

    def train(
        self,
        round: Round,
        leaves: list[tuple[int, int]],
        collect: Collect,
        client_done: Callable[[], None],
    ) -> None:
        free = deque(self.workers)
        busy = deque[tuple[ClientTrainer, int, ClientGroup]]()

        def finish() -> None:
            worker, leaf, group = busy.popleft()
            # The caller's stream reads the client's tensors, so it waits for the stream that writes
            # them.
            if worker.stream is not None:
                torch.cuda.current_stream().wait_stream(worker.stream)
            collect(leaf, group)
            free.append(worker)
            client_done()

        check_gradient_hooks(self.learner)
        for worker in self.workers:
            worker.copy.follow(self.learner)
            worker.forget()
        frozen = [FrozenParameters(worker.copy) for worker in self.workers]
        try:
            for leaf, client in leaves:
                if not free:
                    finish()
                worker = free.popleft()
                with worker:
                    group = worker.train(round, client, replay=round.steps[client] >= WORTH)
                busy.append((worker, leaf, group))
            while busy:
                finish()
            for each in frozen:
                each.check(round.t)
        finally:
            if round.w.is_cuda:
                # After a failure other clients may still be running, in memory that is reset below.
                torch.cuda.synchronize(round.w.device)
            for worker in self.workers:
                worker.copy.reset()

    def close(self) -> None:
        """Release the graphs' memory all at once: graphs of one stream share a workspace."""
        for worker in self.workers:
            worker.forget()
