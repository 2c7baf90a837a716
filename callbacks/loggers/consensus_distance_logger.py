"""The consensus distance: how far the participants' models are from each other.

P. Gholami, H. Seferoglu: Improved Generalization Bounds for Communication Efficient Federated
Learning (2024), arXiv:2404.11754, Fig. 1: the first layers of a network agree more than the last
ones.
"""

from __future__ import annotations

import torch

from fl_lightning.callback import Clients, FederatedCallback, Layout, Server, Upload, ordered_sum


class ConsensusDistanceLogger(FederatedCallback):
    """Logs ``consensus/total`` = mean over S_t of ‖x_{i,K} - x̄‖² with their mean x̄, and the same
    per layer.

    ``consensus/<layer>``: the sum over the layer's coordinates, as in FedALS;
    ``consensus_per_coordinate/<layer>``: this sum divided by the number of coordinates;
    ``consensus_relative/<layer>``: the sum divided by ‖x̄‖² on the layer (not logged if that is 0).
    The three measures can rank layers differently. A layer has the name of its module's path; a
    norm belongs to the layer before it.
    Sent and kept: nothing; vectors that clients send only for this measurement are not counted.

    Args:
        per_layer: whether to log each layer, too, which costs one more sum of D numbers per round.

    Example:
        the layers add up to the total.

        >>> from fl_lightning.callbacks import ConsensusDistanceLogger
        >>> from fl_lightning.testing import tiny_run
        >>> logged = tiny_run(ConsensusDistanceLogger()).trainer.callback_metrics
        >>> layers = logged["consensus/first"] + logged["consensus/head"]
        >>> layers.allclose(logged["consensus/total"])
        True
    """

    not_over_sites = "the models of clients' layers"
    role = "measurement"
    moved = Upload(sent=False, dtype=torch.float64)

    def __init__(self, per_layer: bool = True) -> None:
        super().__init__()
        self.per_layer = per_layer
        shape = None if per_layer else ()
        self.declare("squared", Upload(sent=False, shape=shape, dtype=torch.float64, least=0))

    def on_local_end(self, clients: Clients) -> None:
        moved = (clients.x - clients.current_w).double()
        self.moved[clients] = moved
        self.squared[clients] = moved**2 if self.per_layer else (moved**2).sum(1)

    def on_round_end(self, server: Server) -> None:
        # The mean of squares minus the square of the mean needs no second pass over the clients;
        # rounding may make it negative.
        mean = self.moved.mean()
        if not self.per_layer:
            total = self.squared.mean() - ordered_sum(mean**2)
            server.log("consensus/total", total.clamp(min=0))
            return
        variance = (self.squared.mean() - mean**2).clamp(min=0)
        server.log("consensus/total", ordered_sum(variance))
        centre = (server.given.double() + mean) ** 2
        for layer, slices in layers(server.layout).items():
            raw = torch.stack([ordered_sum(variance[s]) for s in slices]).sum()
            norm = torch.stack([ordered_sum(centre[s]) for s in slices]).sum()
            size = sum(s.stop - s.start for s in slices)
            server.log(f"consensus/{layer}", raw)
            server.log(f"consensus_per_coordinate/{layer}", raw / size)
            if norm > 0:
                server.log(f"consensus_relative/{layer}", raw / norm)


def layers(layout: Layout) -> dict[str, list[slice]]:
    """Return the coordinates of each layer, by the path of its module.

    In a learner without layers they are grouped by the module that owns them.
    """
    slices: dict[str, list[slice]] = {}
    if layout.layers.get(""):
        for name, (where, _) in layout.items():
            slices.setdefault(name.rpartition(".")[0] or name, []).append(where)
        return slices
    for path, names in layout.layers.items():
        if names:
            slices[path] = [layout[name][0] for name in names]
    return slices
