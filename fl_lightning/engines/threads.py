"""``concurrent`` on a CPU: several clients in parallel in one process, with one thread per worker.

A client is trained on one intra-op thread whatever the number of workers, and the sum over clients
does not depend on the order in which they finish. So any number of workers gives the same bits, and
so does the sequential engine on one thread.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import torch

from fl_lightning.client.client_trainer import ClientTrainer, Stopped
from fl_lightning.engines.engine import Collect
from fl_lightning.learner.modules import check_gradient_hooks
from fl_lightning.machine.random_state import RandomState
from fl_lightning.round.context import Round

# From this number of steps per worker and round on, a recording saves more than it costs.
WORTH = 20
# Most memory of results that wait for their turn in the sum. Waiting lets the largest clients start
# first.
WAITING_BYTES = 2**28
# Longest time that :meth:`Threads.close` waits for the system to end the threads.
ENDING_SECONDS = 10


class Threads:
    """One thread for each worker; the learner itself stays at the global model.

    Args:
        workers: workers with ``draws=False``, because the process has one random generator of each
            kind, and threads would draw from it in random order.
        learner: the original; the workers' copies follow changes by its hooks between rounds.
        warn: called with a text if random numbers were drawn nevertheless.
    """

    def __init__(
        self, workers: list[ClientTrainer], learner: Any, warn: Callable[[str], None]
    ) -> None:
        self.workers = workers
        self.learner = learner
        self._warn = warn
        self._free = deque(workers)
        self._thread_ids: list[int] = []  # as the system counts them
        # A thread that had a method of this object would keep it, and its workers, for ever if the
        # run ends with an exception and `close` is not called.
        self.pool = ThreadPoolExecutor(
            len(workers), "client", initializer=_begin, initargs=(self._thread_ids,)
        )

    def train(
        self,
        round: Round,
        leaves: list[tuple[int, int]],
        collect: Collect,
        client_done: Callable[[], None],
    ) -> None:
        try:
            check_gradient_hooks(self.learner)
            for worker in self.workers:
                worker.copy.follow(self.learner)
                worker.forget()
        except BaseException:
            self.close()
            raise
        leaves = largest_first(round, leaves)
        replay = sum(round.steps[client] for _, client in leaves) >= WORTH * len(self.workers)
        before = RandomState()
        failure = FirstFailure()

        def train(leaf: int, client: int) -> None:
            if failure.is_before(leaf):
                return
            worker = self._free.popleft()
            try:
                with torch.no_grad():
                    collect(
                        leaf,
                        worker.train(round, client, lambda: failure.is_before(leaf), replay),
                    )
            except Stopped:
                pass
            except Exception as error:
                failure.add(leaf, error)
            finally:
                self._free.append(worker)

        waiting = {self.pool.submit(train, leaf, client) for leaf, client in leaves}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for job in done:
                    job.result()
                    if failure.error is None:
                        client_done()
            failure.raise_it()
        except BaseException:
            # Threads end at their next step; the error is raised when all have ended.
            failure.stop_all()
            self.close()
            raise
        finally:
            for worker in self.workers:
                worker.copy.reset()
        if before.drawn_since():
            self._warn(
                "something drew from a global random generator during a round of "
                "engine='concurrent', where the order of draws is left to chance, so the run "
                "cannot be repeated exactly; engine='sequential' can"
            )

    def close(self) -> None:
        """End the threads, and wait until the system has ended them.

        Python 3.11 reports a thread as ended a moment earlier. In that moment MKL frees the
        thread's memory and holds a lock. A process that is forked then inherits the lock, but not
        the thread that would release it. So its first matrix product never ends.
        """
        self.pool.shutdown(cancel_futures=True)
        deadline = time.monotonic() + ENDING_SECONDS
        # If the system does not list threads, this waits for none.
        listed = [f"/proc/self/task/{thread_id}" for thread_id in self._thread_ids]
        while any(map(os.path.exists, listed)) and time.monotonic() < deadline:
            time.sleep(0.0005)
        self._thread_ids.clear()


class FirstFailure:
    """The error of the first client, in the cohort's order, that failed in a round.

    Clients before it go on, because one of them may fail, too. Clients after it stop. So the error
    does not depend on which client failed first.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self._leaf = math.inf
        self._lock = threading.Lock()

    def add(self, leaf: int, error: Exception) -> None:
        with self._lock:
            if leaf < self._leaf:
                self._leaf = leaf
                self.error = error

    def is_before(self, leaf: int) -> bool:
        return self._leaf < leaf

    def stop_all(self) -> None:
        self._leaf = -math.inf

    def raise_it(self) -> None:
        """Raise the error, if there is one, and drop it: its traceback holds the workers."""
        error = self.error
        self.error = None
        try:
            if error is not None:
                raise error
        finally:
            del error


def _begin(thread_ids: list[int]) -> None:
    torch.set_num_threads(1)
    thread_ids.append(threading.get_native_id())


def largest_first(round: Round, leaves: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the leaves by number of steps, if updates that wait for their turn fit into memory."""
    if len(leaves) * round.w.nbytes > WAITING_BYTES:
        return leaves
    return sorted(leaves, key=lambda leaf: -round.steps[leaf[1]])
