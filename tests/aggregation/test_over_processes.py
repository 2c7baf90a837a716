"""The ordered sum: the same bits whatever the order of adding and the number of processes."""

from __future__ import annotations

import math
import random
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning.aggregation.over_processes import TreeSum, sum_over_processes, visiting_order
from fl_lightning.round.client_sums import Place, Sums
from tests.helpers.processes import grouped

torch.set_num_threads(1)


@dataclass
class Leaf(Sums):
    MAXIMA = "maxima"

    x: Tensor | None = None
    n: Tensor | None = None
    maxima: dict[str, Tensor] = field(default_factory=dict)
    logs: dict[str, Tensor] = field(default_factory=dict)


def leaf(seed: int, part: bool = True) -> Leaf | None:
    """Numbers of many magnitudes, so that the order of adding shows in the last bits. Some leaves
    lack an entry."""
    draw = torch.Generator().manual_seed(seed)
    if not part:
        return None
    row = torch.randn(7, generator=draw) * 10.0 ** torch.randint(-6, 7, (7,), generator=draw)
    largest = torch.randint(-50, 50, (2,), generator=draw)
    logs = {"loss": row[:1].double()} if seed % 3 else {}
    return Leaf(x=row, maxima={"k": largest}, n=torch.tensor(1), logs=logs)


def leaves(parts: list[bool]) -> list[Leaf | None]:
    return [leaf(seed, part) for seed, part in enumerate(parts)]


def reference(of: list[Leaf | None]) -> Leaf | None:
    """The definition: what the even leaves come to with what the odd ones come to."""
    if len(of) < 2:
        return of[0] if of else None
    even, odd = reference(of[0::2]), reference(of[1::2])
    if even is None or odd is None:
        return odd if even is None else even
    total = odd.kept(["x", "n", "maxima", "logs"])
    for place, value in even.parts():
        other = odd.get(place)
        if other is None:
            total.put(place, value)
        elif place[0] == "maxima":
            total.put(place, torch.maximum(value, other))
        else:
            total.put(place, value + other)
    return total


def summed(of: list[Leaf | None], order: list[int]) -> Leaf | None:
    tree: TreeSum[Leaf] = TreeSum(len(of))
    for j in order:
        tree.add(j, of[j])
    return tree.total


def bits(total: Leaf | None) -> dict[Place, tuple[torch.dtype, bytes]] | None:
    if total is None:
        return None
    return {place: (value.dtype, value.numpy().tobytes()) for place, value in total.parts()}


takes_part = st.lists(st.sampled_from([True, True, True, False]), max_size=40)


@given(takes_part, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_any_order_of_adding_gives_the_bits_of_the_definition(
    parts: list[bool], draw: random.Random
) -> None:
    order = list(range(len(parts)))
    draw.shuffle(order)
    assert bits(summed(leaves(parts), order)) == bits(reference(leaves(parts)))


@given(takes_part, st.sampled_from([2, 4, 8]), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_processes_own_subtrees_of_it(parts: list[bool], world: int, draw: random.Random) -> None:
    of, totals = leaves(parts), []
    for rank in range(world):
        mine = of[rank::world]
        order = list(range(len(mine)))
        draw.shuffle(order)
        totals.append(summed(mine, order))
    assert bits(summed(totals, list(range(world)))) == bits(reference(leaves(parts)))


@pytest.mark.parametrize("n", [1, 2, 6, 32, 100, 1000])
def test_in_its_visiting_order_few_leaves_are_held_at_once(n: int) -> None:
    tree: TreeSum[Leaf] = TreeSum(n)
    alive, most = list[weakref.ref[Tensor]](), 0
    for j in visiting_order(n):
        row = torch.ones(1)
        alive.append(weakref.ref(row))
        tree.add(j, Leaf(x=row))
        del row
        alive = [ref for ref in alive if ref() is not None]
        most = max(most, len(alive))
    assert tree.total is not None and tree.total.x is not None and float(tree.total.x) == n
    assert most <= math.ceil(math.log2(n)) + 1


@settings(deadline=None)
@given(takes_part, st.randoms(use_true_random=False))
def test_what_is_lent_is_neither_kept_nor_changed(parts: list[bool], order: random.Random) -> None:
    of, shared = leaves(parts), leaves(parts)
    tree: TreeSum[Leaf] = TreeSum(len(of))
    visited = order.sample(range(len(of)), len(of))
    for j in visited:
        values = shared[j]
        tree.add(j, values, shared=("x", "maxima", "n", "logs"))
        assert bits(values) == bits(of[j])
        for _, value in () if values is None else values.parts():
            value.fill_(99)  # its owner goes on
    assert bits(tree.total) == bits(summed(of, visited))


def of_one_process(folder: Path, parts: list[bool], rank: int, world: int) -> None:
    mine = leaves(parts)[rank::world]
    total = sum_over_processes(summed(mine, visiting_order(len(mine))), Leaf)
    torch.save(bits(total), folder / f"{world}-{rank}.pt")


@pytest.mark.parametrize(
    "parts", [[True] * 11, [True, False] * 5, [False, False, True], [False] * 4, []], ids=len
)
def test_real_processes_come_to_the_bits_of_one(tmp_path: Path, parts: list[bool]) -> None:
    of_one_process(tmp_path, parts, 0, 1)
    expected = torch.load(tmp_path / "1-0.pt", weights_only=False)
    for world in (2, 4):
        grouped(of_one_process, world, tmp_path, parts)
        for rank in range(world):
            total = torch.load(tmp_path / f"{world}-{rank}.pt", weights_only=False)
            assert total == expected
            assert list(total or ()) == list(expected or ()), "columns follow its order"
