"""The divergence: how far clients' models are from the server's.

Y. Sun, L. Shen, D. Tao: Understanding How Consistency Works in Federated Learning via Stage-wise
Relaxed Initialization (NeurIPS 2023), arXiv:2306.05706, Δ^t, over all clients. Y. Sun, L. Shen, S.
Chen, L. Ding, D. Tao: Dynamic Regularized Sharpness Aware Minimization in Federated Learning (ICML
2023), arXiv:2305.11584, Table 2, over the participants.
"""

from __future__ import annotations

from typing import Any

import torch

from fl_lightning.callback import (
    Clients,
    ClientState,
    FederatedCallback,
    Server,
    ServerState,
    Upload,
    ordered_sum,
)

# Above these, models of all clients are kept only if they are asked for.
MOST_CLIENTS = 1000
MOST_PARAMETERS = 10**6


class DivergenceLogger(FederatedCallback):
    """Logs ``divergence/participants``, ``divergence/all`` and ``divergence/update``; w⁺ = w^{t+1}.

    - participants: the mean over S_t of ‖x_{i,K} - w⁺‖² (FedSMOO).
    - all: (1/m) Σ_i ‖last_i - w⁺‖², where last_i is the client's latest x_{i,K}, or w^0 before its
      first (FedInit). It is computed from running sums, so a round reads only the rows of its
      participants.
    - update: ‖w⁺ - w‖².

    If a method evaluates another model than w^{t+1} (partial averaging, FedExP), the first two use
    that model as w⁺. Averages of Lightning's ``WeightAveraging`` play no part in any of the three.
    Over sites the clients' displacements are sent to the server for this logger. If parts of the
    model stay at the sites, divergence/all is not logged, and divergence/participants is not logged
    in a round after which parts stay there.
    Sent: nothing that counts as communication. Kept: last_i by each client and two sums by the
    server, for ``divergence/all``.

    Args:
        all_clients: whether to log ``divergence/all``. It costs a vector of D numbers per client on
            disk, which a method that keeps the same vector (FedInit) shares. None: with up to 1,000
            clients and a million parameters. ``fl-lightning fit`` adds this logger with False.

    Example:
        If all clients take part, the participants are all clients.

        >>> from fl_lightning.callbacks import DivergenceLogger
        >>> from fl_lightning.testing import tiny_run
        >>> logged = tiny_run(DivergenceLogger(), participation="all").trainer.callback_metrics
        >>> logged["divergence/participants"].allclose(logged["divergence/all"])
        True
    """

    role = "measurement"
    moved = Upload(sent=False, dtype=torch.float64)
    moved_squared = Upload(sent=False, shape=(), dtype=torch.float64, least=0)

    def __init__(self, all_clients: bool | None = None) -> None:
        super().__init__()
        self.all_clients = all_clients
        if all_clients is not False:
            self._keep_models()

    def _keep_models(self) -> None:
        self.declare("last", ClientState(initial="initial_model", synchronised=False))
        self.declare("change", Upload(sent=False, dtype=torch.float64))
        self.declare("change_squared", Upload(sent=False, shape=(), dtype=torch.float64, least=0))
        self.declare("sum", ServerState(synchronised=False, dtype=torch.float64))
        self.declare("sum_squared", ServerState(synchronised=False, shape=(), dtype=torch.float64))

    def _every_client(self, subject: Clients | Server) -> bool:
        if self.all_clients is not None:
            return self.all_clients
        return subject.num_clients <= MOST_CLIENTS and subject.layout.size <= MOST_PARAMETERS

    def on_local_end(self, clients: Clients) -> None:
        # Distances to w⁺, which is not known yet, follow at the server from sums of displacements
        # and of their squares. The two terms almost cancel if clients agree, so they are summed in
        # float64.
        moved = clients.x.double() - clients.current_w.double()
        self.moved[clients] = moved
        self.moved_squared[clients] = (moved**2).sum(1)
        if self._every_client(clients):
            # Relative to w^0 the sums start at 0, without reading all m clients.
            w0 = clients.initial_model
            old = self.last[clients].double() - w0.double()
            new = clients.x.double() - w0.double()
            self.change[clients] = new - old
            self.change_squared[clients] = (new**2).sum(1) - (old**2).sum(1)
            self.last[clients] = clients.x

    def on_server_update(self, server: Server) -> None:
        if self._every_client(server):
            self.sum += self.change.sum()
            self.sum_squared += self.change_squared.sum()

    def on_round_end(self, server: Server) -> None:
        server.log("divergence/update", ordered_sum((server.w - server.w_before).double() ** 2))
        # At sites, parts that are not averaged stay there, so the server does not have all of w⁺.
        transaction: Any = self._transaction
        stays = transaction.rows_elsewhere and transaction.round.parts is not None
        if stays and server.averaged is not None and not bool(server.averaged.all()):
            return
        step = server.evaluated.double() - server.given.double()
        mean = self.moved.mean()
        squared = self.moved_squared.mean()
        participants = squared - ordered_sum(2 * mean * step - step**2)
        # The distance of a single participant is only the rounding error of its terms.
        if participants < 100 * torch.finfo(torch.float64).eps * squared:
            participants = torch.zeros_like(participants)
        server.log("divergence/participants", participants)
        if self._every_client(server) and not stays:
            away = server.evaluated.double() - server.initial_model.double()
            total = self.sum_squared - 2 * ordered_sum(self.sum * away)
            mean = total / server.num_clients + ordered_sum(away**2)
            server.log("divergence/all", mean.clamp(min=0))
