"""One local step: the second pass of SAM, clipping, and the order in which hooks change a
gradient."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning.callback import FederatedCallback, Upload, UserError
from fl_lightning.callbacks import SharpnessAwareMinimization
from tests.helpers.learners import InPlace, Lit, blobs, federated, momentum, trainer

ENGINES = ["sequential", "concurrent"]


def run(learner: Lit, methods: Any, rounds: int = 1, **arguments: Any) -> Any:
    module, of = (
        federated(learner, **{"participation": "all", **arguments}),
        trainer(rounds, methods),
    )
    of.fit(module, blobs(clients=2))
    return module, of.callback_metrics


@pytest.mark.parametrize("library", ["torch", "numpy", "python"])
def test_both_passes_of_sam_draw_the_same_random_numbers(library: str) -> None:
    """Also in later steps, when those generators that nobody drew from are no longer watched."""
    drawn: list[float] = []

    class Drawing(Lit):
        def on_train_start(self) -> None:
            drawn.clear()  # of steps that are tried before round 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            one = {
                "torch": lambda: float(torch.rand(1)),
                "numpy": np.random.rand,
                "python": random.random,
            }[library]
            drawn.append(float(one()))
            return super().training_step(batch, batch_idx)

    run(Drawing(), [SharpnessAwareMinimization(0.05)], engine="sequential")
    assert drawn[0::2] == drawn[1::2] and len(set(drawn)) == len(drawn) // 2 >= 6


@pytest.mark.parametrize("engine", ENGINES)
def test_the_second_pass_of_sam_neither_moves_buffers_nor_is_logged(engine: str) -> None:
    class Counting(InPlace):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.passes += 1
            return super().training_step(batch, batch_idx)

    module, _ = run(Counting(), [SharpnessAwareMinimization(0.05)], engine=engine, local_steps=3)
    assert int(module.learner.passes) == 3


@pytest.mark.parametrize("engine", [*ENGINES, "stacked"])
def test_steps_are_clipped_above_the_norm_and_not_at_it(engine: str) -> None:
    """A gradient of 3 and 4 is of norm 5; at a rate of 1 a step moves by what is left of it."""

    class Sloped(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1, bias=False)
            self.net.weight.data.zero_()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.net.weight * torch.tensor([[3.0, 4.0]])).sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    for limit, share, moved in ((5.0, 0.0, [-6.0, -8.0]), (2.5, 1.0, [-3.0, -4.0])):
        module, logged = run(
            Sloped(),
            [],
            engine=engine,
            clip_norm=limit,
            local_steps=2,
            client_optimizer=lambda p: torch.optim.SGD(p, 1.0),
        )
        assert float(logged["clipped_steps"]) == share
        assert module.global_vector.tolist() == pytest.approx(moved)
    _, logged = run(Sloped(), [], engine=engine, local_steps=2)
    assert "clipped_steps" not in logged


class Bowl(Lit):
    """½‖x‖²: the gradient is the point where it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1, bias=False)
        self.net.weight.data.fill_(4.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net.weight**2).sum() / 2

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


class Signs(FederatedCallback):
    """Steps by signs, of what is left of the gradient after clipping."""

    def precondition(self, clients: Any, gradient: Tensor) -> Tensor:
        clients.log("norm", clients.norm(gradient))
        return gradient.sign()


class Doubled(FederatedCallback):
    def on_direction(self, clients: Any, direction: Tensor) -> None:
        direction.mul_(2)


class Fading(FederatedCallback):
    """The rate falls to a share of itself within a round."""

    seen = Upload(sent=False, shape=())

    def __init__(self, end: float = 0.5) -> None:
        super().__init__()
        self.end = end

    def step_rate(self, clients: Any) -> Tensor:
        return 1 - clients.step / clients.steps * (1 - self.end)

    def on_local_end(self, clients: Any) -> None:
        self.seen[clients] = clients.elapsed[:, 0]
        clients.log("rate", clients.lr.expand(len(clients.client_ids)))

    def on_server_update(self, server: Any) -> None:
        server.log("elapsed", self.seen.mean())


@pytest.mark.parametrize("engine", [*ENGINES, "stacked"])
@pytest.mark.parametrize("capture", [True, False])
def test_a_preconditioned_step_follows_the_direction_and_the_decay(
    engine: str, capture: bool
) -> None:
    """From 4 by signs, doubled, at a rate of ½ and a decay of ½: 4 - ½ (2 + ½ 4) = 2, then ½."""
    if engine != "concurrent" and capture:
        pytest.skip("only `concurrent` captures")
    module, logged = run(
        Bowl(),
        [Doubled(), Signs()],
        engine=engine,
        capture=capture,
        clip_norm=0.5,
        local_steps=2,
        client_optimizer=lambda p: torch.optim.SGD(p, 0.5, weight_decay=0.5),
    )
    assert module.global_vector.tolist() == [0.5, 0.5]
    assert float(logged["norm"]) == 0.5


@pytest.mark.parametrize("engine", [*ENGINES, "stacked"])
@pytest.mark.parametrize("optimizer", [None, momentum])
def test_the_rates_of_steps_multiply_gradient_and_decay_and_are_added_up(
    engine: str, optimizer: Any
) -> None:
    unequal = {"engine": engine, "local_epochs": 2, "client_optimizer": optimizer}
    ours, logged = run(Lit(), [Fading()], rounds=2, **unequal)
    for i, k in enumerate([ours.steps(1, i) for i in range(2)]):
        assert k > 1, i
    rates = [sum(1 - j / k * 0.5 for j in range(k)) for k in (ours.steps(1, 0), ours.steps(1, 1))]
    eta = float(logged["rate"])
    assert float(logged["elapsed"]) == pytest.approx(eta * sum(rates) / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("methods", "arguments", "words"),
    [
        ([Signs()], {"client_optimizer": momentum}, r"Signs decides in which direction.*plain SGD"),
        (
            [Signs()],
            {"client_optimizer": lambda p: torch.optim.Adam(p, 0.1)},
            r"client optimizer is Adam, whose update rule",
        ),
        (
            [Fading()],
            {"client_optimizer": lambda p: torch.optim.Rprop(p, 0.1)},
            r"Fading multiplies the learning rate.*a step of Rprop",
        ),
    ],
)
def test_optimizers_with_a_rule_of_their_own_are_refused(
    methods: Any, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        run(Lit(), methods, **arguments)
