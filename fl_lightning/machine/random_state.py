"""The process's random generators: they are seeded and restored, and draws are detected."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.sampling import generator


class RandomState:
    """The present states of the process's random generators.

    These are torch's generators (the CPU's, and that of x's device), NumPy's and Python's.
    ``torch_alone``: leave out NumPy's and Python's, which are slow to read.
    """

    def __init__(self, x: Tensor | None = None, torch_alone: bool = False) -> None:
        self.torch = torch.get_rng_state()
        self.torch_alone = torch_alone
        self.numpy: Any = None if torch_alone else np.random.get_state()
        self.python: Any = None if torch_alone else random.getstate()
        self.device = x.device if x is not None and x.is_cuda else None
        self.cuda = None if self.device is None else torch.cuda.get_rng_state(self.device)

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        if not self.torch_alone:
            np.random.set_state(self.numpy)
            random.setstate(self.python)
        if self.cuda is not None and self.device is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)

    def drawn_since(self) -> bool:
        """Return whether anything was drawn since then, from any generator that was read."""
        now = RandomState()
        if self.device is not None and self.cuda is not None:
            now.cuda = torch.cuda.get_rng_state(self.device)
        return not (
            (self.cuda is None or now.cuda is None or torch.equal(self.cuda, now.cuda))
            and torch.equal(self.torch, now.torch)
            and self.python == now.python
            and self.numpy[2:] == now.numpy[2:]
            and bool((self.numpy[1] == now.numpy[1]).all())
        )


class PassDraws:
    """The process's generators as the passes of one client begin; ``draws``: whether any may draw.

    Reading the generators of NumPy and Python is slow. A learner draws in its first step or never,
    so if it did not, only torch's are read afterwards.
    """

    def __init__(self, x: Tensor, draws: bool) -> None:
        self.x = x
        self.draws = draws
        self._torch_alone = False

    def now(self) -> RandomState | None:
        return RandomState(self.x, self._torch_alone) if self.draws else None

    def passed(self, before: RandomState | None) -> None:
        """A pass that began with ``before`` is over."""
        if before is not None and not self._torch_alone:
            self._torch_alone = not before.drawn_since()


@contextmanager
def drawn_again(before: RandomState | None, x: Tensor) -> Iterator[None]:
    """Within this context generators go on from ``before``; None: they stay as they are."""
    if before is None:
        yield
        return
    present = RandomState(x, before.torch_alone)
    before.restore()
    try:
        yield
    finally:
        present.restore()


@contextmanager
def random_state_kept(x: Tensor | None = None) -> Iterator[None]:
    """Restore the global random generators afterwards, also that of x's device."""
    state = RandomState(x)
    try:
        yield
    finally:
        state.restore()


def seed_client(seed: int, round: int, client: int, purpose: str = "learner") -> None:
    """Make the learner's random numbers a function of (seed, round, client)."""
    draw = int(generator(seed, purpose, round, client).integers(2**63))
    # `torch.manual_seed` formats a stack trace for CUDA's queue, which takes 1 ms per client.
    torch.default_generator.manual_seed(draw)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(draw)
    np.random.seed(draw % 2**32)
    random.seed(draw)


def seed_round(seed: int, round: int) -> None:
    """Make random numbers outside of clients, as in validation, a function of (seed, round)."""
    seed_client(seed, round, 0, "round")
