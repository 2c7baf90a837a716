"""A local step recorded and replayed leaves the same bits as one that runs each time, or runs each
time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import callbacks as c
from fl_lightning.callback import ClientState, FederatedCallback, Scratch, Upload
from fl_lightning.engines import registry
from fl_lightning.engines.fast.gpu_streams import Streams
from fl_lightning.engines.fast.recording import Recording
from fl_lightning.schedules import Exponential
from tests.helpers.learners import Lit, Normed, momentum
from tests.helpers.low_rank import LowRank
from tests.helpers.replays import assert_same, ran, replayed


class Convolving(Lit):
    """Convolutions, group normalisation, pooling, a part without gradient, a frozen one, and a
    constant."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 4, 5)),
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 4),
        )
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(20, 4).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scores = self.net(x) + torch.tensor(0.1) * self.frozen(x)
        scores = scores.index_select(1, torch.arange(4))
        loss = nn.functional.cross_entropy(scores, y, label_smoothing=0.1)
        self.log_dict({"train/loss": loss, "train/acc": (scores.argmax(1) == y).double().mean()})
        return loss


class Adapter(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = LowRank(8, 4, 2, 1.5)


class Counting(FederatedCallback):
    """State of every kind, changed in each step in place and by assignment."""

    number, scratch = ClientState(shape=(2,), synchronised=False), Scratch()

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        self.scratch[clients] = 0.5 * self.scratch[clients] + gradient
        return (
            gradient
            + 0.01 * self.scratch[clients] * clients.weights
            + 1e-3 * (clients.x - clients.start)
        )

    def on_local_step_end(self, clients: Any) -> None:
        self.number[clients] += 1 / clients.steps


class ByName(FederatedCallback):
    def on_local_gradient(self, clients: Any, gradient: Tensor) -> None:
        gradient.mul_(1 + clients.client_ids[0] / 10)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


CASES: dict[str, tuple[type[Lit], Any, dict[str, Any]]] = {
    "plain": (Lit, lambda: [], {}),
    "buffers": (Normed, lambda: [], {}),
    "convolutions": (Convolving, lambda: [], {}),
    "momentum kept": (
        Lit,
        lambda: [],
        {"client_optimizer": momentum, "keep_optimizer_state": True},
    ),
    "adam": (Lit, lambda: [], {"client_optimizer": adam}),
    "adamw kept": (
        Lit,
        lambda: [c.ControlVariates()],
        {"client_optimizer": adamw, "keep_optimizer_state": True},
    ),
    "clipping": (
        Lit,
        lambda: [c.ProximalTerm(Exponential(0.5))],
        {"clip_norm": 0.5, "lr_decay": 0.9},
    ),
    "fedsmoo": (
        Normed,
        lambda: [c.GlobalSharpnessAwareMinimization(0.05), c.DynamicRegularization()],
        {},
    ),
    "fedsam fedcm": (Lit, lambda: [c.SharpnessAwareMinimization(0.05), c.ClientMomentum()], {}),
    "scaffold fedinit": (
        Lit,
        lambda: [c.ControlVariates(), c.RelaxedInitialization()],
        {"weighting": "samples"},
    ),
    "fedals scaffold": (Lit, lambda: [c.PartialAveraging(period=2), c.ControlVariates()], {}),
    "own state": (Lit, lambda: [Counting()], {}),
    "by client": (Lit, lambda: [ByName()], {}),
    "fedrep": (Normed, lambda: [c.AlternatingHead(0.5)], {}),
    "ditto": (Lit, lambda: [c.ProximalPersonalModel()], {}),
    "pfedme": (Lit, lambda: [c.MoreauEnvelope(inner_steps=2)], {}),
    "fedlesam": (Lit, lambda: [c.LocallyEstimatedPerturbation(0.1)], {}),
    "fedspeed": (Lit, lambda: [c.MixedAscent(0.1, 0.5, 0.1)], {}),
    "rolora": (Adapter, lambda: [c.FactorSchedule(["B", "A"])], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_replays_leave_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected, _ = ran(*CASES[name], engine="sequential")
    module, found, engine = ran(*CASES[name], capture=True, workers=2)
    assert module.engine_facts["capture"] == "yes" and replayed(engine) > 100
    assert_same(expected, found)
    # the GPU's engine, without streams, with more clients than workers
    monkeypatch.setattr(
        registry, "Threads", lambda workers, learner, note: Streams(workers, learner)
    )
    _, found, engine = ran(*CASES[name], capture=True, workers=3)
    assert isinstance(engine, Streams) and replayed(engine) > 0
    assert_same(expected, found)


class Remembering(FederatedCallback):
    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        before, clients.before = getattr(clients, "before", gradient), gradient.clone()
        return 0.5 * (gradient + before)


def test_methods_of_users_are_captured_when_asked_for_and_then_with_the_same_bits() -> None:
    _, expected, _ = ran(Lit, lambda: [Remembering()], {}, engine="sequential")
    module, found, _ = ran(Lit, lambda: [Remembering()], {})
    assert "Remembering is not a packaged method" in module.engine_facts["capture"]
    assert_same(expected, found)
    _, found, _ = ran(Lit, lambda: [Remembering()], {}, capture=True)
    assert_same(expected, found)


class Telling(FederatedCallback):
    sent = Upload()

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> None:
        clients.log("norm", clients.norm(gradient))
        self.sent[clients] = 2 * gradient

    def on_server_update(self, server: Any) -> None:
        server.log("sent", self.sent.mean().norm())


def test_hooks_that_log_or_upload_in_each_step() -> None:
    _, expected, _ = ran(Lit, lambda: [Telling()], {}, engine="sequential")
    _, found, _ = ran(Lit, lambda: [Telling()], {}, capture=True)
    assert_same(expected, found)


@pytest.mark.usefixtures("short_steps")
def test_capture_takes_auto_true_and_false() -> None:
    for capture, expected in (("auto", "yes"), (True, "yes"), (False, "no: not asked for")):
        module, _, _ = ran(Lit, list, {}, capture=capture)
        assert module.engine_facts["capture"] == expected


class Indexed(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + batch_idx % 2)


class Reading(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 1 else 2 * loss


class Outside(Lit):
    """Computes where no dispatcher sees it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = torch.from_numpy(np.abs(batch[0].numpy()).mean(1))
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        self.log("train/loss", loss.mean())
        return (loss * weight).mean()


class Metrical(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("train/acc", self.accuracy)
        return super().training_step(batch, batch_idx)


REFUSED = {
    Indexed: "uses batch_idx",
    Reading: "reads a value",
    Outside: "values of a tensor are read",
    Metrical: "changes accuracy",
}


@pytest.mark.parametrize("learner", REFUSED, ids=lambda learner: learner.__name__)
def test_steps_that_cannot_be_replayed_run_each_time(learner: type[Lit]) -> None:
    _, expected, _ = ran(learner, list, {}, engine="sequential")
    with pytest.warns(UserWarning, match="local steps are not captured"):
        module, found, _ = ran(learner, list, {}, capture=True)
    assert (
        module.engine_facts["capture"].startswith("no: ")
        and REFUSED[learner] in module.engine_facts["capture"]
    )
    assert_same(expected, found)


def test_a_hook_that_reads_a_value_ends_capture_and_not_the_run() -> None:
    class Looking(FederatedCallback):
        def on_local_gradient(self, clients: Any, gradient: Tensor) -> None:
            if float(gradient.abs().max()) > 0.05:
                gradient.mul_(0.5)

    _, expected, _ = ran(Lit, lambda: [Looking()], {}, engine="sequential")
    with pytest.warns(UserWarning, match="local steps are not captured"):
        _, found, engine = ran(Lit, lambda: [Looking()], {}, capture=True)
    assert_same(expected, found)
    assert replayed(engine) == 0


class Later(Normed):
    """Steps that can be replayed in round 0 and not in the next ones: each in its own way."""

    way = ""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(20))
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.current_epoch == 0:
            return loss
        if self.way == "index":
            return loss * (1 + batch_idx % 2)
        if self.way == "buffer":
            self.mean = 0.9 * self.mean + 0.1 * batch[0].mean(0)
            return loss + 0.1 * self.mean.sum() * self.net[0].bias.sum()
        if self.way == "attribute":
            self.calls += 1
            return loss * (0.5 if self.calls % 4 == 0 else 1)
        return loss * (3 if 3 not in batch[1].tolist() else 1)


@pytest.mark.parametrize("way", ["index", "buffer", "attribute", "values"])
def test_steps_that_change_in_a_later_round_run_each_time(way: str) -> None:
    def make() -> Later:
        learner = Later()
        learner.way = way
        return learner

    # what is kept on the learner goes on in its copy
    alone = {"workers": 1} if way == "attribute" else {}
    _, expected, _ = ran(make, list, {}, capture=False, **alone)
    with pytest.warns(UserWarning, match="local steps are not captured"):
        module, found, _ = ran(make, list, {}, capture=True, **alone)
    assert module.engine_facts["capture"].startswith("no: ")  # which round 0 could not tell
    assert_same(expected, found)


COPIES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], object]] = {
    "once": lambda x, w, out, other: out.copy_(x @ w),
    "twice": lambda x, w, out, other: (p := x @ w, out.copy_(p), other.copy_(p)),
    "onto what was read before": lambda x, w, out, other: (
        p := x @ w,
        other.add_(out),
        out.copy_(p),
    ),
    "onto a part that is read before": lambda x, w, out, other: (
        p := x @ w,
        other.add_(out[1, 2]),
        out.copy_(p),
    ),
    "onto a factor": lambda x, w, out, other: out.copy_(out @ w),
    "transposed": lambda x, w, out, other: out.copy_((x @ w).t()),
    "in another dtype": lambda x, w, out, other: out.copy_(x.double() @ w.double()),
    "to more rows": lambda x, w, out, other: out.copy_(x[:1] @ w),
    "each from the other": lambda x, w, out, other: (
        n := x.t() @ other,
        p := x @ out,
        other.copy_(p),
        out.copy_(n),
    ),
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
    """Parameters that begin anywhere in memory. The last bits of a matrix product depend on where
    it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(3))
        self.net = nn.Sequential(
            nn.Linear(20, 84), nn.ReLU(), nn.Linear(84, 10), nn.ReLU(), nn.Linear(10, 4)
        )


class Embedding(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.net = nn.Embedding(4, 20, sparse=True), nn.Linear(20, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x + self.table(y)), y)


class Elsewhere(FederatedCallback):
    def on_local_start(self, clients: Any) -> None:
        if clients.client_ids[0] % 2:
            clients.x.mul_(0.9)


ODD: dict[str, tuple[type[Lit], Callable[[], list[Any]]]] = {
    "unaligned parameters": (Uneven, lambda: [c.ControlVariates()]),
    "unaligned parameters, twice": (
        Uneven,
        lambda: [c.SharpnessAwareMinimization(0.05), c.ControlVariates()],
    ),
    "sparse gradients": (
        Embedding,
        lambda: [c.SharpnessAwareMinimization(0.05), c.ControlVariates()],
    ),
    "starts of their own": (Lit, lambda: [Elsewhere(), c.ProximalTerm(0.5), c.ControlVariates()]),
}


@pytest.mark.parametrize("case", list(ODD))
def test_odd_learners_and_starts_have_the_same_bits_when_replayed(case: str) -> None:
    learner, methods = ODD[case]
    _, expected, _ = ran(learner, methods, {}, engine="sequential")
    module, found, engine = ran(learner, methods, {}, capture=True)
    assert module.engine_facts["capture"] == "yes" and replayed(engine) > 0
    assert_same(expected, found)
