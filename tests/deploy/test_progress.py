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
    """Its loss is scaled by a number that differs from round to round."""

    sent_to_sites = ("factor", "_factor", "odd")

    def scale(self) -> float:
        raise NotImplementedError  # abstract: each learner scales in another way

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y) * self.scale()


class ByEpoch(Scaled):
    def scale(self) -> float:
        return 1.0 + self.current_epoch / (self.trainer.max_epochs or 1)


class ByStep(Scaled):
    def scale(self) -> float:
        return 1.0 + self.trainer.global_step + self.trainer.current_epoch


class ByHook(Scaled):
    """Doubles in each round; a flag turns back to its first value."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.odd = False

    def on_train_epoch_start(self) -> None:
        self.odd = self.current_epoch % 2 == 1

    def on_validation_end(self) -> None:
        self.factor *= 2

    def scale(self) -> float:
        return self.factor * (3 if self.odd is True else 1)


class ByPrivateNumber(Scaled):
    """Its names begin with an underscore, as those of Lightning's own attributes do."""

    _factor = 1.0

    def on_train_epoch_start(self) -> None:
        self._factor = 1.0 + self.current_epoch

    def scale(self) -> float:
        return self._factor


class Scaler(pl.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.learner.factor = 1.0 + trainer.current_epoch


class ByCallback(Scaled):
    factor = 1.0

    def scale(self) -> float:
        return self.factor


def callbacks() -> list[Any]:
    return [Scaler(), PerClientEvaluation(1, finetune_epochs=1)]


@pytest.mark.parametrize("carrier", [InMemoryTransport, Restarted])
@pytest.mark.parametrize("learner", [ByEpoch, ByStep, ByHook, ByPrivateNumber, ByCallback])
def test_numbers_that_change_from_round_to_round_are_known_at_sites(
    learner: type[Learner], carrier: type[InMemoryTransport], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"learner": learner, "data": data}
    here, there = tmp_path / "here", tmp_path / "there"
    simulated = trained(callbacks(), 3, [], root=here, **options)
    sites = tmp_path / "sites"
    over, _, _ = over_sites(callbacks, sites, rounds=3, carrier=carrier, root=there, **options)
    check_same(simulated, over, sites)
    assert (here / "clients.csv").read_text() == (there / "clients.csv").read_text()
    assert not [note for note in over.notes if "its hooks change" in note]


class Saved(Scaled):
    """It keeps its number in checkpoints."""

    factor = 1.0

    def scale(self) -> float:
        return self.factor

    def on_train_epoch_end(self) -> None:
        self.factor += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["factor"] = self.factor

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.factor = checkpoint["factor"]


@pytest.mark.parametrize("before", [1, 2])
def test_a_number_that_a_learner_restores_itself_is_known_at_sites(
    before: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"learner": Saved, "participation": "all"}
    simulated = trained([], 3, [], **options)
    sites, path = tmp_path / "sites", tmp_path / "last.ckpt"
    over_sites(list, sites, rounds=before, save=path, **options)
    over, _, _ = over_sites(list, sites, rounds=3, resume=path, **options)
    check_same(simulated, over, sites)


@pytest.mark.parametrize("damaged", [3, [3], "factor"])
def test_damaged_names_of_attributes_in_a_checkpoint_are_refused(
    damaged: Any, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    over_sites(list, tmp_path / "sites", rounds=1, save=path, learner=Saved)
    saved = torch.load(path, weights_only=True)
    assert saved["sent to sites"] == ["factor"]
    saved["sent to sites"] = damaged
    torch.save(saved, path)
    with pytest.raises(UserError, match="ckpt_path: sent to sites in the checkpoint is damaged"):
        over_sites(list, tmp_path / "sites", rounds=2, resume=path, learner=Saved)


class Keeps(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [1.0]

    def on_train_epoch_start(self) -> None:
        self.rates = [*self.rates, 2.0]


def test_an_attribute_that_cannot_travel_is_noted(tmp_path: Path) -> None:
    over, _, _ = over_sites(list, tmp_path, rounds=1, learner=Keeps)
    assert any("its hooks change rates at the server" in note for note in over.notes)


class OfLibrary(Learner):
    def on_train_epoch_start(self) -> None:
        self.net[1].eps *= 2


def test_a_number_of_a_library_s_module_is_noted(tmp_path: Path) -> None:
    over, _, _ = over_sites(list, tmp_path, rounds=1, learner=OfLibrary)
    told = "its hooks change net.1.eps at the server. It belongs to a module of a library"
    assert [note for note in over.notes if told in note]


class Unnamed(Learner):
    """Its class does not say that a hook sets a number."""

    def on_train_epoch_start(self) -> None:
        vars(self)["ra" + "te"] = 2.0


def test_a_number_that_the_class_does_not_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'Write sent_to_sites = \("rate",\) in the class Unnamed'):
        over_sites(list, tmp_path, rounds=1, learner=Unnamed)


class OfTorch(Learner):
    sent_to_sites = ("rate",)

    def on_train_epoch_start(self) -> None:
        self.rate = torch.tensor(2.0)


def test_a_named_value_that_is_no_number_of_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sent_to_sites names rate, but its value is a Tensor"):
        over_sites(list, tmp_path, rounds=1, learner=OfTorch)


class ByClass(Learner):
    factor = 1.0

    def on_train_epoch_start(self) -> None:
        type(self).factor = 2.0


def test_an_attribute_of_a_class_that_stays_at_the_server_is_noted(tmp_path: Path) -> None:
    over, _, _ = over_sites(list, tmp_path, rounds=1, learner=ByClass)
    told = [note for note in over.notes if "its hooks change ByClass.factor at the server" in note]
    assert len(told) == 1


class Mixing(pl.Callback):
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        batch[0].mul_(2)


def test_a_callback_that_changes_batches_runs_at_sites() -> None:
    kept = [runs_at_sites(each) for each in (Mixing(), ControlVariates(), Scaler())]
    assert kept == [True, True, False]


class Teacher(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)

    def on_train_epoch_start(self) -> None:
        self.teacher.add_(1)


class ByData(Teacher):
    """PyTorch does not count changes of a tensor's data."""

    def on_train_epoch_start(self) -> None:
        self.teacher.data.add_(1)


class Replaced(Teacher):
    def on_train_epoch_start(self) -> None:
        self.teacher.data = torch.ones(3)


@pytest.mark.parametrize("learner", [Teacher, ByData, Replaced])
def test_a_frozen_parameter_that_a_hook_changes_is_refused(
    learner: type[Learner], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="changes the frozen parameter teacher at the server"):
        over_sites(list, tmp_path, rounds=1, learner=learner)


class ByStepItself(Learner):
    """Its steps write a frozen parameter, which is sent as buffers are."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.teacher.data.add_(batch[0].mean(0).detach())
        return super().training_step((batch[0] + self.teacher, batch[1]), batch_idx)


def test_a_frozen_parameter_that_steps_write_runs_over_sites(tmp_path: Path) -> None:
    simulated = trained([], 3, [], learner=ByStepItself)
    over, _, _ = over_sites(list, tmp_path, rounds=3, learner=ByStepItself)
    check_same(simulated, over, tmp_path)


class Plain(Learner):
    """Behind a bias, batch statistics leave only rounding errors of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Identity()


HEAVY = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
KEPT: dict[str, Any] = {"keep_optimizer_state": True, "learner": Plain}
MOMENTUM = {**KEPT, "client_optimizer": HEAVY}
ADAM = {**KEPT, "client_optimizer": partial(torch.optim.Adam, lr=0.01)}


def test_another_client_optimizer_begins_anew_at_sites_as_in_the_simulation(tmp_path: Path) -> None:
    path, sites = tmp_path / "last.ckpt", tmp_path / "sites"
    (tmp_path / "here").mkdir()
    of_one = tmp_path / "here" / "last.ckpt"
    trained([], 2, [], save=of_one, **MOMENTUM)
    simulated = trained([], 4, [], resume=of_one, strict_resume=False, **ADAM)
    over_sites(list, sites, rounds=2, save=path, **MOMENTUM)
    options = {"strict_resume": False, **ADAM}
    over, _, _ = over_sites(list, sites, rounds=4, resume=path, **options)
    torch.testing.assert_close(over.global_vector, simulated.global_vector, rtol=0, atol=1e-6)


def test_a_site_refuses_another_client_optimizer_unless_it_is_told(tmp_path: Path) -> None:
    sites = tmp_path / "sites"
    over_sites(list, sites, rounds=1, **MOMENTUM)
    with pytest.raises(UserError, match=r"site\.json.* client_optimizer,.*--model\.strict_resume"):
        over_sites(list, sites, rounds=1, **ADAM)


class Collects(Learner):
    """It collects its losses by hand for a hook of the round."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Tensor] = []
        self.sums = {"loss": 0.0}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.keep(loss.detach())
        return loss

    def keep(self, loss: Tensor) -> None:
        self.outs.append(loss)

    def on_train_epoch_end(self) -> None:
        self.log("train/mean", torch.stack(self.outs).mean())
        self.outs.clear()


class Sums(Collects):
    def keep(self, loss: Tensor) -> None:
        self.sums["loss"] += float(loss)

    def on_train_epoch_end(self) -> None:
        self.log("train/sum", self.sums["loss"])


class Last(Collects):
    def keep(self, loss: Tensor) -> None:
        self.last = loss

    def on_train_epoch_end(self) -> None:
        self.log("train/last", self.last)


@pytest.mark.parametrize("learner, name", [(Collects, "outs"), (Sums, "sums"), (Last, "last")])
def test_values_that_steps_collect_for_a_hook_of_the_round_are_refused(
    learner: type[Learner], name: str, tmp_path: Path
) -> None:
    told = rf"learner {learner.__name__}: training_step changes self\.{name} at the sites, and on_t"
    with pytest.raises(UserError, match=told):
        over_sites(list, tmp_path, rounds=1, learner=learner)


class InValidation(Learner):
    """It has only a hook of validation, which may read what validation itself collected."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.outs.append(1.0)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("val/number", float(len(self.outs)))


class Allowed(Learner):
    """The server gets a metric's state, sends one attribute, and needs no other."""

    sent_to_sites = ("fresh",)
    at_sites = ("latest",)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fresh = False
        self.latest = batch[0]
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self) -> None:
        self.fresh = True

    def on_train_epoch_end(self) -> None:
        self.fresh = True
        self.log("train/fresh", float(self.fresh))
        self.log("train/again", self.seen.compute())


@pytest.mark.parametrize("learner, notes", [(InValidation, 1), (Allowed, 0)])
def test_values_that_validation_reads_are_noted_and_metrics_are_allowed(
    learner: type[Learner], notes: int, tmp_path: Path
) -> None:
    over, _, _ = over_sites(list, tmp_path, rounds=1, learner=learner)
    told = [n for n in over.notes if "self.outs at the sites, and on_validation_epoch_end" in n]
    assert len(told) == notes and not [note for note in over.notes if "self.seen" in note]
