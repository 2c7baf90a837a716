"""Parameters as objects and memory. What a flat vector takes apart is refused, what hooks leave is
copied."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import UserError
from tests.helpers.learners import Lit, blobs, federated, trainer


class Untied(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(20, 8)
        self.twin.weight = nn.Parameter(self.net[0].weight)


class Frozen(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(20, 8)
        self.teacher.weight = nn.Parameter(self.net[0].weight.data, requires_grad=False)


@pytest.mark.parametrize(
    ("learner", "names"), [(Untied, "twin.weight"), (Frozen, "teacher.weight")]
)
def test_two_tensors_over_one_memory_are_refused_by_name(learner: type[Lit], names: str) -> None:
    module = federated(Lit())
    module.learner = learner()  # .double() would take them apart
    with pytest.raises(UserError, match=rf"net\.0\.weight and {names}|{names} and net\.0\.weight"):
        type(module)(learner(), participation=0.3).export()


class Assigning(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 0:
            self.net[0].weight = nn.Parameter(self.net[0].weight.detach() * 0.9)
        return loss


class Teacher(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(20, 8).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.teacher.weight = nn.Parameter(self.net[0].weight.detach().clone(), requires_grad=False)
        return super().training_step(batch, batch_idx)


class Adding(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(()))
        return self.scale * super().training_step(batch, batch_idx)


class NewHead(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.net[2] = copy.deepcopy(self.net[2])
        return super().training_step(batch, batch_idx)


class BetweenRounds(Lit):
    def on_train_epoch_start(self) -> None:
        self.net[0].weight = nn.Parameter(self.net[0].weight.detach() * 0.9)


@pytest.mark.parametrize("engine", ["auto", "sequential", "concurrent", "stacked"])
@pytest.mark.parametrize(
    ("learner", "name"),
    [
        (Assigning, "net.0.weight"),
        (Teacher, "teacher.weight"),
        (Adding, "scale"),
        (BetweenRounds, "net.0.weight"),
        (NewHead, "net.2.weight"),
    ],
)
@pytest.mark.filterwarnings("ignore:engine=")
def test_a_new_parameter_is_refused_by_name(learner: type[Lit], name: str, engine: str) -> None:
    with pytest.raises(
        UserError, match=rf"{learner.__name__}: a new Parameter was assigned to {name} "
    ):
        trainer(1).fit(federated(learner(), engine=engine), blobs())


HOOKS: dict[str, Any] = {
    "spectral": lambda layer: nn.utils.spectral_norm(layer),
    "weight": lambda layer: nn.utils.weight_norm(layer),
}


class Hooked(Lit):
    def __init__(self, hook: str = "spectral") -> None:
        super().__init__()
        self.net[0] = HOOKS[hook](self.net[0])
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.outputs = [self.net(batch[0])]  # with a graph
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
@pytest.mark.filterwarnings("ignore")
def test_what_hooks_compute_in_each_step_can_be_exported_and_copied(hook: str, engine: str) -> None:
    module = federated(Hooked(hook), engine="auto" if engine == "concurrent" else engine)
    run, data = trainer(2, limit_val_batches=0), blobs()
    run.fit(module, data)
    x = torch.randn(5, 20, dtype=torch.float64)
    learners = [
        module.export(),
        copy.deepcopy(module).learner,
        pickle.loads(pickle.dumps(module)).learner,
    ]
    wanted = module.learner.eval().net(x)
    for learner in learners:
        torch.testing.assert_close(learner.eval().net(x), wanted, rtol=0, atol=0)
    plain = Hooked(hook).double()
    plain.load_state_dict(learners[0].state_dict())
    torch.testing.assert_close(plain.eval().net(x), wanted, rtol=0, atol=0)
    run.validate(module, data, verbose=False)
    again = trainer(1)
    again.fit(module, data)
    module.export()
