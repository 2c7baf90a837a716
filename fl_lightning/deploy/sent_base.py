"""How changes of the base are sent to sites: as factors, or as whole weights if these are smaller.

The numbers of a message: ``base``, the version of the base after the message, and ``base_from``,
the version that the site must have before. Its arrays, by the weight's place among the base's:
``base/k/whole``, or ``base/k/i/left`` and ``base/k/i/right`` of its i-th addition, in order.
Version 0 is W^0, which each site makes itself.
"""

from __future__ import annotations

import secrets
from itertools import chain, count

from torch import Tensor

from fl_lightning.deploy import round_messages
from fl_lightning.deploy.transport import Message
from fl_lightning.round.base_weights import Addition, BaseWeights

ANY = -1  # value of base_from if the message has all frozen weights


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
            arrays = message.arrays
            if round_messages.has(arrays, f"base/{k}/whole"):
                whole[name] = round_messages.got(arrays, f"base/{k}/whole")
            for i in count():
                if not round_messages.has(arrays, f"base/{k}/{i}/left"):
                    break
                right = None
                if round_messages.has(arrays, f"base/{k}/{i}/right"):
                    right = round_messages.got(arrays, f"base/{k}/{i}/right")
                additions.append((name, round_messages.got(arrays, f"base/{k}/{i}/left"), right))
        values, _, _ = self.weights.after(additions)
        for name, value in whole.items():
            values[name] = value.to(self.weights.values[name])
        self.weights.write(values)
        self.mark = int(message.numbers["base"])
