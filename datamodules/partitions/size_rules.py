"""Clients of given sizes, or of sizes by a rule, as flwr-datasets' partitioners make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.accepted import PositiveInt
from fl_lightning.datamodules.partitions.partition import Indices, Partition, need_samples
from fl_lightning.datamodules.partitions.partition_rng import check_same, stream, tell_left
from fl_lightning.errors import UserError

GROWTH: dict[str, Callable[[Any], Any]] = {
    "linear": lambda u: u,
    "square": np.square,
    "exponential": np.exp,
}


class Sizes(Partition):
    """Clients of given sizes, in the order of the data, or sizes by a rule.

    Args:
        sizes: one whole number per client; or ``"linear"``, ``"square"``, ``"exponential"`` or a
            function of the numbers 1.0 … m: client i gets a share proportional to f(i), rounded
            down, and the last client gets the rest.
        shuffle: divide the samples in random order; False: in the order of the data, as
            flwr-datasets' SizePartitioner, LinearPartitioner and similar ones do.
    """

    needs_labels = False

    def __init__(
        self,
        sizes: (
            list[PositiveInt] | Literal["linear", "square", "exponential"] | Callable[[Any], Any]
        ),
        shuffle: bool = False,
    ) -> None:
        if not callable(sizes) and not len(sizes):
            raise UserError("Sizes has no sizes: give one whole number per client.")
        self.sizes = sizes
        self.shuffle = shuffle

    @property
    def clients(self) -> int | None:
        fixed = not isinstance(self.sizes, str) and not callable(self.sizes)
        return len(self.sizes) if fixed else None  # type: ignore[arg-type]

    def split(self, labels: Indices, num_clients: int, seed: int) -> Sequence[Indices]:
        need_samples(num_clients, len(labels))
        sizes = self._sizes(len(labels), num_clients)
        ends = np.cumsum(sizes)
        tell_left(self, len(labels) - int(ends[-1]), len(labels), "as sizes leave them out")
        order = np.arange(len(labels))
        if self.shuffle:
            order = stream(seed, None).permutation(len(labels))
        return np.split(order[: ends[-1]], ends[:-1])

    def _sizes(self, total: int, m: int) -> NDArray[np.int64]:
        given = self.sizes
        if isinstance(given, list | tuple):
            check_same(self, m, len(given))
            if sum(given) > total:
                raise UserError(
                    f"Sizes: the sizes are {sum(given)} samples, and there are {total} training "
                    "samples: give smaller sizes."
                )
            return np.array(given, np.int64)
        growth = GROWTH[given] if isinstance(given, str) else given
        assert callable(growth)
        units = self._units(growth, np.linspace(1, m, m))
        shares = units / units.sum()
        with np.errstate(invalid="ignore"):
            sizes = np.array(shares * total, dtype=np.int64)
        sizes[-1] += total - sizes.sum()
        if not np.isfinite(units).all() or sizes.min() < 1:
            raise UserError(
                f"{self!r} leaves client {int(sizes.argmin())} {sizes.min()} of {total} samples: "
                "give fewer clients, or another rule."
            )
        return sizes

    def _units(self, growth: Callable[[Any], Any], places: NDArray[np.float64]) -> NDArray[Any]:
        """Return a function's values of the clients' places 1.0 … m."""
        try:
            units = np.asarray(growth(places))
        except (TypeError, ValueError):  # a function of one number, such as math.sqrt
            units = np.asarray([])
        if units.shape != places.shape:
            units = np.asarray([growth(place) for place in places.tolist()])
        if units.shape != places.shape or units.dtype.kind not in "biuf":
            raise UserError(
                f"{self!r}: the function gives {units.dtype} of shape {units.shape} for "
                f"{len(places)} clients: it needs one number for each place from 1.0 on."
            )
        return units

    def __repr__(self) -> str:
        given = self.sizes
        # The text of a function has its address, which differs between runs.
        name = getattr(given, "__qualname__", getattr(given, "__name__", "")) or repr(given)
        shuffle = ", shuffle=True" if self.shuffle else ""
        return f"Sizes(sizes={name if callable(given) else repr(given)}{shuffle})"
