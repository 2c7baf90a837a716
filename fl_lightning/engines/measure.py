"""Timing a few real steps of real clients in copies of the learner, which leaves no trace."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torchmetrics import Metric, MetricCollection

from fl_lightning.client_optimizer import ClientOptimizer
from fl_lightning.engines.local import RandomState, local_steps
from fl_lightning.engines.replica import Convert, Replica, buffer_values
from fl_lightning.methods import Methods

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

Copy = tuple[Replica, ClientOptimizer]
MEASURED_SECONDS = 0.03  # of each kind, each time; three times


def channels_last(convert: Convert | None) -> Convert:
    """With images (four dimensions, floating point) in channels-last memory, which some convolutions prefer."""

    def change(leaf: Any) -> Any:
        image = isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.is_floating_point()
        return leaf.contiguous(memory_format=torch.channels_last) if image else leaf

    def converted(learner: Any, batch: Any) -> Any:
        return tree_map(change, batch if convert is None else convert(learner, batch))

    return converted


def makespan(lengths: Iterable[float], workers: int) -> float:
    """How long the busiest of the workers is busy, longest first."""
    busy = [0.0] * workers
    for length in sorted(lengths, reverse=True):
        heapq.heappush(busy, heapq.heappop(busy) + length)
    return max(busy)


def draws(module: FederatedModule, replica: Replica, optimizer: ClientOptimizer) -> str:
    """Why clients cannot train side by side: what one step draws from the process's random generators, or changes.

    Empty where nothing does; the generators are left as they were.
    """
    before = RandomState(replica.x)
    client = module.participants(0)[0]
    try:
        batches = list(module.data.client_batches(client, 0, 1, device=replica.x.device))
        if before.moved():
            return "its data set draws random numbers when a batch is read"
        prepare(module, replica, optimizer)
        attributes = Attributes(replica.learner)
        with torch.no_grad():
            local_steps(replica, None, iter(batches), optimizer, Methods([]), None)  # type: ignore[arg-type]
        if before.moved():
            return "its training_step draws random numbers (dropout, say)"
        changed = attributes.changed()
        return f"its training_step changes {changed}, which goes on from client to client" if changed else ""
    finally:
        before.restore()
        replica.reset()


class Attributes:
    """What a learner's modules hold besides parameters, buffers and, unless ``metrics``, states of metrics."""

    SKIPPED = ("_parameters", "_buffers", "_trainer", "training")
    ITEMS = 100  # of longer containers the length alone is compared

    def __init__(self, learner: nn.Module, metrics: bool = False) -> None:
        self.learner, self.metrics = learner, metrics
        self._kept: list[Any] = []  # so that no other object gets the id of one of them
        self.before = self._now()

    def changed(self) -> str:
        """The name of the first attribute that is no longer what it was, or an empty string."""
        now = self._now()
        names = [*self.before, *(name for name in now if name not in self.before)]
        return next((n for n in names if (self.before.get(n, ""),) != (now.get(n, ""),)), "")

    def _now(self) -> dict[str, Any]:
        return {
            f"{prefix}.{name}" if prefix else name: self._state(value, 3)
            for prefix, module in self.learner.named_modules()
            if self.metrics or not isinstance(module, (Metric, MetricCollection))
            for name, value in vars(module).items()
            if name not in self.SKIPPED
        }

    def _state(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return value
        self._kept.append(value)
        if isinstance(value, Tensor):
            return id(value), 0 if value.is_inference() else value._version
        if isinstance(value, np.ndarray):
            return id(value), value.tobytes()
        if isinstance(value, (list, tuple, dict, set, frozenset, deque)):
            items = value.values() if isinstance(value, dict) else value
            short = depth > 0 and len(value) <= self.ITEMS and not isinstance(value, (set, frozenset))
            return len(value), [self._state(item, depth - 1) for item in items] if short else None
        own = type(value).__module__.split(".")[0] not in ("torch", "pytorch_lightning", "lightning", "torchmetrics")
        if depth > 0 and own and not callable(value) and hasattr(value, "__dict__"):  # an average meter, say
            return id(value), [(name, self._state(item, depth - 1)) for name, item in vars(value).items()]
        return id(value)


def prepare(module: FederatedModule, replica: Replica, optimizer: ClientOptimizer) -> None:
    replica.follow(module.learner)
    replica.x.copy_(module.global_vector.detach())
    replica.load_buffers(buffer_values(module.learner))
    optimizer.begin(1.0, None)


def step_seconds(module: FederatedModule, copies: list[Copy], worth: float) -> dict[str, float] | None:
    """Seconds of a local step: one client ``alone`` on all intra-op threads, or ``beside`` as many others as copies.

    Both also with channels-last images where the learner has convolutions. None where a step takes less than ``worth``.
    """
    ids = module.participants(0)
    plain = [replica.convert for replica, _ in copies]
    formats: dict[str, list[Convert | None]] = {"": plain}
    if any(isinstance(part, nn.Conv2d) for part in module.learner.modules()):
        formats[", channels last"] = [channels_last(convert) for convert in plain]
    found: dict[str, list[float]] = {}
    with ThreadPoolExecutor(len(copies), initializer=torch.set_num_threads, initargs=(1,)) as pool:

        def some(j: int, steps: int) -> None:
            with torch.no_grad():
                batches = module.data.client_batches(ids[j % len(ids)], 0, steps, device=copies[j][0].x.device)
                local_steps(copies[j][0], None, batches, copies[j][1], Methods([]), None)  # type: ignore[arg-type]

        def alone(steps: int) -> float:
            return timed(lambda: some(0, steps)) / steps

        def beside(steps: int) -> float:
            return timed(lambda: list(pool.map(some, range(len(copies)), [steps] * len(copies)))) / steps

        def use(name: str) -> None:
            for (replica, _), convert in zip(copies, formats[name], strict=True):
                replica.convert = convert

        for replica, optimizer in copies:
            prepare(module, replica, optimizer)
        try:
            alone(1)
            first = alone(1)
            if first < worth:
                return None
            steps = max(1, min(50, int(MEASURED_SECONDS / first)))
            for repeat in range(4 if steps > 1 else 3):  # the first is a warm-up
                for name in list(formats):
                    use(name)
                    try:
                        both = alone(steps if repeat else 1), beside(steps if repeat else 1)
                    except RuntimeError:
                        if not name:
                            raise
                        del formats[name]  # a learner that asks for a view of contiguous memory
                        continue
                    if repeat:
                        found.setdefault("alone" + name, []).append(both[0])
                        found.setdefault("beside" + name, []).append(both[1])
        finally:
            for (replica, _), convert in zip(copies, plain, strict=True):
                replica.convert = convert
                replica.reset()
    return {name: min(values) for name, values in found.items()}


def timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
