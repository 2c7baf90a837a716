"""Frozen parameters that a learner's steps write (momentum encoders). Buffers to the run, in every
engine alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.callbacks import GlobalLossLogger
from fl_lightning.client.flat_learner import FlatLearner
from fl_lightning.engines import auto
from fl_lightning.errors import UserError
from tests.helpers.learners import Lit, blobs, federated, trainer


class Teaching(Lit):
    """A teacher that follows the student. Lightly assigns to ``data``, others change it in
    place."""

    def __init__(self, in_place: bool = True) -> None:
        super().__init__()
        self.in_place = in_place
        self.teacher = nn.Linear(20, 8).requires_grad_(False)
        self.backbone = nn.Linear(20, 8).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        student = self.net[0].weight.detach()
        if self.in_place:
            self.teacher.weight.data.mul_(0.9).add_(0.1 * student)
        else:
            self.teacher.weight.data = 0.9 * self.teacher.weight.data + 0.1 * student
        apart = self.net[0](batch[0]) - self.teacher(batch[0]) - 0.1 * self.backbone(batch[0])
        return super().training_step(batch, batch_idx) + apart.square().mean()


def ran(rounds: int = 3, in_place: bool = True, buffers: str = "average", **arguments: Any) -> Any:
    torch.manual_seed(3)
    settings = {"participation": 0.5, "local_epochs": 3, "workers": 2, **arguments}
    module = federated(Teaching(in_place), buffers=buffers, **settings)
    trainer(rounds).fit(module, blobs())
    return module


@pytest.mark.parametrize("buffers", ["average", "keep"])
@pytest.mark.filterwarnings("ignore:engine='stacked'")
def test_what_steps_write_follows_the_rule_of_buffers_in_every_engine(
    buffers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "TINY_SECONDS", 0.0)
    torch.manual_seed(3)
    at_first = federated(Teaching()).learner.teacher.weight.clone()
    expected = ran(engine="sequential", buffers=buffers)
    teacher = expected.learner.teacher.weight
    assert torch.equal(teacher, at_first) == (buffers == "keep")
    for in_place in (True, False):
        for engine in (
            {"engine": "auto"},
            {"engine": "concurrent", "capture": True},
            {"engine": "stacked"},
        ):
            module = ran(in_place=in_place, buffers=buffers, **engine)
            assert module.engine_facts["as buffers"] == "teacher.weight"
            assert module.engine_facts["engine"] == "concurrent" or engine["engine"] != "concurrent"
            assert torch.equal(module.global_vector, expected.global_vector)
            assert torch.equal(module.learner.teacher.weight, teacher)


def test_a_measurement_begins_each_batch_with_what_the_server_has() -> None:
    module, data = ran(engine="sequential"), blobs()
    data.setup("fit")
    evaluator = module.evaluator()
    for client in (0, 1, 0):
        ((batch, _),) = data.full_batches(client, size=24)
        with torch.no_grad():
            expected = float(module.export().eval().training_step(batch, 0))
        own = evaluator.client(module.evaluated_vector, client, data.client_indices(client))
        assert own["loss"] == pytest.approx(expected, rel=1e-12)


def test_a_frozen_backbone_that_nobody_writes_is_never_copied() -> None:
    class Backboned(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Linear(20, 20).requires_grad_(False)

    seen: list[Any] = []

    def keep(*_: Any) -> None:
        seen.extend(
            worker.copy.learner.backbone.weight.data_ptr() for worker in module.run.engine.workers
        )

    module = federated(Backboned(), engine="concurrent", workers=2)
    module.learner.on_train_epoch_start = keep
    trainer(1).fit(module, blobs())
    assert (
        seen == [module.learner.backbone.weight.data_ptr()] * 2
        and not module.global_model.as_buffers
    )


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "auto"])
def test_another_tensor_for_a_trainable_parameter_is_refused(engine: str) -> None:
    class Clipping(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.net[0].weight.data = self.net[0].weight.data.clamp(-1, 1)
            return super().training_step(batch, batch_idx)

    with pytest.raises(
        UserError,
        match=r"assigns a new tensor to the data of the trainable parameter net\.0\.weight",
    ):
        trainer(1).fit(federated(Clipping(), engine=engine), blobs())


class LateTeacher(Lit):
    def __init__(self, from_round: int = 1) -> None:
        super().__init__()
        self.from_round = from_round
        self.teacher = nn.Linear(20, 8).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch >= self.from_round:
            self.move()
        return super().training_step(batch, batch_idx) + 0.01 * self.teacher(batch[0]).mean()

    def move(self) -> None:
        self.teacher.weight.data.mul_(0.9).add_(0.1 * self.net[0].weight.detach())


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "auto"])
@pytest.mark.filterwarnings("ignore:you asked for engine='concurrent'")
def test_a_teacher_that_begins_to_move_later_is_refused_by_name(engine: str) -> None:
    module = federated(LateTeacher(), engine=engine, workers=2, participation="all")
    said = r"LateTeacher: its steps change the frozen parameter teacher.weight in round 1"
    with pytest.raises(UserError, match=said):
        trainer(3).fit(module, blobs())
    assert module.run.state.rounds == 1


def test_hooks_may_change_frozen_parameters_between_rounds() -> None:
    class ByHook(LateTeacher):
        def on_train_epoch_start(self) -> None:
            self.move()

    for engine in ("sequential", "concurrent"):
        module = federated(ByHook(from_round=9), engine=engine, workers=2, participation="all")
        trainer(2).fit(module, blobs())
        assert not module.global_model.as_buffers


class OverBase(Lit):
    frozen_stay = True

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(20, 20)
        self.base.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return nn.functional.cross_entropy(self.net(self.base(x)), y)


class Unsaid(OverBase):
    frozen_stay = False


@pytest.mark.parametrize("engine", ["auto", "sequential", "concurrent"])
def test_no_copy_has_a_base_of_its_own(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = []
    places: dict[type, set[int]] = {}
    another = FlatLearner.another

    def noted(self: FlatLearner, aliased: bool = True) -> FlatLearner:
        made = another(self, aliased)
        places[kind].add(made.learner.base.weight.data_ptr())
        return made

    monkeypatch.setattr(FlatLearner, "another", noted)
    for kind in (OverBase, Unsaid):
        places[kind] = set()
        torch.manual_seed(0)
        module = federated(kind(), engine=engine, workers=2)
        own = module.learner.base.weight.data_ptr()
        trainer(2, [GlobalLossLogger(every_n_rounds=1)]).fit(module, blobs())
        vectors.append(module.global_vector.clone())
        assert own in places[kind] or engine == "sequential"
        assert (places[kind] <= {own}) == (kind is OverBase)
    # What is tried on which copy changes no bit of the run.
    assert torch.equal(*vectors)
