"""FedSWA: the learning rate falls within each round.

J. Liu, Y. Liu, F. Shang, H. Liu, J. Liu, W. Feng: Improving Generalization in Federated Learning
with Highly Heterogeneous Data via Momentum-Based Stochastic Controlled Weight Averaging (ICML
2025), arXiv:2507.20016. The server's moving average of models is the rate of the server optimizer.
Together with ``ControlVariates(momentum=γ)`` it is FedMoSWA.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import Clients, Coefficient, FederatedCallback, Paper, Schedule


class DecayWithinRound(FederatedCallback):
    """Local step k = 0, …, K_i - 1 has the learning rate η (1 - (1 - ρ) k/K_i).

    Weight decay uses that rate, too. ``clients.elapsed`` is Σ η over these steps, and so
    ``clients.mean_gradient`` (SCAFFOLD, FedCM) counts the steps by their rates. ``clients.lr``
    stays the round's rate.
    Sent and kept: nothing more than by FedAvg. One gradient per step.

    Args:
        end: ρ, from 0, the factor that is approached at the end of a round; 1 is FedAvg.

    Raises:
        UserError: the learner's scheduler also changes the rate within a round; or a step of the
            client optimizer is not proportional to its rate.

    Example:
        with ρ = 1 it is FedAvg, to the last bit.

        >>> from fl_lightning.callbacks import DecayWithinRound
        >>> from fl_lightning.testing import tiny_run
        >>> fedavg = tiny_run().global_vector
        >>> tiny_run(DecayWithinRound(end=1.0)).global_vector.equal(fedavg)
        True
    """

    title = "FedSWA"
    paper = Paper("liu2025fedswa")
    tolerates_staleness = True
    neutral = {"end": 1.0}
    end = Coefficient(least=0)

    def __init__(self, end: float | Schedule = 0.1) -> None:
        super().__init__()
        self.end = end

    def step_rate(self, clients: Clients) -> Tensor:
        rate: Tensor = 1 - clients.step / clients.steps * (1 - self.end)
        return rate
