"""Random numbers of local epochs, as in the experiments of FedNova.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor: Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization (NeurIPS 2020), section 5, arXiv:2007.07481: in each round
every client trains for E_i ~ U(2, 5) epochs, as computers of unequal speed would.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import FederatedCallback, Paper, PositiveInt, UserError


class RandomEpochs(FederatedCallback):
    """Client i takes E_i epochs of local steps in round t, E_i uniform on low, …, high.

    A draw follows from (seed, t, i); ``local_epochs`` and ``local_steps`` are ignored.
    Sent and kept: nothing more than by FedAvg.

    Args:
        low, high: epochs, both included.

    Example:
        two or three epochs of a client with three batches.

        >>> from fl_lightning.callbacks import RandomEpochs
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(RandomEpochs(low=2, high=3))
        >>> sorted({run.steps(t, 4) for t in range(20)})
        [6, 9]
    """

    title = "random epochs"
    paper = Paper("wang2020fednova")
    tolerates_staleness = True
    draws_by_client = True

    def __init__(self, low: PositiveInt = 2, high: PositiveInt = 5) -> None:
        super().__init__()
        if high < low:
            raise UserError(f"RandomEpochs: high={high} is below low={low}; give at least {low}.")
        self.low = low
        self.high = high

    def steps(self, t: int, ids: Tensor) -> list[int]:
        steps = []
        for client in ids.tolist():
            epochs = int(self._keyed("epochs", t, client).integers(self.low, self.high + 1))
            steps.append(self.steps_of(client, epochs))
        return steps
