"""FedSpeed beside sign compression: signs of the displacements, and duals that stay exact.

The duals are sums of displacements, which the server cannot compute from signs. So they are sent
beside them, and counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning import FederatedCallback
from fl_lightning.callbacks import CommunicationLogger, MixedAscent, SignUpdate
from tests.helpers.learners import blobs, client_rows, federated, trainer

PENALTY = 0.2


class Gathered(FederatedCallback):
    """What the server got, and its model before and after, by round."""

    def __init__(self, found: list[dict[str, Tensor]]) -> None:
        super().__init__()
        self._found = found

    def on_updates(self, server: Any) -> None:
        self._found.append({"updates": server.updates.clone()})

    def on_round_end(self, server: Any) -> None:
        self._found[-1] |= {"before": server.w_before.clone(), "after": server.w.clone()}


def test_the_server_adds_the_mean_of_signs_and_the_exact_dual() -> None:
    found: list[dict[str, Tensor]] = []
    module = federated(participation="all", local_epochs=2)
    methods = [MixedAscent(PENALTY, radius=0.05), SignUpdate(per_layer=False)]
    run = trainer(3, [*methods, Gathered(found), CommunicationLogger()])
    run.fit(module, blobs(clients=4))
    rows = client_rows(module)
    duals = torch.stack([rows["MixedAscent.dual", i] for i in range(4)])
    # The server's dual is the mean of the clients', to rounding, whatever was lost in the signs.
    dual = module.server_states["MixedAscent.dual_mean"]
    torch.testing.assert_close(dual, duals.mean(0), rtol=1e-10, atol=1e-12)
    last = found[-1]
    for update in last["updates"]:
        torch.testing.assert_close(update.abs(), update.abs().max().expand_as(update))
    step = last["updates"].mean(0) - dual / PENALTY
    torch.testing.assert_close(last["after"] - last["before"], step, rtol=1e-10, atol=1e-12)
    # In each of 3 rounds a client sends a bit per number, a scale of 32 bits, and its displacement.
    size = module.global_vector.numel()
    counted = float(run.callback_metrics["communication/up_bytes"])
    assert counted == 3 * 4 * (-(-(32 + size) // 8) + 8 * size)
