"""What a recording holds: products at any address, sparse gradients, and starts of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.callback import FederatedCallback
from fl_lightning.callbacks import (
    ControlVariates,
    ProximalTerm,
    SharpnessAwareMinimization,
)
from fl_lightning.engines.fast.recording import Recording
from tests.helpers.learners import Lit
from tests.helpers.replays import assert_same, ran, replayed

pytestmark = pytest.mark.fast

COPIES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], object]] = {
    "once": lambda x, w, out, other: out.copy_(x @ w),
    "twice": lambda x, w, out, other: (p := x @ w, out.copy_(p), other.copy_(p)),
    "onto what was read before": lambda x, w, out, other: (
        p := x @ w,
        other.add_(out),
        out.copy_(p),
    ),
    "onto what is written before": lambda x, w, out, other: (p := x @ w, out.zero_(), out.copy_(p)),
    "onto a part that is read before": lambda x, w, out, other: (
        p := x @ w,
        other.add_(out[1, 2]),
        out.copy_(p),
    ),
    "onto a factor": lambda x, w, out, other: out.copy_(out @ w),
    "transposed": lambda x, w, out, other: out.copy_((x @ w).t()),
    "transposed twice": lambda x, w, out, other: out.copy_((w.t() @ x.t()).t().t()),
    "in another dtype": lambda x, w, out, other: out.copy_(x.double() @ w.double()),
    "to more rows": lambda x, w, out, other: out.copy_(x[:1] @ w),
    "each from the other": lambda x, w, out, other: (
        n := x.t() @ other,
        p := x @ out,
        other.copy_(p),
        out.copy_(n),
    ),
    "to a transposed place": lambda x, w, out, other: out.t().copy_(x @ w),
}


@pytest.mark.parametrize("way", list(COPIES))
def test_a_product_that_is_copied_is_the_same_when_replayed(way: str) -> None:
    draw = torch.Generator().manual_seed(3)
    batches = [torch.randn(4, 4, generator=draw) for _ in range(4)]
    w, start = torch.randn(4, 4, generator=draw), torch.randn(4, 4, generator=draw)
    recorded, eager = (start.clone(), start.clone()), (start.clone(), start.clone())
    recording = Recording([batches[0]], {})
    with torch.no_grad():
        with recording:
            COPIES[way](batches[0], w, *recorded)
        COPIES[way](batches[0], w, *eager)
        for batch in batches[1:]:
            recording.replay([batch], {})
            COPIES[way](batch, w, *eager)
    assert not recording.refused
    assert torch.equal(recorded[0], eager[0]) and torch.equal(recorded[1], eager[1])


class Uneven(Lit):
    """Parameters that begin anywhere in memory.

    The last bits of a matrix product depend on where it is written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(3))
        self.net = nn.Sequential(
            nn.Linear(20, 84), nn.ReLU(), nn.Linear(84, 10), nn.ReLU(), nn.Linear(10, 4)
        )


class Embedding(Lit):
    """A sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(4, 20, sparse=True), nn.Linear(20, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x + self.table(y)), y)


class Elsewhere(FederatedCallback):
    """Some clients start elsewhere than at w."""

    def on_local_start(self, clients: Any) -> None:
        if clients.client_ids[0] % 2:
            clients.x.mul_(0.9)


ODD: dict[str, tuple[type[Lit], Callable[[], list[Any]]]] = {
    "unaligned parameters": (Uneven, lambda: [ControlVariates()]),
    "unaligned parameters, twice": (
        Uneven,
        lambda: [SharpnessAwareMinimization(0.05), ControlVariates()],
    ),
    "sparse gradients": (Embedding, lambda: [SharpnessAwareMinimization(0.05), ControlVariates()]),
    "starts of their own": (Lit, lambda: [Elsewhere(), ProximalTerm(0.5), ControlVariates()]),
}


@pytest.mark.parametrize("case", list(ODD))
def test_odd_learners_and_starts_have_the_same_bits_when_replayed(case: str) -> None:
    learner, methods = ODD[case]
    _, expected, _ = ran(learner, methods, {}, engine="sequential")
    module, found, engine = ran(learner, methods, {}, capture=True)
    assert module.engine_facts["capture"] == "yes" and replayed(engine) > 0
    assert_same(expected, found)
