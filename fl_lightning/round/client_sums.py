"""The sums over the clients of a round, as one object."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

Some = TypeVar("Some", bound="Sums")
Place = tuple[str, ...]  # a field, and the tensor's name if the field holds several


@dataclass
class Sums:
    """Base class of values that are summed: each field is a tensor, None, or tensors by name."""

    MAXIMA: ClassVar[str] = ""
    """The field for which the maximum takes the place of the sum."""

    def parts(self) -> Iterator[tuple[Place, Tensor]]:
        # This is called for every client, and most fields are empty.
        for field_name, value in vars(self).items():
            if isinstance(value, Tensor):
                yield (field_name,), value
            elif value:
                yield from (((field_name, name), tensor) for name, tensor in value.items())

    def get(self, place: Place) -> Tensor | None:
        value = getattr(self, place[0])
        found: Tensor | None = value.get(place[1]) if isinstance(value, dict) else value
        return found

    def put(self, place: Place, value: Tensor) -> None:
        if len(place) == 1:
            setattr(self, place[0], value)
        else:
            getattr(self, place[0])[place[1]] = value

    def kept(self: Some, shared: Collection[str]) -> Some:
        """The tensors; those of fields ``shared``, which others may change, are copied."""
        if not shared:
            return self
        kept = type(self)()
        for place, value in self.parts():
            kept.put(place, value.clone() if place[0] in shared else value)
        return kept


@dataclass
class Total(Sums):
    """The sums over the clients that finished; ``traffic`` counts the others, too.

    Args:
        weight: Σ p_i.
        traffic: the communication, see :mod:`fl_lightning.aggregation.traffic`.
        update: Σ u_i; ``weighted``: Σ p_i u_i. With equal weights the two are the same, and only
            ``weighted`` is set. If a method gets all updates, they are summed after that method.
        copies: Σ p_i × the update before it was transmitted, if parts are not averaged.
        holders: Σ p_i over the clients that trained each coordinate, if clients differ in that.
        uploads: Σ of each upload; ``weighted_uploads``: Σ p_i × it, if weights differ.
        buffers: Σ p_i × the change of each buffer; ``maxima``: the maximum of a buffer that counts.
        logs: logs of clients; ``logged``: number of clients that logged.
    """

    MAXIMA = "maxima"

    weight: Tensor | None = None
    traffic: Tensor | None = None
    update: Tensor | None = None
    weighted: Tensor | None = None
    copies: Tensor | None = None
    holders: Tensor | None = None
    uploads: dict[str, Tensor] = field(default_factory=dict)
    weighted_uploads: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    logs: dict[str, Tensor] = field(default_factory=dict)
    logged: dict[str, Tensor] = field(default_factory=dict)

    def mean(self, weighted: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return a weighted sum / Σ p_i, computed in ``dtype``."""
        assert weighted is not None and self.weight is not None  # a client finished
        return weighted / self.weight.to(weighted.device, dtype)
