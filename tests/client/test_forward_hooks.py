"""Losses that look at models: what is seen, at which vector, who changes it, what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import ClientState, FederatedCallback, InMemoryDataModule, UserError
from fl_lightning import callbacks as c
from fl_lightning.testing import tiny_run
from tests.helpers.learners import Dropping, InPlace, Lit, Normed, blobs, federated, trainer
from tests.helpers.replays import assert_same, ran, replayed


class Watching(FederatedCallback):
    """Adds nothing, and keeps what it sees; ``asks``: also at other points."""

    neutral = {}
    taps = {"logits": "last", "features": "last:in"}

    def __init__(self, asks: bool = True, training: bool = False) -> None:
        super().__init__()
        self.asks = asks
        self.training = training
        self.seen: list[dict[str, Tensor]] = []

    def local_loss(self, clients: Any, loss: Tensor, seen: Any, batch: Any) -> Tensor:
        if self.asks:
            clients.seen_at(clients.x[0] + 1, training=self.training)
            again = clients.seen_at(clients.x, training=self.training)
            first = clients.seen_at(clients.w)
            assert not again["logits"].requires_grad and seen["logits"].requires_grad
            self.seen.append({"now": seen["logits"].detach(), **again, "at w": first["logits"]})
        return loss


class Kept(FederatedCallback):
    """A pull of logits and features towards a vector that each client keeps."""

    taps = {"logits": "", "features": "last:in"}
    v = ClientState(initial="current_model", synchronised=False)

    def local_loss(self, clients: Any, loss: Tensor, seen: Any, batch: Any) -> Tensor:
        there = clients.seen_at(self.v[clients])
        apart = [(seen[name] - there[name]).square().mean() for name in self.taps]
        return loss + sum(apart) / 2

    def on_local_end(self, clients: Any) -> None:
        self.v[clients] = clients.x


class Called(Lit):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def left(learner: type[Lit], *methods: FederatedCallback, **given: Any) -> dict[str, Any]:
    """What a run leaves, with the random numbers that follow it."""
    torch.manual_seed(3)
    given = {"engine": "sequential", "local_epochs": 2, **given}
    module = federated(learner(), **given)
    run = trainer(2, methods)
    run.fit(module, blobs())
    logged = {k: v for k, v in run.callback_metrics.items() if k.startswith(("train/", "val/"))}
    return {"w": module.global_vector, **dict(module.learner.named_buffers()), **logged}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("learner", [Lit, Dropping, InPlace, Normed])
def test_a_look_leaves_no_trace(learner: type[Lit], training: bool) -> None:
    method = Watching(training=training)
    looked = left(learner, method, clip_norm=0.5)
    assert len(method.seen) > 10
    assert_same(looked, left(learner, clip_norm=0.5))


class Convolving(Lit):
    """Convolutions, whose backward reads the parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 20)), nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Conv1d(4, 4, 3)
        )
        self.net.extend([nn.Tanh(), nn.Flatten(), nn.Linear(64, 4)])


def test_the_gradient_of_a_perturbed_point_is_taken_there_after_a_look() -> None:
    sharp = c.SharpnessAwareMinimization
    method = Watching()
    looked = left(Convolving, method, sharp(0.5))
    assert len(method.seen) > 10
    assert_same(looked, left(Convolving, sharp(0.5)))


class Halving(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].mul_(0.5)
        return super().training_step(batch, batch_idx)


def test_a_teacher_has_the_buffers_that_the_client_got_this_round() -> None:
    method = Watching()
    learner, data = Normed().double(), blobs()
    module = federated(learner, engine="sequential", participation=2, local_epochs=1)

    class Received(FederatedCallback):
        def on_round_start(self, server: Any) -> None:
            before = {name: b.clone() for name, b in learner.named_buffers()}
            received.append((server.w.clone(), before, len(method.seen)))

    received: list[Any] = []
    trainer(3, [method, Received()]).fit(module, data)
    for t, (w, buffers, first) in enumerate(received):
        twin = Normed().double()
        twin.load_state_dict(buffers, strict=False)
        nn.utils.vector_to_parameters(w, twin.parameters())
        client = module.participants(t)[0]
        for k, (x, _) in enumerate(data.client_batches(client, t, module.steps(t, client))):
            expected = twin.eval().net(x)
            assert torch.equal(method.seen[first + k]["at w"], expected.detach())
    assert len(received) == 3


