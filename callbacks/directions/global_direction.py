"""The global term of FedAdamW and FedLADA: local steps also follow the last round's mean direction.

J. Liu, F. Shang, H. Liu, Y. Tian, Y. Liu, J. Liu, K. Zhu, Z. Lin: FedAdamW (AAAI 2026),
arXiv:2510.27486 (``mode="add"``). Y. Sun, L. Shen, H. Sun, L. Ding, D. Tao: Efficient Federated
Learning via Local Adaptive Amended Optimizer with Linear Speedup (IEEE TPAMI 2023),
arXiv:2308.00522 (``mode="mix"``). FedMuon and FedPAC use ``mode="mix"``, too, together with
``MuonDirection``.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fl_lightning.callback import (
    MEAN_GRADIENT,
    Clients,
    Coefficient,
    FederatedCallback,
    Paper,
    Schedule,
    Server,
    ServerState,
    UnitInterval,
    Upload,
    check,
)


class GlobalDirection(FederatedCallback):
    """direction ← direction + α Δ, or (1 - α) direction + α Δ; Δ ← mean (x_0 - x_K)/(η K_i).

    The addition to the direction follows clipping, and follows AdamDirection or MuonDirection if
    one of them computes that direction. Over plain SGD without clipping, ``"mix"`` with α is FedCM
    with 1 - α. Δ contains weight decay, because displacement does. Δ = 0 in the first round.
    Sent: Δ down; nothing more up, unless clients start from a point other than w. Kept: Δ by the
    server.

    Args:
        alpha: α; 0 is FedAvg. With ``"mix"`` it is at most 1.
        mode: ``"add"`` (FedAdamW) or ``"mix"`` (FedLADA, FedMuon).

    Example:
        On top of plain SGD ``"mix"`` is FedCM.

        >>> from fl_lightning.callbacks import ClientMomentum, GlobalDirection
        >>> from fl_lightning.testing import tiny_run
        >>> ours = tiny_run(GlobalDirection(alpha=0.75, mode="mix")).global_vector
        >>> ours.allclose(tiny_run(ClientMomentum(alpha=0.25)).global_vector)
        True
    """

    notes = (MEAN_GRADIENT,)
    title = "global direction"
    paper = Paper(
        by=lambda given: ["liu2026fedadamw" if given.get("mode", "add") == "add" else None],
        vectors=2,
    )
    neutral = {"alpha": 0.0}
    alpha = Coefficient(least=0)
    delta = ServerState(sent=True, synchronised=True)
    velocity = Upload(sent="derived")

    def __init__(self, alpha: float | Schedule = 0.5, mode: Literal["add", "mix"] = "add") -> None:
        super().__init__()
        if mode == "mix":
            # With alpha above 1 a step would go up its own direction.
            check("GlobalDirection: alpha", alpha, UnitInterval | Schedule)
        self.alpha = alpha
        self.mode = mode

    def on_round_start(self, server: Server) -> None:
        # A schedule may leave the bounds in any round.
        if self.mode == "mix":
            check(f"GlobalDirection: in round {server.round}, alpha", self.alpha, UnitInterval)

    def on_direction(self, clients: Clients, direction: Tensor) -> None:
        if self.mode == "mix":
            direction.mul_(1 - self.alpha)
        direction.add_(self.delta, alpha=self.alpha)

    def on_local_end(self, clients: Clients) -> None:
        self.velocity[clients] = clients.mean_gradient

    def on_server_update(self, server: Server) -> None:
        self.delta = self.velocity.mean()
