"""How far the participants are from each other: the consensus distance of FedALS, Fig. 1."""

from __future__ import annotations

import torch

from fl_lightning.callback import Clients, FederatedCallback, Layout, Server, Upload


class ConsensusDistanceLogger(FederatedCallback):
    """Logs ``consensus/total`` = mean over S_t of ‖x_{i,K} - mean x_K‖², and ``consensus/<layer>``.

    A layer is the module that owns the parameters; its value is divided by the number of its coordinates.

    Args:
        per_layer: also by layer; costs a sum of D numbers more in a round.
    """

    moved = Upload(sent=False, dtype=torch.float64)

    def __init__(self, per_layer: bool = True) -> None:
        super().__init__()
        self.per_layer = per_layer
        shape = None if per_layer else ()
        self.declare("squared", Upload(sent=False, shape=shape, dtype=torch.float64))

    def on_local_end(self, clients: Clients) -> None:
        moved = (clients.x - clients.w).double()
        self.moved[clients] = moved
        self.squared[clients] = moved**2 if self.per_layer else (moved**2).sum(1)

    def on_round_end(self, server: Server) -> None:
        mean = self.moved.mean()
        if not self.per_layer:
            server.log("consensus/total", (self.squared.mean() - mean @ mean).clamp(min=0))
            return
        variance = (self.squared.mean() - mean**2).clamp(min=0)
        server.log("consensus/total", variance.sum())
        for layer, slices in layers(server.layout).items():
            own = torch.cat([variance[s] for s in slices])
            server.log(f"consensus/{layer}", own.mean())


def layers(layout: Layout) -> dict[str, list[slice]]:
    """Coordinates by the module that owns them; a parameter of the learner itself stands alone."""
    found: dict[str, list[slice]] = {}
    for name, (where, _) in layout.items():
        found.setdefault(name.rpartition(".")[0] or name, []).append(where)
    return found