def test_what_several_add_comes_together_and_the_logged_loss_is_the_learners() -> None:
    class Plus(FederatedCallback):
        taps = {"logits": "last"}

        def local_loss(self, clients: Any, loss: Tensor, seen: Any, batch: Any) -> Tensor:
            return loss + 0.1 * seen["logits"].square().mean()

    class Minus(FederatedCallback):
        taps = {"out": "net.2"}

        def local_loss(self, clients: Any, loss: Tensor, seen: Any, batch: Any) -> Tensor:
            return loss - 0.1 * seen["out"].square().mean()

    plain, both = left(Lit), left(Lit, Plus(), Minus())
    assert torch.allclose(plain["w"], both["w"], rtol=0, atol=1e-14)
    assert float(plain["train/loss"]) == pytest.approx(float(both["train/loss"]), abs=1e-14)
    one = left(Lit, Plus(), local_steps=1, client_optimizer=lambda p: torch.optim.SGD(p, 0.0))
    none = left(Lit, local_steps=1, client_optimizer=lambda p: torch.optim.SGD(p, 0.0))
    assert one["train/loss"] == none["train/loss"]
    assert not torch.equal(left(Lit, Plus())["w"], plain["w"])


@pytest.mark.parametrize("first", [True, False])
def test_a_loss_is_the_same_until_all_have_ended_that_ask_for_its_gradient(first: bool) -> None:
    """Kept changes at its end what its loss pulls to, wherever it stands among the callbacks."""

    class Asking(FederatedCallback):
        def on_local_start(self, clients: Any) -> None:
            found["start"] = clients.full_gradient(clients.w).clone()

        def on_local_end(self, clients: Any) -> None:
            found["end"] = clients.full_gradient(clients.w).clone()
            assert torch.equal(found["start"], found["end"])
            found["rounds"] += 1

    found: dict[str, Any] = {"rounds": 0}
    methods = [Kept(), Asking()] if first else [Asking(), Kept()]
    left(Called, *methods, participation="all")
    assert found["rounds"] == 2 * 10


@pytest.mark.parametrize("method", [Watching(), c.SharpnessAwareMinimization()])
def test_a_step_that_changes_its_batch_is_refused_if_it_is_looked_at_again(method: Any) -> None:
    with pytest.raises(UserError, match=r"changes its batch in place .*x = x\.clone\(\)"):
        left(Halving, method)
    left(Halving, clip_norm=0.5)


class Halved(FederatedCallback):
    taps = {"logits": "last"}

    def __init__(self, **taps: str) -> None:
        super().__init__()
        self.taps = taps or self.taps
        self.seen: list[Tensor] = []

    def local_output(self, clients: Any, name: str, value: Tensor, batch: Any) -> Tensor:
        assert name in self.taps and len(batch[1]) == len(value)
        return value / 2

    def local_loss(self, clients: Any, loss: Tensor, seen: Any, batch: Any) -> Tensor:
        (name,) = self.taps
        there = clients.seen_at(clients.x)[name]
        halved = nn.functional.cross_entropy(seen[name] / 2, batch[1])
        assert torch.equal(seen[name], there) and torch.equal(loss, halved)
        self.seen.append(loss.detach())
        return loss


def test_a_changed_output_goes_on_and_seen_is_what_the_module_gave() -> None:
    method = Halved()
    ours = left(Lit, method)
    assert len(method.seen) > 10
    assert not torch.equal(ours["w"], left(Lit)["w"])
    assert_same(left(Lit, Halved(here="net.2")), ours)


