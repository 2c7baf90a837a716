"""IFCA: several models; each client trains the one that fits its data best.

A. Ghosh, J. Chung, D. Yin, K. Ramchandran: An Efficient Framework for Clustered Federated Learning
(NeurIPS 2020), Algorithm 1 with option II (averaged models), arXiv:2006.04088. The server keeps k
models, the centres, and sends all of them; a client takes the centre with the least loss on its own
samples.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from fl_lightning.callback import (
    AtLeast,
    Clients,
    FederatedCallback,
    NonNegativeInt,
    Note,
    Paper,
    Refusal,
    Scratch,
    Server,
    ServerState,
    Upload,
)

_OF_CENTRES = "there is a model for each cluster, which are averaged by themselves"
_READS_W = "it goes by clients.w, and clients start elsewhere"


class ClusteredModels(FederatedCallback):
    """j_i = argmin_j f_i(θ_j), x_{i,0} = θ_{j_i}; then θ_j ← Σ p_i x_{i,K} / Σ p_i over j_i = j.

    f_i is the mean loss of the client's training samples, in evaluation mode. If losses are equal,
    the lowest j counts. A centre that no client took does not change. The client itself uses the
    centre with the least loss after the round, even if it never took part. All θ_j begin as w^0. In
    the first ``warmup`` rounds client i takes centre π[i] mod k, which makes the centres differ; π
    is a permutation drawn from the seed. w is Σ p_i x_{i,K} and serves only validation: it has no
    meaning. ``clusters/share_<j>`` is the share of the participants, by p_i, that took centre j.
    Sent: the k centres down, without w. Kept: the centres by the server.

    Args:
        k: number of centres, from 2.
        warmup: rounds in which a permutation assigns the centres. With 0 all clients begin in
            centre 0, and leave it only if w^0, which the other centres stay, fits their data
            better.

    Example:
        After a round with assigned centres the two models differ.

        >>> from fl_lightning.callbacks import ClusteredModels
        >>> from fl_lightning.testing import tiny_run
        >>> run = tiny_run(ClusteredModels(k=2), participation="all", rounds=1)
        >>> one, two = run.server_states["ClusteredModels.centres"]
        >>> one.equal(two)
        False
    """

    title = "IFCA"
    paper = Paper("ghosh2020ifca")
    cannot_run_with = {
        **dict.fromkeys(("transmit", "on_updates", "aggregate", "evaluated", "parts"), _OF_CENTRES),
        "moves_start": _READS_W,
        "clients.w": _READS_W,
    }
    draws_by_client = True
    notes = (
        Refusal(
            "the centres are means of models, so the server optimizer has to be plain SGD at the "
            "constant rate 1.",
            when=lambda method, run: bool(run.server) or run.server_rate != 1.0,
        ),
        Note(
            "the validated model is the mean of {k} clusters' models, which is not a useful model. "
            "Use clients/… of PerClientEvaluation, and clusters/share_<j>.",
            when=lambda method, run: True,
        ),
    )
    # θ
    centres = ServerState("current_model", sent=True, synchronised=False, shape=("k", "D"))
    which = Scratch(shape=(), dtype=torch.int64)  # j_i
    # x_{i,K} - θ_j in row j_i; the client sends it as x_{i,K}
    moved = Upload(sent=False, shape=("k", "D"))
    members = Upload(sent=False, shape=("k",), least=0)

    def __init__(self, k: Annotated[int, AtLeast(2)] = 2, warmup: NonNegativeInt = 1) -> None:
        super().__init__()
        self.k = k
        self.warmup = warmup

    def broadcast(self, server: Server) -> Tensor:
        """Return w unchanged, and count nothing: only the centres are sent."""
        server.sent(parameters=0, bytes=0)
        return server.w

    def on_local_start(self, clients: Clients) -> None:
        if clients.round < self.warmup:
            drawn = self._keyed("ifca").permutation(clients.num_clients)
            self.which[clients] = (
                torch.from_numpy(drawn).to(clients.ids.device)[clients.ids] % self.k
            )
        else:
            self.which[clients] = self.fitting(clients)
        clients.x = self.centres[self.which[clients]]

    def fitting(self, clients: Clients) -> Tensor:
        """Return the centre of least loss ``(n,)``; a loss that is not finite does not count."""
        losses = [clients.evaluate(centre)["loss"] for centre in self.centres]
        return torch.cat(losses, dim=1).nan_to_num(torch.inf).argmin(dim=1)

    def on_local_end(self, clients: Clients) -> None:
        which = self.which[clients]
        centres = torch.arange(self.k, device=which.device)
        mine = (which[:, None] == centres).to(clients.x.dtype)  # (n, k)
        self.members[clients] = mine
        self.moved[clients] = mine[:, :, None] * (clients.x - self.centres[which])[:, None]

    def on_server_update(self, server: Server) -> None:
        share = self.members.weighted()
        mean = self.moved.weighted() / share[:, None]
        self.centres = torch.where(share[:, None] > 0, self.centres + mean, self.centres)
        for j in range(self.k):
            server.log(f"clusters/share_{j}", share[j])

    def personal(self, clients: Clients) -> Tensor:
        # Also that of a client which never took part.
        own: Tensor = self.centres[self.fitting(clients)]
        return own
