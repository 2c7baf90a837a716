"""FedACG, FedNSAM: clients train from the point to which the server's momentum would lead.

G. Kim, J. Kim, B. Han: Communication-Efficient Federated Learning with Accelerated Client Gradient
(CVPR 2024), arXiv:2201.03172: with ``ProximalTerm``. J. Liu, F. Shang, Y. Tian, H. Liu, Y. Liu:
FedNSAM: Consistency of Local and Global Flatness for Federated Learning (2026), arXiv:2602.23827:
with ``SharpnessAwareMinimization``.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import (
    Clients,
    Coefficient,
    FederatedCallback,
    Paper,
    Refusal,
    Schedule,
    Server,
    ServerState,
    Upload,
)


class LookaheadMomentum(FederatedCallback):
    """Clients get ŵ = w + λ m in place of w. Then d ← d + λ m and m ← λ m + Σ p_i (x_{i,K} - ŵ).

    With server rate 1 and no other method w^{t+1} = w^t + m^{t+1}. The run evaluates w. A pull of
    another method (FedProx) is towards ŵ. m = 0 in the first round.
    Sent: ŵ in place of w; nothing more up. Kept: m by the server.

    Args:
        momentum: λ, from 0 to below 1; 0 is FedAvg.

    Example:
        w moves by m.

        >>> from fl_lightning.callbacks import LookaheadMomentum
        >>> from fl_lightning.testing import tiny_run
        >>> one, two = (tiny_run(LookaheadMomentum(), rounds=t) for t in (1, 2))
        >>> m = two.server_states["LookaheadMomentum.m"]
        >>> (two.global_vector - one.global_vector).allclose(m)
        True
    """

    title = "lookahead momentum"
    paper = Paper("kim2024fedacg", beside={"SharpnessAwareMinimization": "liu2026fednsam"})
    neutral = {"momentum": 0.0}
    cannot_run_with = {"parts": "its momentum would move coordinates that are not averaged"}
    notes = (
        Refusal(
            "its momentum is the server's, whose optimizer has to be SGD without momentum and "
            "weight decay, at any rate; given is {server}. Set model.server_optimizer=null.",
            when=lambda method, run: bool(run.server),
        ),
    )
    momentum = Coefficient(least=0, below=1)
    m = ServerState(synchronised=False)
    moved = Upload(sent="derived from x")

    def __init__(self, momentum: float | Schedule = 0.85) -> None:
        super().__init__()
        self.momentum = momentum

    def broadcast(self, server: Server) -> Tensor:
        ahead: Tensor = server.w + self.momentum * self.m
        return ahead

    def on_local_end(self, clients: Clients) -> None:
        self.moved[clients] = clients.x - clients.w

    def on_server_update(self, server: Server) -> None:
        ahead = self.momentum * self.m
        server.update += ahead
        self.m = ahead + self.moved.weighted()
