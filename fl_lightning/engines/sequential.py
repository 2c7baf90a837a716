"""One client after the other, eager, with all intra-op threads: any learner works."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fl_lightning.client_optimizer import ClientOptimizer
from fl_lightning.engines.local import Work, full_gradient, random_state_kept, train_client
from fl_lightning.engines.replica import Replica
from fl_lightning.rounds import Clients, Round

Finish = Callable[[int, Clients, ClientOptimizer, Replica], None]


class Sequential:
    """Trains in the learner itself, tied to one client's vector during a round."""

    def __init__(self, work: Work, replica: Replica, optimizer: ClientOptimizer) -> None:
        self.work, self.replica, self.optimizer = work, replica, optimizer

    def run(
        self, round: Round, leaves: list[tuple[int, int]], factor: float, buffers: dict[str, Tensor], rest: Tensor,
        finish: Finish,
    ) -> None:
        """Train the clients of ``leaves`` (position in the sum, client), telling ``finish`` of each."""
        round.full_gradient = lambda clients, at: full_gradient(self.work, self.replica, clients, at)
        with self.replica.tied(rest), random_state_kept():
            for leaf, client in leaves:
                clients = train_client(
                    self.work, self.replica, self.optimizer, round, client, factor, buffers
                )
                finish(leaf, clients, self.optimizer, self.replica)
            self.replica.load_buffers(buffers)
