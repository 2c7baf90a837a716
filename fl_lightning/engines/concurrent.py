"""Several clients side by side in one process on a CPU: worker threads, each with its own copy of the learner.

A client is trained on one intra-op thread whatever the number of workers, and the sum over clients does not depend on
who finished when: same bits for any number of workers, and as the sequential engine on one thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from fl_lightning.client_optimizer import ClientOptimizer
from fl_lightning.engines.capture import NOT_CAPTURED, Capture
from fl_lightning.engines.local import RandomState, Work, full_gradient, train_client
from fl_lightning.engines.replica import Replica
from fl_lightning.engines.sequential import Collect
from fl_lightning.rounds import Clients, Round

WORTH = 20  # steps of a worker in a round, before a recording has saved what it costs
WAITING_BYTES = 2**28  # so much may wait in the sum, so that the largest clients can go first


class Concurrent:
    """A thread for each of ``copies``; the learner itself stays at the global model.

    Args:
        work: with ``draws=False``: the process has one random generator of each kind, which threads would race for.
        learner: whose attributes, changed by its hooks between rounds, the copies follow.
        copies: replicas that :meth:`Replica.another` made, with their optimizers.
        warn: told when something drew random numbers all the same.
        capture: whether local steps are recorded and replayed; ``shared``: those of one client for others too.
    """

    def __init__(
        self,
        work: Work,
        learner: Any,
        copies: list[tuple[Replica, ClientOptimizer]],
        warn: Callable[[str], None],
        capture: bool = False,
        shared: bool = True,
    ) -> None:
        self.work, self.learner, self.copies, self._warn = work, learner, copies, warn
        self._captures = [
            Capture(lambda why: warn(NOT_CAPTURED + why), shared=shared) if capture else None for _ in copies
        ]
        self._free = deque(zip(copies, self._captures, strict=True))
        self._here = threading.local()
        self.pool = ThreadPoolExecutor(len(copies), "client", initializer=torch.set_num_threads, initargs=(1,))

    def run(
        self,
        round: Round,
        leaves: list[tuple[int, int]],
        factor: float,
        buffers: dict[str, Tensor],
        rest: Tensor,
        collect: Collect,
        tell: Callable[[], None],
    ) -> None:
        round.full_gradient = self._full_gradient
        for replica, _ in self.copies:
            replica.follow(self.learner)
        if len(leaves) * rest.nbytes <= WAITING_BYTES:
            leaves = sorted(leaves, key=lambda leaf: -round.steps[leaf[1]])
        for capture in self._captures:
            if capture is not None:
                capture.forget()
        worth = sum(round.steps[client] for _, client in leaves) >= WORTH * len(self.copies)
        before = RandomState()
        stop = threading.Event()

        def train(leaf: int, client: int) -> None:
            copy, capture = self._free.popleft()
            self._here.replica = copy[0]
            try:
                with torch.no_grad():
                    captured = capture if worth else None
                    clients = train_client(self.work, *copy, round, client, factor, buffers, stop, captured)
                    collect(leaf, clients, copy[1], copy[0])
            finally:
                self._free.append((copy, capture))

        jobs = {self.pool.submit(train, leaf, client) for leaf, client in leaves}
        waiting = set(jobs)
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for job in done:
                    job.result()
                    tell()
        except BaseException:
            stop.set()  # threads end at their next step
            self.close()
            raise
        finally:
            for replica, _ in self.copies:
                replica.reset()
        if before.moved():
            self._warn(
                "something drew from a global random generator during a round of engine='concurrent', where the order "
                "of draws is left to chance, so the run cannot be repeated exactly; engine='sequential' can"
            )

    def _full_gradient(self, clients: Clients, at: Tensor) -> Tensor:
        return full_gradient(self.work, self._here.replica, clients, at)

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown(cancel_futures=True)
