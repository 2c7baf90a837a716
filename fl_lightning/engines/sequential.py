"""One client after the other, eager, any learner works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from fl_lightning.client_optimizer import ClientOptimizer
from fl_lightning.engines.local import Work, full_gradient, random_state_kept, train_client
from fl_lightning.engines.replica import Replica
from fl_lightning.rounds import Clients, Round

Collect = Callable[[int, Clients, ClientOptimizer, Replica], None]


class Engine(Protocol):
    """Who trains a round's clients."""

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
        """Train the clients of ``leaves`` (position in the sum, client), from the server's model and ``buffers``.

        Args:
            factor: of the learning rates, this round.
            rest: ``(D,)``: where the learner's parameters belong between rounds.
            collect: takes what a client brings home, in the thread that trained it.
            tell: called in the caller's thread after each client.
        """

    def close(self) -> None:
        """The run is over."""


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Within, PyTorch's kernels use that many threads."""
    before = torch.get_num_threads()
    if number != before:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number != before:
            torch.set_num_threads(before)


class Sequential:
    """Trains in the learner itself, tied to one client's vector during a round, on ``threads`` intra-op threads."""

    def __init__(self, work: Work, replica: Replica, optimizer: ClientOptimizer, threads: int) -> None:
        self.work, self.replica, self.optimizer, self.threads = work, replica, optimizer, threads

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
        round.full_gradient = lambda clients, at: full_gradient(self.work, self.replica, clients, at)
        with intra_op_threads(self.threads), self.replica.tied(rest), random_state_kept(rest):
            for leaf, client in leaves:
                clients = train_client(self.work, self.replica, self.optimizer, round, client, factor, buffers)
                collect(leaf, clients, self.optimizer, self.replica)
                tell()
            self.replica.load_buffers(buffers)

    def close(self) -> None:
        """Nothing to give back."""
