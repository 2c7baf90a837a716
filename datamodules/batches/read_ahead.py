"""Reading batches ahead in worker processes, in order; their number changes no bit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
import torch.multiprocessing
from numpy.typing import NDArray
from torch._utils import ExceptionWrapper
from torch.utils.data import _utils, default_collate

from fl_lightning.datamodules.batches.own_generators import generators_of, seed_all
from fl_lightning.errors import UserError

# seed of the random numbers that are drawn while reading, and positions
Request = tuple[int, NDArray[np.int64]]


@dataclass(frozen=True)
class Reading:
    """How a dataset is read: it takes positions and returns a batch.

    ``fetch``: what ``dataset[…]`` takes and returns. ``"sample"``: a sample by position;
    ``"list"``: the input of ``collate`` by a list of positions; ``"batch"``: the same by one
    position, so that the split divides batches.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    fetch: Literal["sample", "list", "batch"] = "sample"

    def __call__(self, index: NDArray[np.int64]) -> Any:
        positions = index.tolist()
        if self.fetch == "sample":
            return self._batch([self.dataset[i] for i in positions])
        return self.collate(self.dataset[positions if self.fetch == "list" else positions[0]])

    def _batch(self, samples: list[Any]) -> Any:
        """Return the samples as a batch.

        Raises:
            UserError: torch's ``default_collate`` cannot stack these samples.
        """
        try:
            return self.collate(samples)
        except (TypeError, RuntimeError) as error:
            if self.collate is not default_collate:
                raise
            raise UserError(
                f"The data's samples cannot be stacked into a batch: "
                f"{str(error)[:200]}. Give the data set a transform that makes a tensor of the "
                "same shape of each sample (for images such as ImageFolder(folder, "
                "transform=torchvision.transforms.ToTensor())), or the data module "
                "collate=…, a function that makes a batch of a list of samples."
            ) from error


@dataclass(frozen=True)
class Workers:
    """Settings as in torch's DataLoader; with ``number=0`` the process itself reads."""

    number: int = 0
    ahead: int = 2  # batches, for each worker
    init: Callable[[int], None] | None = None
    context: Any = None
    timeout: float = 0


class AheadReader:
    """Read batches in ``workers.number`` processes, which all current readers share.

    torch's DataLoader serves one reader at a time and starts processes for each, so parallel
    clients would each have their own. Processes start when they are first needed and run until
    :meth:`close`.

    Random draws from torch, NumPy or Python in these processes follow the request's seed, so they
    do not depend on which process reads.
    """

    def __init__(self, read: Reading, workers: Workers) -> None:
        self.read = read
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None
        self._lock = threading.Lock()
        self._readers = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"read": self.read, "workers": self.workers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Processes and locks cannot be copied, so start new ones.
        AheadReader.__init__(self, **state)

    def batches(self, requests: Iterable[Request]) -> Iterator[Any]:
        """Yield the batches asked for, in this order."""
        pool = self._begin()
        waiting = deque[Future[Any]]()
        rest = iter(requests)
        try:
            while True:
                # All present readers share the limit of batches read ahead, so that memory stays
                # bounded.
                share = max(1, self.workers.ahead * self.workers.number // self._readers)
                room = max(0, share - len(waiting))
                waiting.extend(pool.submit(_answer, request) for request in islice(rest, room))
                if not waiting:
                    return
                batch = waiting.popleft().result(self.workers.timeout or None)
                if isinstance(batch, ExceptionWrapper):
                    batch.reraise()
                yield batch
        except BrokenProcessPool as error:
            self.close()
            raise RuntimeError(
                f"one of {self.workers.number} processes that read ahead has ended, perhaps "
                "killed for want of memory: try a smaller num_workers"
            ) from error
        finally:
            with self._lock:
                self._readers -= 1
            for future in waiting:
                future.cancel()

    def _begin(self) -> ProcessPoolExecutor:
        with self._lock:
            self._readers += 1
            if self._pool is None:
                context = self.workers.context or torch.multiprocessing.get_context()
                if isinstance(context, str):
                    context = torch.multiprocessing.get_context(context)
                started = (self.read, self.workers.init, self.workers.number, context.Value("i", 0))
                self._pool = ProcessPoolExecutor(self.workers.number, context, _start, started)
            return self._pool

    def close(self, wait: bool = True) -> None:
        """End the processes; the next :meth:`batches` starts others."""
        with self._lock:
            pool = self._pool
            self._pool = None
        if pool is not None:
            pool.shutdown(wait=wait, cancel_futures=True)


# In a worker process: how it reads, and the generators that reading draws from (None until searched
# for).
_read: Reading | None = None
_own: list[tuple[str, Any]] | None = None


def _start(read: Reading, init: Callable[[int], None] | None, number: int, count: Any) -> None:
    """Begin a worker process; it computes on one thread, as torch's workers do."""
    global _read
    _read = read
    # The run handles a Ctrl-C in the terminal, and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)
    with count.get_lock():
        own = count.value
        count.value = count.value + 1
    info: Any = _utils.worker.WorkerInfo(id=own, num_workers=number, seed=0, dataset=read.dataset)
    # `torch.utils.data.get_worker_info()` returns this to a dataset.
    _utils.worker._worker_info = info
    if init is not None:
        init(own)


def _end_with(parent: int) -> None:
    """End with the parent process, so that a killed run leaves no worker behind."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _answer(request: Request) -> Any:
    global _own
    seed, positions = request
    assert _read is not None
    # Send the error as text: the run's process cannot rebuild every exception.
    try:
        if _own is None:
            # A collate function may create its generator at its first call, so search after it.
            batch = _seeded(_read, seed, positions)
            _own = generators_of(_read.dataset, _read.collate)
            if not _own:
                return batch
        seed_all(_own, seed)
        return _seeded(_read, seed, positions)
    except Exception:
        return ExceptionWrapper(where="in a worker process that reads ahead")


def _seeded(read: Reading, seed: int, positions: NDArray[np.int64]) -> Any:
    """Return a batch; draws from the process's generators follow the seed."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    return read(positions)


def own_generator(dataset: Any) -> str:
    """Return the place of the dataset's own random generator; empty if it has none."""
    # Each worker process would have a copy of the generator, and all would draw the same numbers.
    return next((where for where, _ in generators_of(dataset)), "")


def check_workers(number: Any, dataset: Any) -> None:
    """Refuse datasets whose random numbers would depend on the number of processes that read.

    Raises:
        UserError: a setting is refused; the error names it and says what to do instead.
    """
    if number and (where := own_generator(dataset)):
        raise UserError(
            f"num_workers is {number}, but the dataset keeps a random generator of its own "
            f"({where}): each process would have a copy, and the samples would depend on how many "
            "there are. Give num_workers=0, or draw from torch's, NumPy's or Python's global "
            "generator, which is seeded for each batch."
        )
