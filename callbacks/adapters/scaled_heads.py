"""RAVAN: clients send each head's core times its scale, so that the mean of products is exact.

A. Raje, B. Askin, D. Jhunjhunwala, G. Joshi: Ravan: Multi-Head Low-Rank Adaptation for Federated
Fine-Tuning (2025), arXiv:2506.05568. The layer is :class:`fl_lightning.models.MultiHead`. Choosing
heads for clients with less memory, and the paper's initialisation, are not built.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import Tensor

from fl_lightning.callback import Clients, FederatedCallback, Layout, Paper, Server, UserError


class ScaledHeads(FederatedCallback):
    """A client sends s_h H_h in place of its core H_h, and no scales; w's scales stay 1.

    Sent: D without the scales, each way. Kept: nothing.

    Args:
        cores: pattern (``fnmatch``) of the names of the cores ``(h, r, r)``.
        scales: pattern of the names of their scales ``(h,)``, in the same modules.

    Raises:
        UserError: the learner has no heads, or a core has no scale of its size; or another method
            decides what clients send.

    Example:
        clients train the scales, and the server's stay 1.

        >>> from fl_lightning.callbacks import ScaledHeads
        >>> from fl_lightning.lab.contracts.federation import Learner
        >>> from fl_lightning.models import MultiHead
        >>> from fl_lightning.testing import tiny_run
        >>> learner = Learner()
        >>> learner.first = MultiHead(learner.first, rank=2, heads=3).double()
        >>> run = tiny_run(ScaledHeads(), learner=learner)
        >>> run.global_vector[run.layout["first.heads_s"][0]].tolist()
        [1.0, 1.0, 1.0]
    """

    title = "RAVAN"
    paper = Paper("raje2025ravan", vectors=None)
    needs_adapters = "heads"
    tolerates_staleness = True
    moves_start = False
    order = 1  # after other methods have changed the update

    def __init__(self, cores: str = "*heads_H", scales: str = "*heads_s") -> None:
        super().__init__()
        self.cores = cores
        self.scales = scales

    def check_layout(self, layout: Layout, num_clients: int, w: Tensor) -> None:
        super().check_layout(layout, num_clients, w)
        if not any(fnmatchcase(name, self.cores) for name in layout):
            raise UserError(
                f"ScaledHeads: the learner has no heads: no parameter is called {self.cores!r}. "
                "Put fl_lightning.models.MultiHead in place of linear layers. CausalLanguageModel "
                "and TextClassifier do so by --model.learner.heads '{rank: 4, heads: 4, "
                "target_modules: [q_proj, v_proj]}'."
            )
        for _ in self._pairs(layout):
            pass

    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        message = update.clone()
        sent = clients.layout.size
        for core, scale in self._pairs(clients.layout):
            s = clients.x[:, scale]
            h = clients.x[:, core].reshape(*s.shape, -1)
            message[:, core] = (s[:, :, None] * h).flatten(1) - clients.w[core]
            message[:, scale] = 0.0
            sent -= s.shape[1]
        clients.sent(parameters=sent)
        return message

    def on_server_update(self, server: Server) -> None:
        # Another method may pull the scales, and w's stay 1.
        for _, scale in self._pairs(server.layout):
            server.update[scale] = 0.0

    def numbers_down(self, layout: Layout, t: int, last: int | None) -> int | None:
        scales = sum(scale.stop - scale.start for _, scale in self._pairs(layout))
        return int(layout.size - scales)

    def _pairs(self, layout: Layout) -> Iterator[tuple[slice, slice]]:
        """Return the coordinates of each core and its scale."""
        scales = {}
        for name in layout.named(self.scales, "ScaledHeads.scales"):
            scales[name.rpartition(".")[0]] = name
        for core in layout.named(self.cores, "ScaledHeads.cores"):
            where, shape = layout[core]
            scale = scales.get(core.rpartition(".")[0])
            own = None if scale is None else tuple(layout[scale][1])
            if len(shape) != 3 or shape[1] != shape[2] or own != (shape[0],):
                raise UserError(
                    f"ScaledHeads: the core {core} has shape {tuple(shape)} and its scale "
                    f"{scale or 'is missing'}{'' if own is None else f' {own}'}; they have to be "
                    "(h, r, r) and (h,), as in fl_lightning.models.MultiHead."
                )
            assert scale is not None
            yield where, layout[scale][0]
