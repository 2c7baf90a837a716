"""FedGloSS: sharpness-aware minimization of the global loss, with a perturbation by the server.

D. Caldarola, P. Cagnasso, B. Caputo, M. Ciccone: Beyond Local Sharpness: Communication-Efficient
Global Sharpness-aware Minimization for Federated Learning (CVPR 2025), arXiv:2412.03752: with
``DynamicRegularization`` and ``SharpnessAwareMinimization``. The last round's update stands for the
global gradient, so nothing more is sent.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.callback import (
    Clients,
    Coefficient,
    FederatedCallback,
    Paper,
    Schedule,
    Server,
    ServerState,
    Upload,
    ordered_norm,
)


class ServerAscent(FederatedCallback):
    """Clients get w̃ = w - ρ ū/‖ū‖ as w; ū is Σ p_i (x_{i,K} - w̃) of the round before.

    w̃ = w in the first round, and if ū = 0. Updates are measured from w̃ and applied to w, and the
    run evaluates w. Duals and pulls of other methods (FedDyn) are relative to w̃.
    Sent: w̃ in place of w; nothing more up. Kept: ū by the server.

    Args:
        radius: ρ, from 0; 0 is FedAvg.

    Example:
        with radius 0 it is FedAvg, to the last bit.

        >>> from fl_lightning.callbacks import ServerAscent
        >>> from fl_lightning.testing import tiny_run
        >>> fedavg = tiny_run().global_vector
        >>> tiny_run(ServerAscent(radius=0.0)).global_vector.equal(fedavg)
        True
    """

    title = "server ascent"
    paper = Paper("caldarola2025fedgloss")
    neutral = {"radius": 0.0}
    cannot_run_with = {"parts": "its perturbation would move coordinates that are not averaged"}
    radius = Coefficient(least=0)
    last = ServerState(synchronised=False)  # ū
    moved = Upload(sent="derived from x")

    def __init__(self, radius: float | Schedule = 0.1) -> None:
        super().__init__()
        self.radius = radius

    def broadcast(self, server: Server) -> Tensor:
        scale = (self.radius / ordered_norm(self.last)).nan_to_num(posinf=0.0)
        ascended: Tensor = server.w - scale.to(server.w.dtype) * self.last
        return ascended

    def on_local_end(self, clients: Clients) -> None:
        self.moved[clients] = clients.x - clients.w

    def on_server_update(self, server: Server) -> None:
        self.last = self.moved.weighted()
