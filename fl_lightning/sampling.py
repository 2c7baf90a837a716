"""Counter-based randomness: every draw is a function of (seed, purpose, counters).

So who is sampled, the order of samples and their augmentation do not depend on resumes, the size of
a group, the engine or the number of processes.
"""

from __future__ import annotations

import operator
import os
import secrets
import zlib
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from fl_lightning.errors import UserError


class _Key(ISeedSequence):
    """Philox's key, set directly.

    ``Philox(key=…)`` reads the system's entropy first, which takes five times as long.
    """

    def __init__(self, *key: int) -> None:
        self.key = np.array(key, np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[np.uint64]:
        return self.key


def generator(seed: int, purpose: str, *counters: int) -> np.random.Generator:
    """Return the generator for (seed, purpose, counters), up to three, such as (round, client,
    epoch).

    >>> draw = lambda: generator(0, "order", 3, 7).permutation(5).tolist()
    >>> draw() == draw()
    True

    Raises:
        UserError: the seed is not an integer from 0 to 2**63 - 1.
    """
    if type(seed) is not int or not 0 <= seed < 2**63:
        seed = check_seed("seed", seed)
    # Philox uses the first word of its counter to count draws, so our counters use the other three.
    words: Any = np.array([0, *counters, *[0] * (3 - len(counters))], np.uint64)
    key: Any = _Key(seed, zlib.crc32(purpose.encode()))
    return np.random.Generator(np.random.Philox(key, counter=words))


def given_seed(seed: int | None) -> int | None:
    """Return a run's seed: its own, else that of ``seed_everything``, else None."""
    everything = os.environ.get("PL_GLOBAL_SEED")
    return int(everything) if seed is None and everything else seed


def fresh_seed() -> int:
    """A seed drawn afresh."""
    return secrets.randbelow(2**31)


def check_seed(name: str, seed: Any) -> int:
    """Return the seed as an integer; refuse a value that would act as another seed.

    Raises:
        UserError: the seed is not an integer, negative, or at least 2**63 (all of those would draw
            the same).
    """
    try:
        value = -1 if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        value = -1
    if not 0 <= value < 2**63:
        raise UserError(f"{name} is {seed!r}: give an integer from 0 to 2**63 - 1 ({2**63 - 1}).")
    return value
