"""Several clients side by side on a GPU: each on a stream of its own, its local step one CUDA graph.

One after the other the clients are set going, each in a copy of the learner, and then collected; on the device they
overlap. Each runs the kernels that it would run alone, so that results do not depend on how many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.client_optimizer import ClientOptimizer
from fl_lightning.engines.capture import NOT_CAPTURED, Capture
from fl_lightning.engines.local import Work, full_gradient, train_client
from fl_lightning.engines.replica import Replica
from fl_lightning.engines.sequential import Collect
from fl_lightning.rounds import Clients, Round

WORTH = 8  # steps of a client, before capturing one has saved what it costs


@dataclass
class Slot:
    """A copy of the learner and where it computes."""

    replica: Replica
    optimizer: ClientOptimizer
    capture: Capture | None
    stream: torch.cuda.Stream | None

    def __enter__(self) -> None:
        """What the caller's stream has been given comes first."""
        self._context: AbstractContextManager[Any] = nullcontext()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
            self._context = torch.cuda.stream(self.stream)
        self._context.__enter__()

    def __exit__(self, *failure: Any) -> None:
        self._context.__exit__(*failure)


def own_stream(x: Tensor) -> torch.cuda.Stream | None:
    """A stream on the GPU where x lies; None on a CPU."""
    return torch.cuda.Stream(x.device) if x.is_cuda else None  # type: ignore[no-untyped-call]


class Streams:
    """A stream for each of ``copies``; the learner itself stays at the global model.

    Args:
        work: with ``draws=False``: numbers drawn on several streams would depend on how these are interleaved.
        learner: whose attributes, changed by its hooks between rounds, the copies follow.
        copies: replicas that :meth:`Replica.another` made, with their optimizers.
        warn: told when a local step cannot be captured.
        capture: whether local steps become CUDA graphs; ``shared`` concerns recordings on a CPU alone.
    """

    def __init__(
        self,
        work: Work,
        learner: Any,
        copies: list[tuple[Replica, ClientOptimizer]],
        warn: Callable[[str], None],
        capture: bool,
        shared: bool = True,
    ) -> None:
        self.work, self.learner = work, learner
        self.slots = []
        for replica, optimizer in copies:
            stream = own_stream(replica.x)
            recorder = Capture(lambda why: warn(NOT_CAPTURED + why), stream, shared) if capture else None
            self.slots.append(Slot(replica, optimizer, recorder, stream))

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
        free, busy = deque(self.slots), deque[tuple[Slot, int, Clients]]()

        def finish() -> None:
            slot, leaf, clients = busy.popleft()
            if slot.stream is not None:
                torch.cuda.current_stream().wait_stream(slot.stream)
            round.full_gradient = lambda clients, at: full_gradient(self.work, slot.replica, clients, at)
            collect(leaf, clients, slot.optimizer, slot.replica)
            free.append(slot)
            tell()

        for slot in self.slots:
            slot.replica.follow(self.learner)
            if slot.capture is not None:
                slot.capture.forget()
        try:
            for leaf, client in leaves:
                if not free:
                    finish()
                slot = free.popleft()
                capture = slot.capture if round.steps[client] >= WORTH else None
                round.full_gradient = lambda clients, at: full_gradient(self.work, slot.replica, clients, at)  # noqa: B023
                with slot:
                    clients = train_client(
                        self.work, slot.replica, slot.optimizer, round, client, factor, buffers, capture=capture
                    )
                busy.append((slot, leaf, clients))
            while busy:
                finish()
        finally:
            if rest.is_cuda:
                torch.cuda.synchronize(rest.device)  # after a failure other clients may still be under way
            for slot in self.slots:
                slot.replica.reset()

    def close(self) -> None:
        """Give the graphs' memory back, all at once: those of one stream share a workspace."""
        for slot in self.slots:
            if slot.capture is not None:
                slot.capture.forget()
