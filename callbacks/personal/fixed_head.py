"""FedBABU: the head keeps its initial value, and only the body is trained and averaged.

J. Oh, S. Kim, S.-Y. Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification
(ICLR 2022), arXiv:2106.06042. Afterwards each client fine-tunes the whole model:
``PerClientEvaluation(finetune_epochs=…)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.callback import Clients, FederatedCallback, Layout, Paper, Part, Scratch


class FixedHead(FederatedCallback):
    """The head is w^0's at every client: neither trained nor averaged.

    Its gradient is 0 before clipping, so it does not count in the norm, and its value is put back
    after each step, because weight decay, momentum and directions can move a parameter without
    gradient.
    Sent: the body down, and the head once to each client; the body up. Kept by each client: the
    head.

    Args:
        head: ``"last"`` (layer), one pattern of parameter names (``fnmatch``: ``"head.*"``), or
            several patterns.

    Raises:
        UserError: a pattern matches nothing.

    Example:
        the head never moves.

        >>> from fl_lightning.callbacks import FixedHead
        >>> from fl_lightning.testing import tiny_run
        >>> one, two = (tiny_run(FixedHead(), rounds=t) for t in (1, 2))
        >>> moved = one.evaluated_vector != two.evaluated_vector
        >>> {name: bool(moved[where].any()) for name, (where, _) in one.layout.items()}
        {'first.weight': True, 'first.bias': True, 'head.weight': False, 'head.bias': False}
    """

    title = "FedBABU"
    paper = Paper("oh2022fedbabu")
    order = 1
    moves_start = False
    of_head = Scratch(dtype=torch.bool)

    def __init__(self, head: str | Sequence[str] = "last") -> None:
        super().__init__()
        self.head = head

    def parts(self, layout: Layout) -> list[Part]:
        return [(layout.mask(layout.named(self.head, "FixedHead")), None)]

    def on_local_start(self, clients: Clients) -> None:
        ((head, _),) = self.parts(clients.layout)
        self.of_head[clients] = head.to(clients.x.device)

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        gradient.masked_fill_(self.of_head[clients], 0.0)

    def on_local_step_end(self, clients: Clients) -> None:
        clients.x = torch.where(self.of_head[clients], clients.start, clients.x)
