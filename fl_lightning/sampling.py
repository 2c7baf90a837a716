"""Counter-based randomness: every draw is a function of (seed, purpose, counters), never of what ran before.

So resuming, the size of a group, the engine and the number of processes cannot change who is sampled,
in which order samples come or how they are augmented.
"""

from __future__ import annotations

import os
import secrets
import zlib

import numpy as np


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """The generator for (seed, purpose, counters): up to three counters, such as (round, client, epoch).

    >>> draw = lambda: generator(0, "order", 3, 7).permutation(5).tolist()
    >>> draw() == draw()
    True
    """
    if len(counters) > 3:
        raise ValueError(f"at most three counters, got {counters}")
    key = [seed & 0xFFFFFFFFFFFFFFFF, zlib.crc32(purpose.encode())]
    words = [0, *counters, *[0] * (3 - len(counters))]
    return np.random.Generator(np.random.Philox(key=key, counter=words))


def given_seed(seed: int | None) -> int | None:
    """A run's seed: its own, else that of ``seed_everything``, else None."""
    everything = os.environ.get("PL_GLOBAL_SEED")
    return int(everything) if seed is None and everything else seed


def fresh_seed() -> int:
    """A seed drawn afresh."""
    return secrets.randbelow(2**31)
