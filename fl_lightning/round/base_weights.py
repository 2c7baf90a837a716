"""The base: frozen parameters that a method's server changes, by products that clients are sent.

A method declares ``base = Base()`` in its class, and calls ``self.base.add(name, left, right)``.
The framework keeps the changed weights in full precision, saves, restores and counts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.errors import UserError, suggest
from fl_lightning.learner.adapters import check_weights, users_of_parameters
from fl_lightning.learner.layout import Layout

# name, left factor or the dense addition, right factor
Addition = tuple[str, Tensor, Tensor | None]


class Base:
    """Frozen parameters that a method's server changes; declared in the class body.

    Args:
        patterns: patterns of names of frozen parameters (``fnmatch``: ``"*.first.*"``); without
            any, the weights under the learner's adapters (LoRA).
    """

    def __init__(self, *patterns: str) -> None:
        self.patterns = patterns
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, callback: Any, owner: type) -> Any:
        return self if callback is None else BoundBase(callback, self)

    def names(self, layout: Layout, learner: nn.Module, asking: str) -> list[str]:
        """Return the parameters that it names, in the order of the learner's.

        Raises:
            UserError: a pattern matches no frozen parameter, or a weight is shared or quantised.
        """
        parameters = dict(learner.named_parameters())
        frozen = [name for name, p in parameters.items() if not p.requires_grad]
        if not self.patterns:
            check_weights(layout, asking)
            wanted = {adapter.weight for adapter in layout.adapters}
        else:
            wanted = set()
        for pattern in self.patterns:
            matched = [name for name in frozen if fnmatchcase(name, pattern)]
            if not matched:
                raise UserError(
                    f"method: {asking}: Base({pattern!r}) matches no frozen parameter; there are "
                    f"{', '.join(frozen)[:200] or 'none'}.{suggest(pattern, frozen)}"
                )
            wanted.update(matched)
        users = users_of_parameters(learner)
        for name in sorted(wanted):
            if not parameters[name].is_floating_point():
                raise UserError(
                    f"method: {asking} changes the frozen weight {name}, which is stored as "
                    f"{parameters[name].dtype}: weights in 8 or 4 bits cannot be changed. Load the "
                    "base in bfloat16 or float32."
                )
            if len(homes := users.get(id(parameters[name]), [])) > 1:
                raise UserError(
                    f"method: {asking} changes the frozen weight {name}, which the modules "
                    f"{' and '.join(homes)} share (tied weights). Untie them, or leave it out."
                )
        return [name for name in frozen if name in wanted]


class BoundBase(Mapping[str, Tensor]):
    """A method's base in a run: the present values by name, read-only, and :meth:`add`."""

    def __init__(self, callback: Any, base: Base) -> None:
        self._callback = callback
        self._base = base

    @property
    def _weights(self) -> BaseWeights:
        weights: BaseWeights | None = self._callback._transaction.base_weights
        if weights is None:
            raise RuntimeError("self.base can be read only during a run, in hooks that take server")
        return weights

    def __getitem__(self, name: str) -> Tensor:
        return self._weights.values[name]

    def __iter__(self) -> Any:
        return iter(self._weights.values)

    def __len__(self) -> int:
        return len(self._weights.values)

    def add(self, name: str, left: Tensor, right: Tensor | None = None) -> None:
        """W ← W + left @ right, ``(out, R)`` and ``(R, in)``; without ``right``, W + left.

        Call it from ``on_updates`` to ``on_server_update``; it takes effect when the round is
        committed.

        Raises:
            UserError: the shapes do not fit.
        """
        transaction = self._callback._transaction
        who = f"method: {type(self._callback).__name__}.{self._base.name}.add"
        if not transaction.takes_additions:
            raise RuntimeError(
                f"{who} may be called only in the hooks from on_updates to on_server_update"
            )
        value = self._weights.values[name]
        fits = left.shape == value.shape
        if right is not None:
            outer = left.ndim == right.ndim == 2 and left.shape[1] == right.shape[0]
            fits = outer and (left.shape[0], right.shape[1]) == value.shape
        if not fits:
            raise UserError(
                f"{who}: {name} is {tuple(value.shape)}: give left (out, R) and right (R, in), or "
                "one tensor of the weight's shape."
            )
        kept = [None if each is None else each.detach().clone() for each in (left, right)]
        transaction.additions.append((name, *kept))


