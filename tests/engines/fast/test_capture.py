"""A local step recorded and replayed leaves the same bits as one that runs each time, or runs each
time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.callback import ClientState, FederatedCallback, Scratch, Upload
from fl_lightning.callbacks import (
    ClientMomentum,
    ControlVariates,
    DynamicRegularization,
    GlobalSharpnessAwareMinimization,
    PartialAveraging,
    ProximalTerm,
    RelaxedInitialization,
    SharpnessAwareMinimization,
)
from fl_lightning.engines import registry
from fl_lightning.engines.fast.gpu_streams import Streams
from fl_lightning.schedules import Exponential
from tests.helpers.learners import Lit, Normed, blobs, federated, momentum, trainer
from tests.helpers.replays import assert_same, ran, replayed

pytestmark = pytest.mark.fast


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


class Attending(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.net = nn.Sequential(
            nn.Unflatten(1, (5, 4)), self.inside, nn.Flatten(), nn.Linear(20, 4)
        )


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
    """Treats clients differently by their number, in Python."""

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
    "attention": (Attending, lambda: [], {}),
    "momentum kept": (
        Lit,
        lambda: [],
        {"client_optimizer": momentum, "keep_optimizer_state": True},
    ),
    "adam": (Lit, lambda: [], {"client_optimizer": adam}),
    "adamw kept": (
        Lit,
        lambda: [ControlVariates()],
        {"client_optimizer": adamw, "keep_optimizer_state": True},
    ),
    "clipping": (
        Lit,
        lambda: [ProximalTerm(Exponential(0.5))],
        {"clip_norm": 0.5, "lr_decay": 0.9},
    ),
    "fedsmoo": (
        Normed,
        lambda: [GlobalSharpnessAwareMinimization(0.05), DynamicRegularization()],
        {},
    ),
    "fedsam fedcm": (Lit, lambda: [SharpnessAwareMinimization(0.05), ClientMomentum()], {}),
    "scaffold fedinit": (
        Lit,
        lambda: [ControlVariates(), RelaxedInitialization()],
        {"weighting": "samples"},
    ),
    "fedals scaffold": (Lit, lambda: [PartialAveraging(period=2), ControlVariates()], {}),
    "own state": (Lit, lambda: [Counting()], {}),
    "by client": (Lit, lambda: [ByName()], {}),
}


@pytest.mark.parametrize("name", CASES)
def test_replays_leave_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected, _ = ran(*CASES[name], engine="sequential")
    for workers in (1, 2):
        module, found, engine = ran(*CASES[name], capture=True, workers=workers)
        assert module.engine_facts["capture"] == "yes" and replayed(engine) > 100
        assert_same(expected, found)
    # the GPU's engine, without streams, with more clients than workers
    monkeypatch.setattr(
        registry, "Threads", lambda workers, learner, note: Streams(workers, learner)
    )
    for capture in (True, False):
        _, found, engine = ran(*CASES[name], capture=capture, workers=3)
        assert isinstance(engine, Streams) and (replayed(engine) if capture else 1) > 0
        assert_same(expected, found)


class Noisy(FederatedCallback):
    """Draws from a generator that each client is given at its start, and keeps a tensor on the
    client."""

    def on_local_start(self, clients: Any) -> None:
        clients.draws = torch.Generator().manual_seed(1000 * clients.round + clients.client_ids[0])
        clients.scale = float(clients.steps)

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        noise = torch.randn(gradient.shape, generator=clients.draws, dtype=gradient.dtype)
        return gradient + 0.01 * noise / clients.scale


class Remembering(FederatedCallback):
    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        before, clients.before = getattr(clients, "before", gradient), gradient.clone()
        return 0.5 * (gradient + before)


class NumPyNoise(FederatedCallback):
    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.from_numpy(np.tanh(gradient.numpy()))


@pytest.mark.parametrize("method", [Noisy, Remembering, NumPyNoise])
def test_methods_of_users_are_captured_when_asked_for_and_then_with_the_same_bits(
    method: type[Any],
) -> None:
    _, expected, _ = ran(Lit, lambda: [method()], {}, engine="sequential")
    module, found, _ = ran(Lit, lambda: [method()], {})
    assert f"{method.__name__} is not a packaged method" in module.engine_facts["capture"]
    assert_same(expected, found)
    _, found, _ = ran(Lit, lambda: [method()], {}, capture=True)
    assert_same(expected, found)


class Validated(Lit):
    """Has a metric that validation alone updates, as ImageClassifier has."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("val/acc", self.accuracy)


def test_a_metric_that_steps_leave_alone_does_not_keep_them_from_being_captured() -> None:
    _, expected, _ = ran(Validated, list, {}, engine="sequential")
    module, found, _ = ran(Validated, list, {}, capture=True)
    assert module.engine_facts["capture"] == "yes"
    assert_same(expected, found)


def test_optimizers_of_users_are_not_captured() -> None:
    class Lookahead(torch.optim.SGD):
        taken = 0

        def step(self, closure: Any = None) -> None:
            super().step()
            self.taken += 1
            if self.taken % 8 == 0:
                for p in self.param_groups[0]["params"]:
                    p.mul_(0.9)

    given = {"client_optimizer": lambda parameters: Lookahead(parameters, lr=0.1), "workers": 1}
    _, expected, _ = ran(Lit, list, given, capture=False)
    module, found, _ = ran(Lit, list, given, capture=True)
    assert "Lookahead is not one of torch's optimizers" in module.engine_facts["capture"]
    assert_same(expected, found)


class Telling(FederatedCallback):
    """Logs and uploads in each step; the last values count."""

    sent = Upload()

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> None:
        clients.log("norm", clients.norm(gradient))
        self.sent[clients] = 2 * gradient

    def on_server_update(self, server: Any) -> None:
        server.log("sent", self.sent.mean().norm())


class Whole(FederatedCallback):
    """Reads all samples of a client in each step."""

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> None:
        gradient.mul_(0.5).add_(clients.full_gradient(clients.x), alpha=0.5)


@pytest.mark.parametrize("method", [Telling, Whole])
def test_hooks_that_log_upload_or_read_all_samples_in_each_step(
    method: type[FederatedCallback],
) -> None:
    _, expected, _ = ran(Lit, lambda: [method()], {}, engine="sequential")
    _, found, _ = ran(Lit, lambda: [method()], {}, capture=True)
    assert_same(expected, found)


def test_an_error_in_a_replayed_round_leaves_the_run_where_it_was() -> None:
    class Breaking(FederatedCallback):
        def on_local_end(self, clients: Any) -> None:
            if clients.round == 1 and int(clients.ids[0]) == 4:
                raise ValueError("broken")

    module = federated(
        engine="concurrent", workers=2, participation="all", local_epochs=5, capture=True
    )
    with pytest.raises(ValueError, match="broken"):
        trainer(3, [Breaking()]).fit(module, blobs())
    again = federated(
        engine="concurrent", workers=2, participation="all", local_epochs=5, capture=True
    )
    trainer(1).fit(again, blobs())
    assert torch.equal(module.global_vector, again.global_vector)


@pytest.mark.usefixtures("short_steps")
def test_capture_takes_auto_true_and_false() -> None:
    for capture, expected in (("auto", "yes"), (True, "yes"), (False, "no: not asked for")):
        module, _, _ = ran(Lit, list, {}, capture=capture)
        assert module.engine_facts["capture"] == expected
