"""What a learner keeps, written down: any change of it is told, and a copy has the same."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning.learner.attributes import Attributes

TOTAL = [0]


class Slotted:
    __slots__ = ("calls",)


class Keeping(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 3)
        self.number = 1
        self.torch, self.numpy = torch.Generator(), np.random.default_rng(0)
        self.python = random.Random(0)
        self.iterator, self.counted = iter([1, 2, 3]), itertools.count()
        self.long, self.slots = [float(i) for i in range(5000)], Slotted()
        self.slots.calls = 0
        self.nested = SimpleNamespace(a={"b": [[0.0]]})
        self.hidden = [nn.Linear(2, 2)]
        self.tensor = torch.zeros(2)
        self.own = [self.net.weight]
        self.bound = self.total
        calls = 0

        def count() -> None:
            nonlocal calls
            calls += 1

        self.closure = count

    def total(self) -> None:
        TOTAL[0] += 1


def count_of_class(_: Any) -> None:
    Keeping.calls += 1


CHANGES: dict[str, Callable[[Any], object]] = {
    "number": lambda k: setattr(k, "number", 2),
    "torch": lambda k: torch.rand(1, generator=k.torch),
    "numpy": lambda k: k.numpy.random(),
    "python": lambda k: k.python.random(),
    "iterator": lambda k: next(k.iterator),
    "counted": lambda k: next(k.counted),
    "long": lambda k: k.long.__setitem__(4000, -1.0),
    "slots": lambda k: setattr(k.slots, "calls", 1),
    "nested": lambda k: k.nested.a["b"][0].append(1.0),
    "hidden": lambda k: k.hidden[0].weight.data.add_(1),
    "tensor": lambda k: k.tensor.add_(1),
    "closure": lambda k: k.closure(),
    "new": lambda k: setattr(k, "new", None),
    "Keeping.total": lambda k: k.total(),
    "Keeping.calls": count_of_class,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_told_by_its_name(name: str) -> None:
    keeping = Keeping()
    before = Attributes(keeping)
    assert not before.changed(Attributes(keeping))
    CHANGES[name](keeping)
    assert before.changed(Attributes(keeping)) == [name]


def test_a_copy_has_the_same_and_parameters_do_not_count() -> None:
    keeping = Keeping()
    copied = copy.deepcopy(keeping)
    copied.net.weight.data.add_(1)
    assert not Attributes(keeping).changed(Attributes(copied))


@pytest.mark.parametrize("name", ["tensor", "closure", "Keeping.calls"])
def test_by_who_they_are_what_is_done_in_place_does_not_count(name: str) -> None:
    keeping = Keeping()
    before = Attributes(keeping, values=False)
    CHANGES[name](keeping)
    assert not before.changed(Attributes(keeping, values=False))
    keeping.tensor = keeping.tensor.clone()
    assert before.changed(Attributes(keeping, values=False)) == ["tensor"]


def test_what_cannot_be_written_counts_by_who_it_is() -> None:
    keeping = Keeping()
    keeping.lock = threading.Lock()
    before = Attributes(keeping)
    assert not before.changed(Attributes(keeping))
    keeping.lock = threading.Lock()
    assert before.changed(Attributes(keeping)) == ["lock"]
