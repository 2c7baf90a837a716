"""How buffers are combined: statistics by mean, counters by maximum; memory stays."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor, nn

from fl_lightning.errors import UserError, suggest
from fl_lightning.learner.layout import is_norm
from fl_lightning.learner.modules import lightning_base

BufferWord = Literal["average", "keep", "own"]
STATISTIC = re.compile(r"^(running|moving)_(mean|var|variance|std)$")
COUNTER = {"count", "counts", "counter", "num", "n", "number", "step", "steps", "passes", "batches"}
COUNTER |= {"tracked", "updates", "iter", "iters", "iterations", "epochs", "calls"}
SHOWN = 4  # names in a note


class BufferPolicy:
    """Decides which buffers the server averages, and which each client keeps as its own.

    Args:
        given: one word for all buffers, or patterns of names with a word each. The first pattern
            that matches decides; buffers without a match are ``"average"``.

    ``as_buffers``: frozen parameters that the learner's steps write, which are averaged as weights
        are.

    Raises:
        UserError: a pattern matches no buffer.
    """

    def __init__(self, learner: nn.Module, given: str | Mapping[str, str]) -> None:
        self.given = given
        self.learner = type(learner).__name__
        self.as_buffers: tuple[str, ...] = ()
        slots, _ = buffer_slots(learner)
        self.of_norms: set[str] = set()
        for name, places in slots.items():
            if any(normalises(module) for module, _ in places):
                self.of_norms.add(name)
        self._told = set[str]()
        frozen = [name for name, p in learner.named_parameters() if not p.requires_grad]
        self._check([*slots, *frozen] if slots else [])

    def _check(self, names: list[str]) -> None:
        # A learner without buffers accepts any patterns, so that one config serves several
        # networks.
        if isinstance(self.given, str) or not names:
            return
        for pattern in self.given:
            if pattern.strip("*") and not any(fnmatchcase(name, pattern) for name in names):
                raise UserError(
                    f"buffers={self.given!r}: no buffer of {self.learner} is called {pattern!r}; "
                    f"there are {', '.join(names)[:200]}.{suggest(pattern, names)}"
                )

    def word(self, name: str) -> str:
        if isinstance(self.given, str):
            return "" if self.given == "average" else self.given
        for pattern, word in self.given.items():
            if fnmatchcase(name, pattern):
                return word
        return ""

    def averages(self, name: str, value: Tensor) -> bool:
        """Return whether the server takes the clients' mean, or for integers the maximum."""
        word = self.word(name)
        return word == "average" or (word != "keep" and self.known(name, value))

    def known(self, name: str, value: Tensor) -> bool:
        """Whether it is a normalisation layer's statistic, a counting integer, or a weight."""
        leaf = name.rpartition(".")[2]
        if name in self.of_norms:
            return True
        if value.is_floating_point() or value.is_complex():
            return name in self.as_buffers or bool(STATISTIC.search(leaf))
        return value.numel() == 1 and bool(COUNTER & set(leaf.lower().split("_")))

    def own(self, names: Iterable[str]) -> frozenset[str]:
        return frozenset(name for name in names if self.word(name) == "own")

    def untold(self, name: str, value: Tensor) -> bool:
        """Return whether only its name makes it the server's, and no note has said so yet."""
        return name not in self._told and not self.word(name) and not self.known(name, value)

    def name_kept(self, changed: Collection[str], note: Callable[[str], None]) -> None:
        """Note which buffers change in local steps although the server keeps its own values."""
        names = sorted(set(changed) - self._told)
        if not names:
            return
        self._told.update(names)
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        note(
            f"buffers: {self.learner} changes {', '.join(names[:SHOWN])}{more} in its local "
            "steps, and the buffer's name is neither that of a normalisation layer's statistic nor "
            "that of "
            "a counter. So the server keeps its value, and clients start each round from it. To "
            f"change that, give buffers={{{names[0]!r}: 'average'}} (integers: the maximum), "
            "'keep' "
            "or 'own' (each client keeps its own)"
        )


def normalises(module: nn.Module) -> bool:
    # A whole learner is not a normalisation layer, whatever its name is.
    if lightning_base(module) is not None:
        return False
    # torch.nn.utils.spectral_norm puts its vectors on the layer itself, and a hook with them.
    for hook in module._forward_pre_hooks.values():
        if type(hook).__name__ == "SpectralNorm":
            return True
    return is_norm(module)


def buffer_slots(
    learner: nn.Module,
) -> tuple[dict[str, list[tuple[nn.Module, str]]], dict[str, Tensor | None]]:
    """Return the places of each buffer (a shared one has several), and its tensor, or None."""
    slots: dict[str, list[tuple[nn.Module, str]]] = {}
    tensors: dict[str, Tensor | None] = {}
    names: dict[int, str] = {}
    for prefix, module in learner.named_modules():
        for leaf, buffer in module._buffers.items():
            name = f"{prefix}.{leaf}" if prefix else leaf
            name = name if buffer is None else names.setdefault(id(buffer), name)
            slots.setdefault(name, []).append((module, leaf))
            tensors[name] = buffer
    return slots, tensors


def buffer_values(learner: nn.Module, as_buffers: Collection[str] = ()) -> dict[str, Tensor]:
    """Copies of a learner's buffers by name, and of the parameters counted ``as_buffers``."""
    values = {n: b.detach().clone() for n, b in learner.named_buffers() if b is not None}
    named = learner.named_parameters() if as_buffers else ()
    return values | {n: p.detach().clone() for n, p in named if n in as_buffers}
