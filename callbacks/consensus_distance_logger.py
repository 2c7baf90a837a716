"""How far the participants are from each other: the consensus distance.

P. Gholami, H. Seferoglu: Improved Generalization Bounds for Communication Efficient Federated Learning (2024),
arXiv:2404.11754, Fig. 1: the first layers of a network agree more than the last ones.
"""

from __future__ import annotations

import torch

from fl_lightning.callback import Clients, FederatedCallback, Layout, Server, Upload


class ConsensusDistanceLogger(FederatedCallback):
    """Logs ``consensus/total`` = mean over S_t of ‖x_{i,K} - mean x_K‖², and ``consensus/<layer>``.

    A layer is a module that owns parameters; its value is divided by the number of its parameters.
    Sent and kept: nothing; what the clients hand over to be measured is not counted.

    Args:
        per_layer: whether to log each layer too, which costs one more sum of D numbers a round.

    Example:
        the layers, of 16 and 15 parameters, add up to the total.

        >>> from fl_lightning.callbacks import ConsensusDistanceLogger
        >>> from fl_lightning.testing import tiny_run
        >>> logged = tiny_run(ConsensusDistanceLogger()).trainer.callback_metrics
        >>> layers = 16 * logged["consensus/first"] + 15 * logged["consensus/head"]
        >>> layers.allclose(logged["consensus/total"])
        True
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
    """Each layer's coordinates, by its module's name; a parameter of the learner itself is a layer of its own."""
    found: dict[str, list[slice]] = {}
    for name, (where, _) in layout.items():
        found.setdefault(name.rpartition(".")[0] or name, []).append(where)
    return found