@dataclass
class BaseWeights:
    """The base of a run, between rounds.

    Args:
        values: values in full precision by name; for a weight with at least 32 bits this is the
            weight's own memory.
        in_use: the learner's parameters.
        costs: for each round, how many numbers its additions to each weight are, in order.
        history: the additions of each round, once a server of sites asks for them; None: it has not
            asked.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    in_use: dict[str, nn.Parameter] = field(default_factory=dict)
    costs: list[list[int]] = field(default_factory=list)
    history: dict[int, list[Addition]] | None = None

    @classmethod
    def of(cls, callbacks: Sequence[Any], layout: Layout, learner: nn.Module) -> BaseWeights | None:
        """Return the base that the callbacks declare; None: no callback declares one.

        Raises:
            UserError: two callbacks change one weight; or as in :meth:`Base.names`.
        """
        owner: dict[str, str] = {}
        declares = False
        for callback in callbacks:
            for base in declared_bases(callback):
                declares = True
                who = type(callback).__name__
                for name in base.names(layout, learner, who):
                    if owner.setdefault(name, who) != who:
                        raise UserError(
                            f"method: {owner[name]} and {who} both change the frozen weight {name}."
                            " Keep one of them."
                        )
        if not declares:
            return None
        parameters = {n: p for n, p in learner.named_parameters() if n in owner}
        weights = cls(in_use=parameters)
        for name, parameter in parameters.items():
            weights.values[name] = wide(parameter.data)
        return weights

    def kinds(self) -> dict[str, str]:
        """Return shape and dtype of each weight, which have to be the same in a checkpoint."""
        return {n: f"{tuple(p.shape)} {p.dtype}" for n, p in self.in_use.items()}

    def kept(self) -> dict[str, Tensor]:
        """Return the values that the learner's own weights do not hold in full precision."""
        return {n: v for n, v in self.values.items() if v.dtype != self.in_use[n].dtype}

    def after(
        self, additions: Sequence[Addition]
    ) -> tuple[dict[str, Tensor], list[int], list[Addition]]:
        """Values after additions, how many numbers these are for each weight, and the additions."""
        values: dict[str, Tensor] = {}
        costs = dict.fromkeys(self.values, 0)
        added: list[Addition] = []
        for name, left, right in additions:
            value = values.get(name, self.values[name])
            # A product of transposed views has other bits than a product of the tensors in a
            # message.
            one = left.to(value).contiguous()
            other = None if right is None else right.to(value).contiguous()
            numbers = value.numel()
            if other is not None:
                numbers = min(one.shape[1] * sum(value.shape), numbers)
            values[name] = value + (one if other is None else one @ other)
            costs[name] += numbers
            added.append((name, one, other))
        return values, list(costs.values()), added

    def put(
        self,
        t: int,
        values: Mapping[str, Tensor],
        costs: list[int],
        additions: list[Addition],
    ) -> None:
        """Set the values after round t; a second call with the same values changes nothing."""
        self.write(values)
        missing = [[0] * len(self.values)] * (t - len(self.costs))
        self.costs = [*self.costs[:t], *missing, costs]
        if self.history is not None:
            self.history[t] = additions

    def write(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            parameter = self.in_use[name]
            # Change the weight in place: copies of the learner and recorded steps read this memory.
            parameter.data.copy_(value)
            self.values[name] = value if value.dtype != parameter.dtype else parameter.data

    def due(self, t: int, last: int | None) -> int:
        """How many numbers a client lacks in round t if it last got the base in round ``last``."""
        total = 0
        for k, value in enumerate(self.values.values()):
            since = sum(costs[k] for costs in self.costs[last or 0 : t])
            total += min(since, value.numel())
        return total

    def restore(
        self, held: Mapping[str, Tensor], costs: list[list[int]], kinds: Mapping[str, str]
    ) -> None:
        """Take a checkpoint's base.

        Raises:
            UserError: the values belong to other weights.
        """
        own = self.kinds()
        if dict(kinds) != own:
            names = sorted(n for n in {*kinds, *own} if kinds.get(n) != own.get(n))
            raise UserError(
                f"ckpt_path: the checkpoint has another base: {names[0]} is "
                f"{kinds.get(names[0], 'no part of it')} there and "
                f"{own.get(names[0], 'no part of it')} here. Give the learner and the method of "
                "its run."
            )
        for name, parameter in self.in_use.items():
            self.values[name] = parameter.data
            if name in held:
                self.values[name] = held[name].to(parameter.device)
        self.costs = costs


def wide(data: Tensor) -> Tensor:
    """Return the data in at least 32 bits; if they already have as many, in their own memory."""
    dtype = torch.promote_types(data.dtype, torch.float32)
    return data if data.dtype == dtype else data.to(dtype)


def declared_bases(callback: Any) -> list[Base]:
    found: dict[str, Base] = {}
    for cls in reversed(type(callback).__mro__):
        found.update({name: value for name, value in vars(cls).items() if isinstance(value, Base)})
    return list(found.values())