@pytest.mark.parametrize(
    "methods, says",
    [
        ([Halved(), c.LogitCalibration()], ["Halved", "LogitCalibration", "net.2"]),
        ([Halved(one="last", two="net.2")], ["one", "two", "net.2"]),
        ([Halved(into="last:in")], ["Halved", "local_output", "do not name the output"]),
        ([Halved(here="net.7")], ["Halved", "net.7", "no module of Idle", "net.0, net.1, net.2"]),
        ([Halved(here="nets")], ["taps['here'] = 'nets'", "Did you mean 'net'?"]),
        ([Halved(here="unused")], ["Halved", "does not call the module", "in every step"]),
    ],
)
def test_taps_that_cannot_be_seen_are_refused_in_the_first_step(
    methods: Any, says: list[str]
) -> None:
    class Idle(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.unused = self.net, nn.Identity()

    with pytest.raises(UserError) as refused:
        left(Idle, *methods)
    assert all(part in str(refused.value) for part in says), refused.value
    assert "\n" not in str(refused.value)


def test_what_is_changed_in_place_afterwards_is_refused() -> None:
    class Rectified(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.net[1] = nn.ReLU(inplace=True)

    class First(Watching):
        taps = {"logits": "last", "features": "net.0"}

    class Entering(First):
        taps = {"logits": "last", "features": "net.1:in"}

    for method in (First(), Entering()):
        with pytest.raises(UserError, match=r"taps\['features'\] = 'net.* in place"):
            left(Rectified, method)
    left(Rectified, Watching())

    class Subtracts(FederatedCallback):
        taps = {"logits": "last"}

        def local_output(self, clients: Any, name: str, value: Tensor, batch: Any) -> Tensor:
            return value.sub_(1)

        def local_loss(self, clients: Any, loss: Tensor, seen: Any, batch: Any) -> Tensor:
            return loss

    with pytest.raises(UserError, match="or a local_output"):
        left(Lit, Subtracts())


@pytest.mark.parametrize("method", [c.NotTrueDistillation, c.LogitCalibration])
@pytest.mark.parametrize("kind", ["soft", "numbers", "alone"])
def test_labels_that_are_no_class_indices_are_refused(method: Any, kind: str) -> None:
    class Any_(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0] if isinstance(batch, (tuple, list)) else batch
            return self.net(x).square().mean()

    x = torch.randn(40, 20, dtype=torch.float64)
    y = {"soft": torch.rand(40, 4), "numbers": torch.rand(40), "alone": None}[kind]
    data = InMemoryDataModule((x, torch.zeros(40)), clients=[range(20), range(20, 40)])
    if y is not None:
        data = InMemoryDataModule((x, y), clients=[range(20), range(20, 40)], batch_size=8)
    module = federated(Any_(), engine="sequential", participation=2)
    with pytest.raises(UserError, match=f"{method.__name__} .*class (indices|labels)"):
        trainer(1, [method()]).fit(module, data)


def test_label_counts_are_of_what_a_client_trains_on() -> None:
    y = torch.tensor([0, 2, 2, 3, 1, 1, 1, 0])
    x = torch.zeros(8, 20, dtype=torch.float64)
    found: dict[int, list[int]] = {}

    class Counting(FederatedCallback):
        def on_local_start(self, clients: Any) -> None:
            assert clients.label_counts.dtype == torch.int64
            found.update(zip(clients.client_ids, clients.label_counts.tolist(), strict=True))

    data: Any = None

    def counted(*methods: FederatedCallback, **given: Any) -> dict[int, list[int]]:
        nonlocal data
        found.clear()
        data = InMemoryDataModule((x, y), clients=[[0, 1, 2, 2], [4, 5, 6, 7]], **given)
        trainer(1, [Counting(), *methods]).fit(federated(participation=2), data)
        return dict(found)

    assert counted() == {0: [1, 0, 3, 0], 1: [1, 3, 0, 0]}, (
        "3 is nobody's, and a class all the same"
    )
    flipped = counted(c.ByzantineClients("label_flip", fraction=0.5))
    assert sorted(flipped.values()) in (
        sorted([[0, 3, 0, 1], [1, 3, 0, 0]]),
        sorted([[1, 0, 3, 0], [0, 0, 3, 1]]),
    )


def cost(*methods: FederatedCallback, **given: Any) -> tuple[float, float]:
    run = tiny_run(*methods, rounds=2, participation="all", local_epochs=2, **given)
    metrics = run.trainer.callback_metrics
    return float(metrics["cost/gradients"]), float(metrics["cost/forwards"])


@pytest.mark.parametrize(
    "given", [{"engine": "sequential"}, {"engine": "concurrent", "capture": True, "workers": 2}]
)
def test_what_looks_cost_is_counted(given: dict[str, Any]) -> None:
    steps, batches = 2 * (1 + 2 + 3 + 1 + 3 + 2), 1 + 2 + 3 + 1 + 3 + 2

    class Asks(FederatedCallback):
        def on_local_end(self, clients: Any) -> None:
            clients.evaluate(clients.x)
            clients.evaluate(clients.x, "test")

    assert cost(**given) == (steps, 0)
    assert cost(c.ModelContrast(), **given) == (steps, 2 * steps), "in a first round too"
    assert cost(c.NotTrueDistillation(), **given) == (steps, steps)
    assert cost(c.LogitCalibration(), **given) == (steps, 0)
    assert cost(c.LogitCalibration(exclude_true=True), **given) == (steps, 0)
    sharp = [c.NotTrueDistillation(), c.SharpnessAwareMinimization()]
    assert cost(*sharp, **given) == (2 * steps, 2 * steps)
    whole = [c.NotTrueDistillation(), c.ControlVariates("gradient")]
    assert cost(*whole, **given) == (steps + batches, steps + batches)
    assert cost(Asks(), **given) == (steps, batches)

    class Measures(Asks, Watching):
        role = "measurement"

    assert cost(Measures(), **given) == (steps, 0)


def test_a_captured_step_has_the_same_bits() -> None:
    def methods() -> list[Any]:
        return [c.ModelContrast(2.0), c.NotTrueDistillation(), c.SharpnessAwareMinimization()]

    given = {"buffers": "own"}
    plain = ran(Normed, methods, given, capture=False)
    captured = ran(Normed, methods, given, capture=True)
    assert replayed(captured[2]) > 0, captured[0].engine_facts["capture"]
    assert_same(captured[1], plain[1])


def test_outside_of_steps_and_without_taps_it_is_an_error() -> None:
    class Early(Watching):
        def on_local_start(self, clients: Any) -> None:
            clients.seen_at(clients.x)

    class Late(Watching):
        def on_local_end(self, clients: Any) -> None:
            clients.seen_at(clients.x)

    class Bare(FederatedCallback):
        def local_loss(self, clients: Any, loss: Tensor, seen: Any, batch: Any) -> Tensor:
            return loss + 0 * clients.seen_at(clients.w)["logits"].sum()

    for method in (Early(), Late()):
        with pytest.raises(RuntimeError, match="in local_loss"):
            left(Lit, method)
    with pytest.raises(RuntimeError, match=r"Bare calls .* no `taps`"):
        left(Lit, Bare())


def test_in_the_hooks_of_a_step_it_is_the_steps_batch_also_after_a_full_gradient() -> None:
    class After(Watching):
        def on_local_gradient(self, clients: Any, gradient: Tensor) -> None:
            before = clients.seen_at(clients.w)["logits"]
            clients.full_gradient(clients.w)
            assert torch.equal(clients.seen_at(clients.w)["logits"], before)

    left(Lit, After(asks=False), clip_norm=0.5)
