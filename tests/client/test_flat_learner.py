"""What a learner changes in its own steps: buffers, attributes, metrics, frozen parameters. The
same in each engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from fl_lightning.errors import UserError
from tests.helpers.learners import InPlace, Lit, fitted

ENGINES: list[dict[str, Any]] = [
    {"engine": "sequential"},
    *({"engine": "concurrent", "workers": k} for k in (1, 2)),
]


class Assigned(InPlace):
    def move(self, x: Tensor) -> None:
        self.running_mean = self.running_mean * 0.9 + 0.1 * x


@pytest.mark.parametrize("arguments", [*ENGINES, {"engine": "stacked", "workers": 2}])
@pytest.mark.filterwarnings("ignore:engine='stacked'")
def test_assigning_to_a_buffer_is_as_changing_it_in_place(arguments: dict[str, Any]) -> None:
    reference, _ = fitted(InPlace, engine="sequential")
    module, _ = fitted(Assigned, **arguments)
    assert module.engine_facts["engine"] != "stacked"
    assert torch.equal(module.learner.running_mean, reference.learner.running_mean) and bool(
        module.learner.running_mean.any()
    )
    assert torch.equal(module.global_vector, reference.global_vector)


class Counting(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx) / (1 + 0.01 * self.seen)


class Gathering(Lit):
    """Lightning's documented way to use the outputs of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(super().training_step(batch, batch_idx))
        return self.seen[-1]

    def on_train_epoch_end(self) -> None:
        self.log("train/mean", torch.stack(self.seen).detach().mean())
        self.seen.clear()


@pytest.mark.parametrize("learner", [Counting, Gathering])
@pytest.mark.filterwarnings("ignore:engine='stacked'")
def test_attributes_that_a_step_changes_let_clients_train_one_after_the_other(
    learner: type[Lit],
) -> None:
    reference, logged = fitted(learner, engine="sequential")
    for engine in ("auto", "stacked"):
        module, own = fitted(learner, engine=engine, workers=2)
        assert module.engine_facts["engine"] == "sequential"
        assert "seen" in module.engine_facts["why"] or engine == "stacked"
        assert torch.equal(module.global_vector, reference.global_vector)
        assert own.get("train/mean") == logged.get("train/mean")
    # trial steps leave no trace
    assert module.learner.seen == reference.learner.seen
    with pytest.raises(UserError, match=r"engine='concurrent'.*changes seen.*engine='sequential'"):
        fitted(learner, engine="concurrent", workers=2)


class Part(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        self.log("part/train" if self.training else "part/val", out.detach().mean())
        return out


class Whole(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = Part()


@pytest.mark.parametrize(
    "arguments", [{"engine": "concurrent", "workers": 2}, {"engine": "stacked"}]
)
def test_a_lightning_module_inside_the_learner_may_log(arguments: dict[str, Any]) -> None:
    reference, logged = fitted(Whole, engine="sequential")
    module, own = fitted(Whole, **arguments)
    assert module.engine_facts["engine"] == arguments["engine"]
    torch.testing.assert_close(module.global_vector, reference.global_vector)
    for name in ("part/train", "part/val"):
        torch.testing.assert_close(own[name].double(), logged[name].double(), rtol=1e-5, atol=1e-9)
    inside = module.export().net
    assert inside._trainer is None and "log" not in vars(inside)


@pytest.mark.parametrize("arguments", ENGINES[::2])
@pytest.mark.parametrize(
    ("at_first", "what"), [(True, r"0\.bias, … frozen"), (False, r"0\.bias, … unfrozen")]
)
def test_the_set_of_trainable_parameters_is_fixed(
    arguments: dict[str, Any], at_first: bool, what: str
) -> None:
    class Turning(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(at_first)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[0].requires_grad_(not at_first)

    with pytest.raises(UserError, match=what + ".*fixed at the start"):
        fitted(Turning, 3, **arguments)


class Weighted(Lit):
    """Its hooks set, at the start of each round, what its steps read."""

    def __init__(self) -> None:
        super().__init__()
        self.beta: Any = 0.0

    def weight(self) -> Any:
        return self.beta

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * float(self.weight())


class Interpolated(Weighted):
    def on_train_epoch_start(self) -> None:
        self.beta = np.interp(self.current_epoch, [0, 4], [0.0, 1.0])


class Schedule:
    def __init__(self, learner: Any) -> None:
        self.learner = learner
        self.rounds = 0


class InObject(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.beta = Schedule(self)

    def weight(self) -> float:
        assert self.beta.learner is self
        return float(self.beta.rounds)

    def on_train_epoch_start(self) -> None:
        self.beta.rounds += 1


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self) -> float:
        return self.factor


class InModule(Weighted):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = nn.Identity()

    def weight(self) -> float:
        return float(self.scale())

    def on_train_epoch_start(self) -> None:
        self.scale = Scaled(1.0 + self.current_epoch)


@pytest.mark.parametrize("learner", [Interpolated, InObject, InModule], ids=lambda k: k.__name__)
def test_what_hooks_set_between_rounds_reaches_the_copies(learner: type[Lit]) -> None:
    expected, _ = fitted(learner, 3, engine="sequential")
    module, _ = fitted(learner, 3, engine="concurrent", workers=2)
    assert module.engine_facts["engine"] == "concurrent"
    assert torch.equal(module.global_vector, expected.global_vector)
