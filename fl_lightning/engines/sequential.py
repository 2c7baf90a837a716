"""Trains one client after the other, without recording, so any learner works."""

from __future__ import annotations

from collections.abc import Callable

from fl_lightning.client.client_trainer import ClientTrainer
from fl_lightning.engines.engine import Collect, intra_op_threads
from fl_lightning.machine.random_state import random_state_kept
from fl_lightning.round.context import Round


class Sequential:
    """Trains in the learner itself, on ``threads`` intra-op threads.

    During a round the learner is tied to one client's vector.
    """

    def __init__(self, worker: ClientTrainer, threads: int) -> None:
        self.worker = worker
        self.threads = threads

    def train(
        self,
        round: Round,
        leaves: list[tuple[int, int]],
        collect: Collect,
        client_done: Callable[[], None],
    ) -> None:
        copy = self.worker.copy
        with intra_op_threads(self.threads), copy.tied(round.evaluated), random_state_kept(copy.x):
            try:
                for leaf, client in leaves:
                    collect(leaf, self.worker.train(round, client))
                    client_done()
            finally:
                # The learner serves as the global model again, so restore the buffers that a client
                # changed.
                copy.load_buffers(round.buffers)

    def close(self) -> None:
        """Nothing to release."""
