"""Send only the part of w that a site lacks, if clients leave coordinates unchanged.

The numbers of a message: ``since``, the number of the question with which the site got the w that
the message builds on (if absent, it builds on zeros), and ``model``, the round of the new w. Its
arrays: ``changed``, a mask of the coordinates that ``w`` has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.callback_list import CallbackList
from fl_lightning.deploy import round_messages
from fl_lightning.deploy.transport import Message
from fl_lightning.learner.layout import Layout
from fl_lightning.round.context import Round
from fl_lightning.round.partial_training import foreseen

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by number of bytes


class SentModel:
    """The parts of w that a server's sites have."""

    def __init__(self, methods: CallbackList) -> None:
        self.methods = methods
        self._given: dict[str, Tensor] = {}  # by site; sites with equal vectors share the memory
        self._latest: Tensor | None = None

    def put(self, message: Message, round: Round, since: int | None) -> None:
        """Add the part of the round's w that the message's site lacks.

        Args:
            since: the number of the site's last question; None: it lacks all of w.
        """
        w = round.w
        if self._latest is None or not torch.equal(self._latest, w):
            self._latest = w.detach().clone()
        given = self._given.get(message.site)
        self._given[message.site] = self._latest
        if since is None or given is None:
            given = torch.zeros_like(w)
        else:
            message.numbers |= {"since": since, "whole": 0}
        known = foreseen(self.methods, given, round.layout, round.t)
        changed = bits(known) != bits(w)
        message.numbers["model"] = round.t
        round_messages.put(message.arrays, "w", w[changed])
        round_messages.put_mask(message.arrays, "changed", changed)


def completed(message: Message, given: Tensor, methods: CallbackList, layout: Layout) -> Tensor:
    """Return w ``(D,)`` of a message; ``given`` is the w that the site got last, or zeros."""
    w = foreseen(methods, given, layout, int(message.numbers["model"])).clone()
    changed = round_messages.got_mask(message.arrays["changed"], w.numel())
    w[changed] = round_messages.got(message.arrays, "w").to(w)
    return w


def bits(vector: Tensor) -> Tensor:
    """Return the bits of numbers: NaN equals NaN, and -0 differs from 0."""
    return vector.detach().contiguous().view(INTEGERS[vector.element_size()])
