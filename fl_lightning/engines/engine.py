"""The interface of an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.context import Round

# Takes the client's position in the sum, and the client as a group of one.
Collect = Callable[[int, ClientGroup], None]


class Engine(Protocol):
    """Trains a round's clients, in any order and any threads.

    When ``train`` returns, the learner is the round's evaluated model again, with its buffers. An
    exception of a client ends the round: the caller gets it when no thread works any more.
    """

    def train(
        self,
        round: Round,
        leaves: list[tuple[int, int]],
        collect: Collect,
        client_done: Callable[[], None],
    ) -> None:
        """Train the clients of ``leaves`` (position in the sum, client), each from the round's
        model and buffers.

        Args:
            collect: takes each trained client, as a group of one after ``on_local_end``, with its
                ``buffers``, and with ``metrics`` and ``optimizer_rows`` if it has any. It is called
                in any thread, before the client's memory is reused. Stacked clients are handed over
                one by one.
            client_done: called in the caller's thread after each client.
        """

    def close(self) -> None:
        """Release all resources, because the run is over or a round failed; may be called again."""


@contextmanager
def intra_op_threads(number: int) -> Iterator[None]:
    """Within this context PyTorch's kernels use that many threads."""
    usual = torch.get_num_threads()
    # Setting the number of threads costs time, even if it does not change.
    if number != usual:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number != usual:
            torch.set_num_threads(usual)
