"""What a learner reads of the run's progress is the same at a site as in the simulation."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from fl_lightning import UserError
from fl_lightning.callbacks import ControlVariates, PerClientEvaluation
from fl_lightning.deploy.flower.serve_site import runs_at_sites
from fl_lightning.deploy.transport import InMemoryTransport
from tests.deploy.test_evaluation import data
from tests.deploy.test_in_memory import Learner, Restarted, check_same, over_sites, trained

pytestmark = pytest.mark.slow


class Scaled(Learner):
    """Its loss is scaled by numbers that differ from round to round: Lightning's, and buffers that
    hooks and a callback set.
    """

    def __init__(self) -> None:
        super().__init__()
        for name in ("factor", "warm", "heat"):
            self.register_buffer(name, torch.tensor(1.0))

    def on_train_epoch_start(self) -> None:
        self.warm.fill_(1.0 + self.current_epoch)

    def on_validation_end(self) -> None:
        self.factor.mul_(2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scale = 1.0 + self.current_epoch / (self.trainer.max_epochs or 1) + self.trainer.global_step
        scale = scale + self.factor + self.warm + self.heat
        return nn.functional.cross_entropy(self.net(x), y) * scale


class Scaler(pl.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.learner.heat.fill_(1.0 + trainer.current_epoch)


def callbacks() -> list[Any]:
    return [Scaler(), PerClientEvaluation(1, finetune_epochs=1)]


@pytest.mark.parametrize("carrier", [InMemoryTransport, Restarted])
def test_numbers_that_change_from_round_to_round_are_known_at_sites(
    carrier: type[InMemoryTransport], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"learner": Scaled, "data": data}
    here, there = tmp_path / "here", tmp_path / "there"
    simulated = trained(callbacks(), 3, [], root=here, **options)
    sites = tmp_path / "sites"
    over, _, _ = over_sites(callbacks, sites, rounds=3, carrier=carrier, root=there, **options)
    check_same(simulated, over, sites)
    assert (here / "clients.csv").read_text() == (there / "clients.csv").read_text()
    assert not [note for note in over.notes if "its hooks change" in note]


class Teacher(Learner):
    """It has a frozen parameter, and a list for its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.rates = [1.0]
        self.outs: list[float] = []


class Unnamed(Teacher):
    def on_train_epoch_start(self) -> None:
        vars(self)["ra" + "te"] = 2.0


class InPlace(Teacher):
    def on_train_epoch_start(self) -> None:
        self.teacher.add_(1)


class ByData(Teacher):
    """PyTorch does not count changes of a tensor's data."""

    def on_train_epoch_start(self) -> None:
        self.teacher.data.add_(1)


@pytest.mark.parametrize(
    ("learner", "told"),
    [
        (Unnamed, r'change rate .* to a float.* buffer: self.register_buffer\("rate"'),
        (InPlace, "changes the frozen parameter teacher at the server"),
        (ByData, "changes the frozen parameter teacher at the server"),
    ],
)
def test_what_hooks_change_at_the_server_and_sites_do_not_get_is_refused(
    learner: type[Learner], told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        over_sites(list, tmp_path, rounds=1, learner=learner)


class Keeps(Teacher):
    def on_train_epoch_start(self) -> None:
        self.rates = [*self.rates, 2.0]


class OfLibrary(Teacher):
    def on_train_epoch_start(self) -> None:
        self.net[1].eps *= 2


class Collects(Teacher):
    """It collects numbers by hand for a hook of the round."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.outs.append(1.0)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("train/number", float(len(self.outs)))


@pytest.mark.parametrize(
    ("learner", "told"),
    [
        (Keeps, "its hooks change rates at the server"),
        (OfLibrary, "its hooks change net.1.eps at the server"),
        (Collects, "training_step changes self.outs at the sites, and on_train_epoch_end, which"),
    ],
)
def test_what_does_not_travel_is_noted(learner: type[Learner], told: str, tmp_path: Path) -> None:
    over, _, _ = over_sites(list, tmp_path, rounds=1, learner=learner)
    notes = [note for note in over.notes if f"learner {learner.__name__}: " in note]
    assert [told in note for note in notes] == [True]


class Mixing(pl.Callback):
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        batch[0].mul_(2)


def test_a_callback_that_changes_batches_runs_at_sites() -> None:
    kept = [runs_at_sites(each) for each in (Mixing(), ControlVariates(), Scaler())]
    assert kept == [True, True, False]


class ByStepItself(Teacher):
    """Its steps write a frozen parameter, which is sent as buffers are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.teacher.data.add_(batch[0].mean(0).detach())
        return super().training_step((batch[0] + self.teacher, batch[1]), batch_idx)


def test_a_frozen_parameter_that_steps_write_runs_over_sites(tmp_path: Path) -> None:
    simulated = trained([], 3, [], learner=ByStepItself)
    over, _, _ = over_sites(list, tmp_path, rounds=3, learner=ByStepItself)
    check_same(simulated, over, tmp_path)


def test_a_site_refuses_states_of_another_client_optimizer(tmp_path: Path) -> None:
    heavy = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    given: dict[str, Any] = {"keep_optimizer_state": True, "rounds": 1}
    over_sites(list, tmp_path, **given, client_optimizer=heavy)
    with pytest.raises(UserError, match=r"site\.json has states of another client_optimizer"):
        over_sites(list, tmp_path, **given, client_optimizer=partial(torch.optim.Adam, lr=0.01))
