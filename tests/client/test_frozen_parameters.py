"""Frozen parameters that a learner's steps write (momentum encoders).

Buffers to the run, in every engine alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning.engines import auto
from fl_lightning.errors import UserError
from tests.helpers.learners import Lit, blobs, federated, trainer


class Teaching(Lit):
    """A teacher that follows the student.

    Lightly assigns to ``data``, others change it in place.
    """

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


@pytest.mark.fast
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
            assert module.engine_facts["engine"] == "concurrent" or engine["engine"] == "auto"
            assert torch.equal(module.global_vector, expected.global_vector)
            assert torch.equal(module.learner.teacher.weight, teacher)


def test_the_server_takes_the_mean_of_what_clients_made_of_a_teacher() -> None:
    class Adding(Lit):
        """Adds the mean of its clients' labels, once a step."""

        def __init__(self) -> None:
            super().__init__()
            self.total = nn.Parameter(torch.zeros(()), requires_grad=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.total.data += batch[1].double().mean()
            return super().training_step(batch, batch_idx)

    data = blobs()
    data.setup("fit")
    each = [torch.cat([y for (_, y), _ in data.full_batches(i)]).double().mean() for i in range(10)]
    module = federated(Adding(), engine="sequential", participation=1.0, local_epochs=2)
    trainer(1).fit(module, blobs(batch_size=24))  # a batch is a whole client
    torch.testing.assert_close(module.learner.total.data, 2 * torch.stack(each).mean())


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


def test_a_resumed_run_treats_them_alike(tmp_path: Path) -> None:
    expected = ran(4, engine="sequential").learner.teacher.weight
    torch.manual_seed(3)
    settings: dict[str, Any] = {
        "participation": 0.5,
        "local_epochs": 3,
        "workers": 2,
        "engine": "concurrent",
    }
    first = trainer(2, default_root_dir=tmp_path, enable_checkpointing=True)
    first.fit(federated(Teaching(), **settings), blobs())
    second = federated(Teaching(), **settings)
    trainer(4, default_root_dir=tmp_path, enable_checkpointing=True).fit(
        second, blobs(), ckpt_path=first.checkpoint_callback.best_model_path
    )
    assert torch.equal(second.learner.teacher.weight, expected)


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
    """Its teacher begins to move after a warm-up."""

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


class Reassigned(LateTeacher):
    def move(self) -> None:
        self.teacher.weight.data = 0.9 * self.teacher.weight.data


@pytest.mark.parametrize(
    ("learner", "engine"),
    [
        (LateTeacher, "sequential"),
        (LateTeacher, "concurrent"),
        (LateTeacher, "auto"),
        (Reassigned, "sequential"),
        (Reassigned, "concurrent"),
    ],
)
@pytest.mark.filterwarnings("ignore:you asked for engine='concurrent'")
def test_a_teacher_that_begins_to_move_later_is_refused_by_name(
    learner: type[LateTeacher], engine: str
) -> None:
    module = federated(learner(), engine=engine, workers=2, participation="all")
    said = rf"{learner.__name__}: its steps change the frozen parameter teacher.weight in round 1"
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
