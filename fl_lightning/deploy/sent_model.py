"""Send only the part of w and of the base that a site lacks.

Of w, if rounds leave coordinates unchanged. The numbers of a message: ``since``, the number of the
question with which the site got the w that the message builds on (if absent, it builds on zeros),
and ``model``, the round of the new w. Its arrays: ``w``, and ``changed``, a mask of the coordinates
that ``w`` has (if absent, it has all).

Of the base, its changes as factors, or whole weights if these are smaller. The numbers: ``base``,
the version of the base after the message, and ``base_from``, the version that the site must have
before. The arrays, by the weight's place among the base's: ``base/k/whole``, or ``base/k/i/left``
and ``base/k/i/right`` of its i-th addition, in order. Version 0 is W^0, which each site makes
itself.
"""

from __future__ import annotations

import secrets
from itertools import chain, count

import torch
from torch import Tensor

from fl_lightning.callback_list import CallbackList
from fl_lightning.deploy import round_messages
from fl_lightning.deploy.fields import Fields, tensor_of
from fl_lightning.deploy.transport import Message
from fl_lightning.learner.layout import Layout
from fl_lightning.round.base_weights import Addition, BaseWeights
from fl_lightning.round.context import Round
from fl_lightning.round.partial_training import foreseen

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by number of bytes
ANY = -1  # value of base_from if the message has all frozen weights


class SentModel:
    """The w that each of a server's sites has."""

    def __init__(self, methods: CallbackList) -> None:
        self.methods = methods
        # site → the number of its last question, and the w that came with it, if it is of use
        self._given: dict[str, tuple[int, Tensor | None]] = {}
        self._latest: Tensor | None = None  # sites with equal vectors share the memory

    def forget(self, site: str) -> None:
        """Note that a site may have nothing of the model."""
        self._given.pop(site, None)

    def put(self, message: Message, round: Round) -> None:
        """Add the part of the round's w that the message's site lacks, and w^0 to its first
        message if methods start from it.
        """
        w = round.w
        before = self._given.get(message.site)
        if before is None and self.methods.start_from_w0:
            round_messages.put(message.arrays, "w0", round.initial_model)
        foresees = any(callback.has("foreseen") for callback in self.methods.callbacks)
        partly = round.parts is not None or self.methods.owner("trained") is not None or foresees
        if partly and (self._latest is None or not torch.equal(self._latest, w)):
            self._latest = w.detach().clone()
        self._given[message.site] = int(message.numbers["question"]), self._latest
        if not partly:  # then all of w changes in each round
            round_messages.put(message.arrays, "w", w)
            return
        given = None if before is None else before[1]
        if before is None or given is None:
            given = torch.zeros_like(w)
        else:
            message.numbers["since"] = before[0]
        changed = _bits(foreseen(self.methods, given, round.layout, round.t)) != _bits(w)
        message.numbers["model"] = round.t
        round_messages.put(message.arrays, "w", w[changed])
        round_messages.put_mask(message.arrays, "changed", changed)


def completed(message: Message, given: Tensor, methods: CallbackList, layout: Layout) -> Tensor:
    """Return w ``(D,)`` of a message; ``given`` is the w that it builds on."""
    came = tensor_of(message.arrays["w"])
    if "changed" not in message.arrays:
        return came
    w = foreseen(methods, given, layout, int(message.numbers["model"])).clone()
    w[Fields.of(message).mask("changed", w.numel())] = came.to(w)
    return w


def _bits(vector: Tensor) -> Tensor:
    """Return the bits of numbers: NaN equals NaN, and -0 differs from 0."""
    return vector.detach().contiguous().view(INTEGERS[vector.element_size()])


class SentBase:
    """The frozen weights at the sites: which changes each site has, and which it is sent.

    Args:
        weights: the run's weights, which from now on keep each round's additions.
    """

    def __init__(self, weights: BaseWeights) -> None:
        weights.history = {}
        self.weights = weights
        # An earlier server process of the run may have continued differently, so each server draws
        # its own marks.
        self._server = 1 + secrets.randbelow(2**50)
        self._first = len(weights.costs)
        # site → the number of rounds whose additions it has (0 for a new site, None if unknown)
        self._has: dict[str, int | None] = {}

    def forget(self, site: str) -> None:
        """Note that the site's process has ended, and that another one begins with W^0."""
        self._has.pop(site, None)

    def heard(self, site: str, mark: int) -> None:
        """Note which base a site reports."""
        rounds = mark - self._server
        here = self._first <= rounds <= len(self.weights.costs)
        self._has[site] = rounds if here else None
        if mark == 0:
            self._has.pop(site, None)

    def put(self, message: Message) -> None:
        """Add to the message those changes of the present base that the site lacks."""
        weights = self.weights
        now = len(weights.costs)
        since = self._has.get(message.site, 0)
        message.numbers["base"] = self._mark(now)
        message.numbers["base_from"] = ANY if since is None else self._mark(since)
        additions = self._since(since, now)
        for k, (name, value) in enumerate(weights.values.items()):
            cost = sum(costs[k] for costs in weights.costs[since or 0 : now])
            if since is not None and not cost:
                continue
            if additions is None or cost >= value.numel():
                round_messages.put(message.arrays, f"base/{k}/whole", value)
                continue
            own = (addition for addition in additions if addition[0] == name)
            for i, (_, left, right) in enumerate(own):
                round_messages.put(message.arrays, f"base/{k}/{i}/left", left)
                if right is not None:
                    round_messages.put(message.arrays, f"base/{k}/{i}/right", right)
        self._has[message.site] = now

    def _mark(self, rounds: int) -> int:
        return self._server + rounds if rounds else 0

    def _since(self, since: int | None, now: int) -> list[Addition] | None:
        """Return the additions of rounds since, …, now - 1; None: some are not known any more."""
        history = self.weights.history
        if since is None or history is None or any(t not in history for t in range(since, now)):
            return None
        return [*chain.from_iterable(history[t] for t in range(since, now))]


class BaseAtSite:
    """A site's base, which follows the server's.

    Args:
        weights: weights of the site's learner.
    """

    def __init__(self, weights: BaseWeights) -> None:
        self.weights = weights
        self.mark = 0

    def lacks(self, message: Message) -> bool:
        """Return whether the message builds on another base than the site's."""
        return message.numbers["base_from"] not in (ANY, self.mark)

    def take(self, message: Message) -> None:
        """Change the weights to the version after the message."""
        if message.numbers["base"] == self.mark:
            return
        whole: dict[str, Tensor] = {}
        additions: list[Addition] = []
        for k, name in enumerate(self.weights.values):
            of_weight = round_messages.under(message.arrays, f"base/{k}/")
            if "whole" in of_weight:
                whole[name] = of_weight["whole"]
            for i in count():
                if f"{i}/left" not in of_weight:
                    break
                additions.append((name, of_weight[f"{i}/left"], of_weight.get(f"{i}/right")))
        values, _, _ = self.weights.after(additions)
        for name, value in whole.items():
            values[name] = value.to(self.weights.values[name])
        self.weights.write(values)
        self.mark = int(message.numbers["base"])
