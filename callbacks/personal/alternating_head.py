"""FedRep: clients share a body, and each client trains its own head before the body.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai: Exploiting Shared Representations for
Personalized Federated Learning (ICML 2021), Algorithm 1, arXiv:2102.07078. In each round a client
first trains its head with the body at rest, then the body with the head at rest; the server
averages the bodies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.callback import (
    Clients,
    FederatedCallback,
    Layout,
    Note,
    Paper,
    Part,
    PositiveFloat,
    Scratch,
)


class AlternatingHead(FederatedCallback):
    """The first K_h of K_i local steps train only the head (never averaged), the others the body.

    K_h is the number of steps of ``head_epochs`` local epochs, at most K_i. The part that rests
    does not move at all: its gradient is 0 before clipping, and its value is put back after the
    optimizer's step (weight decay, momentum). A mean gradient (SCAFFOLD, FedCM) of a part counts
    the steps in which the part moves.
    Sent: the body down, and the head to clients that have none yet; the body up. Kept by each
    client: its head, and the head's start.

    Args:
        head_epochs: local epochs of the head, which may be a fraction; ``local_epochs`` counts both
            phases.
        head: ``"last"`` (layer), one pattern of parameter names (``fnmatch``: ``"head.*"``), or
            several patterns.

    Raises:
        UserError: a pattern matches nothing.

    Example:
        If the head takes all of a client's steps, the server's body never moves.

        >>> from fl_lightning.callbacks import AlternatingHead
        >>> from fl_lightning.testing import tiny_run
        >>> def run(head_epochs, rounds):
        ...     return tiny_run(AlternatingHead(head_epochs), rounds=rounds, local_epochs=2)
        >>> run(2, rounds=1).global_vector.equal(run(2, rounds=2).global_vector)
        True
        >>> one, two = run(1, rounds=1), run(1, rounds=2)
        >>> moved = one.global_vector != two.global_vector
        >>> {name: bool(moved[where].any()) for name, (where, _) in one.layout.items()}
        {'first.weight': True, 'first.bias': True, 'head.weight': False, 'head.bias': False}
    """

    title = "FedRep"
    paper = Paper("collins2021fedrep")
    order = 1
    moves_start = False
    notes = (
        Note(
            "{keeper} gets a gradient of 0 for the part that rests (head or body), and what it "
            "keeps of earlier gradients decays there. The paper uses plain SGD.",
            when=lambda method, run: bool(run.optimizer or run.direction_owner),
            keeper=lambda method, run: run.direction_owner or run.optimizer,
        ),
        Note(
            "the learning rate changes within a round, and a mean gradient (clients.mean_gradient) "
            "counts the steps of head and body alike, at the round's mean rate.",
            when=lambda method, run: run.by_step or "DecayWithinRound" in run.companions,
        ),
    )
    of_head = Scratch(dtype=torch.bool)
    before = Scratch()

    def __init__(self, head_epochs: PositiveFloat = 1, head: str | Sequence[str] = "last") -> None:
        super().__init__()
        self.head_epochs = head_epochs
        self.head = head

    def parts(self, layout: Layout) -> list[Part]:
        return [(layout.mask(layout.named(self.head, "AlternatingHead")), None)]

    def on_local_start(self, clients: Clients) -> None:
        ((head, _),) = self.parts(clients.layout)
        self.of_head[clients] = head.to(clients.x.device)
        first = torch.minimum(clients.steps_of(self.head_epochs), clients.steps)
        clients.moves(torch.where(self.of_head[clients], first, clients.steps - first))

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        self.before[clients] = clients.x
        # Set them to zero before clipping, so that resting coordinates do not count in the
        # gradient's norm.
        gradient.masked_fill_(self.resting(clients), 0.0)

    def on_local_step_end(self, clients: Clients) -> None:
        # Weight decay and momentum would move coordinates whose gradient is 0.
        clients.x = torch.where(self.resting(clients), self.before[clients], clients.x)

    def resting(self, clients: Clients) -> Tensor:
        """``(n, D)`` bool: the coordinates that rest in the present step."""
        trains_head = clients.step < clients.steps_of(self.head_epochs)
        return self.of_head[clients] ^ trains_head
