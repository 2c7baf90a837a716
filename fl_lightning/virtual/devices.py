"""How fast clients compute and communicate: seconds per step, and bytes per second, by client.

All are functions of (seed, client), and with jitter also of the job. So durations are known before
training, equally in every process.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import (
    Above,
    AtMost,
    NonNegativeFloat,
    PositiveFloat,
    checked,
)
from fl_lightning.sampling import generator
from fl_lightning.schedules import texts_of

Speed = Annotated[float, Above(0), AtMost(math.inf)]
Speeds = NDArray[np.float64]  # (m,), of every client
TICKS = 1_000_000  # a second


class Distribution(ABC):
    """A positive number for each client."""

    @abstractmethod
    def of_clients(self, seed: int, m: int, purpose: str = "") -> Speeds:
        """Return the numbers ``(m,)``; ``purpose``: "" for computing, "up", "down"."""

    def __repr__(self) -> str:
        # A resumed run compares this text.
        return f"{type(self).__name__}({texts_of(vars(self))})"


@checked
@dataclass(frozen=True)
class Constant(Distribution):
    """The same number for all clients.

    Args:
        seconds_per_step: seconds per local step; as a bandwidth, bytes per second.
    """

    seconds_per_step: PositiveFloat

    def of_clients(self, seed: int, m: int, purpose: str = "") -> Speeds:
        return np.full(m, float(self.seconds_per_step))


@checked
@dataclass(frozen=True)
class LogNormal(Distribution):
    """median · exp(σ z_i), z_i ~ N(0, 1).

    Args:
        median: of clients.
        sigma: σ; with 0 all clients are the same.
    """

    median: PositiveFloat
    sigma: NonNegativeFloat

    def of_clients(self, seed: int, m: int, purpose: str = "") -> Speeds:
        z = generator(seed, purpose or "speed").standard_normal(m)
        speeds: Speeds = self.median * np.exp(self.sigma * z)
        return speeds


@checked
@dataclass(frozen=True)
class Tiers(Distribution):
    """Classes of clients, to which clients are assigned at random.

    Args:
        tiers: ``(share of the clients, number)`` of each; shares sum to 1.

    Example:
        >>> sorted(Tiers([(0.25, 2.0), (0.75, 1.0)]).of_clients(seed=0, m=4).tolist())
        [1.0, 1.0, 1.0, 2.0]
    """

    tiers: Sequence[tuple[NonNegativeFloat, PositiveFloat]]

    def __post_init__(self) -> None:
        pairs = [(float(share), float(speed)) for share, speed in self.tiers]
        total = sum((Fraction(str(share)) for share, _ in pairs), Fraction(0))
        if abs(total - 1) > Fraction(1, 10**9):
            raise UserError(f"Tiers: the shares sum to {float(total):g}. Shares have to sum to 1.")
        object.__setattr__(self, "tiers", tuple(pairs))

    def of_clients(self, seed: int, m: int, purpose: str = "") -> Speeds:
        order = generator(seed, f"tiers {purpose}".rstrip()).permutation(m)
        return cut_by_shares(self.tiers, order)


def cut_by_shares(pairs: Sequence[tuple[float, float]], order: NDArray[np.int64]) -> Speeds:
    """Return the number of each client ``(m,)``: ``(share, number)`` are cut from ``order``."""
    m = len(order)
    numbers = np.empty(m)
    begin = 0
    # Use decimals: the float 0.1 would cut some tiers one client early.
    cumulated = Fraction(0)
    for place, (share, number_of_tier) in enumerate(pairs):
        cumulated += Fraction(str(share))
        last = place == len(pairs) - 1
        end = m if last else math.floor(m * cumulated + Fraction(1, 2))
        numbers[order[begin:end]] = number_of_tier
        begin = end
    return numbers


@dataclass(frozen=True)
class Trace(Distribution):
    """Measured numbers from a text file, one per line; client i has line i modulo their number.

    Args:
        path: path of the file.
    """

    path: str

    def __post_init__(self) -> None:
        _read(str(self.path))

    def of_clients(self, seed: int, m: int, purpose: str = "") -> Speeds:
        return np.resize(_read(str(self.path)), m)


@cache
def _read(path: str) -> Speeds:
    try:
        numbers = np.loadtxt(Path(path).expanduser(), ndmin=1)
    except (OSError, ValueError) as error:
        raise UserError(
            f"Trace: {path} cannot be read ({error}). Give a text file with one number per line."
        ) from None
    if numbers.ndim != 1 or not len(numbers) or not ((numbers > 0) & (numbers < math.inf)).all():
        raise UserError(
            f"Trace: {path} needs numbers above 0, such as 0.12, one per line, for each client."
        )
    return numbers


@dataclass(frozen=True)
class HalfNormal:
    """A factor for each job: the absolute value of z ~ N(0, 1) (Nguyen et al., AISTATS 2022)."""

    def factor(self, z: float) -> float:
        return abs(z)


@checked
@dataclass(frozen=True)
class LogNormalJitter:
    """A factor exp(σ z) for each job, z ~ N(0, 1)."""

    sigma: NonNegativeFloat

    def factor(self, z: float) -> float:
        return math.exp(self.sigma * z)


@checked
@dataclass(frozen=True)
class Devices:
    """The devices of the clients.

    A job, which is a client's work in one round, takes δ = latency + K_i c_i ζ + B↓/b↓_i + B↑/b↑_i.

    Args:
        compute: c_i, seconds per local step.
        jitter: ζ, a factor for each job; None: 1.
        up, down: b↑_i, b↓_i in bytes per second: a number for all, or a distribution.
        latency: seconds.
    """

    compute: Distribution
    jitter: HalfNormal | LogNormalJitter | None = None
    up: Speed | Distribution = math.inf
    down: Speed | Distribution = math.inf
    latency: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.compute, Distribution):
            raise UserError(
                f"Devices: compute={self.compute!r} is not a distribution. Accepted: Constant, "
                "LogNormal, Tiers, Trace of fl_lightning.systems."
            )


@dataclass(frozen=True)
class Durations:
    """How long each client's jobs take, in ticks of a microsecond.

    Args:
        devices: devices of the clients.
        seed: the run's.
        m: number of clients.
        down, up: bytes that a participant is sent and sends.
    """

    devices: Devices
    seed: int
    m: int
    down: int
    up: int
    seconds: Speeds = field(init=False, repr=False)
    seconds_down: Speeds = field(init=False, repr=False)
    seconds_up: Speeds = field(init=False, repr=False)

    def __post_init__(self) -> None:
        seconds = self.devices.compute.of_clients(self.seed, self.m)
        object.__setattr__(self, "seconds", seconds)
        for way in ("down", "up"):
            given = getattr(self.devices, way)
            speed: Speeds | float = given
            if isinstance(given, Distribution):
                speed = given.of_clients(self.seed, self.m, way)
            taken = np.broadcast_to(getattr(self, way) / np.asarray(speed, float), (self.m,))
            object.__setattr__(self, f"seconds_{way}", taken)

    def of_job(self, version: int, client: int, steps: int) -> int:
        """Return δ of the job that ``client`` starts at ``version`` with so many local steps."""
        factor = 1.0
        if self.devices.jitter is not None:
            z = float(generator(self.seed, "job", version, client).standard_normal())
            factor = self.devices.jitter.factor(z)
        # Add from left to right, so that other programs compute the same tick.
        seconds = self.devices.latency + steps * float(self.seconds[client]) * factor
        seconds = seconds + float(self.seconds_down[client]) + float(self.seconds_up[client])
        # Python's round rounds halves to even.
        return max(1, round(TICKS * seconds))
