"""What plain Lightning takes: scripted modules, profilers, steps with other arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks.callback import Callback
from torch import Tensor, nn

from fl_lightning import UserError
from fl_lightning.callbacks import ClusteredModels
from tests.evaluation.test_as_validated import Requiring
from tests.helpers.learners import Lit, blobs, federated, trainer

# Scripted code may be fused, so the last bits differ.
CLOSE = {"rtol": 1e-12, "atol": 1e-14}


class Scripted(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.jit.script(self.net.double())


def trained(learner: type[Lit], engine: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    module = federated(learner(), engine=engine, workers=2, participation="all")
    trainer(2, **settings).fit(module, blobs(clients=4))
    return module


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked", "auto"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_scripted_module_is_trained_as_the_plain_one(engine: str) -> None:
    plain = trained(Lit, "sequential")
    # TorchScript optimizes at its first calls in a process, which have other last bits than later
    # ones: "concurrent" refuses to begin with these.
    trained(Scripted, "sequential")
    module = trained(Scripted, engine)
    torch.testing.assert_close(module.global_vector, plain.global_vector, **CLOSE)
    exported = torch.cat([p.detach().reshape(-1) for p in module.export().parameters()])
    torch.testing.assert_close(exported, plain.global_vector.detach(), **CLOSE)


@pytest.mark.parametrize("engine", ["auto", "concurrent"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_profiler_leaves_the_learner_copyable(engine: str, tmp_path: Path) -> None:
    plain = trained(Lit, engine)
    module = trained(Lit, engine, profiler="pytorch", default_root_dir=tmp_path)
    assert torch.equal(module.global_vector, plain.global_vector)
    assert "cannot be copied" not in module.engine_facts["why"]
    if engine == "concurrent":
        assert module.engine_facts["engine"] == "concurrent"


class Keywords(Lit):
    def training_step(self, batch: Any, **others: Any) -> Tensor:
        assert not others
        return super().training_step(batch, 0)


class Anything(Lit):
    def training_step(self, *given: Any) -> Tensor:
        batch, batch_idx = given
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("learner", [Keywords, Anything])
def test_a_step_gets_the_arguments_that_lightning_gives_it(learner: type[Lit]) -> None:
    plain = trained(Lit, "sequential")
    assert torch.equal(trained(learner, "sequential").global_vector, plain.global_vector)


class OfItself(Lit):
    """A function that it makes refers to the learner, which a copy of the learner does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = lambda x: self.net[0](x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net[1:](self.first(batch[0])), batch[1])


class Compiled(OfItself):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.compile(self.net[0].forward, backend="eager")


@pytest.mark.parametrize("learner", [OfItself, Compiled])
@pytest.mark.parametrize("engine", ["auto", "sequential", "concurrent", "stacked"])
def test_a_step_whose_copy_computes_with_the_learners_own_weights_is_refused(
    engine: str, learner: type[Lit]
) -> None:
    with pytest.raises(UserError, match=f"^learner {learner.__name__}: a step of a copy .*net.0.w"):
        trained(learner, engine)


class Later(Lit):
    """Returns no loss from the second round on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.trainer.current_epoch else loss


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_step_without_a_loss_is_named(engine: str) -> None:
    with pytest.raises(TypeError, match=r"Later\.training_step returned NoneType.*zero loss"):
        trained(Later, engine)


class OfSamples(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")


class Detached(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).detach()


@pytest.mark.parametrize("engine", ["auto", "sequential", "concurrent", "stacked"])
@pytest.mark.parametrize(
    ("learner", "said"),
    [
        (OfSamples, r"returned a loss of shape \(8,\); it has"),
        (Detached, "has no gradient.*detach"),
    ],
)
def test_a_loss_that_cannot_be_minimised_is_said_in_a_paragraph(
    learner: type[Lit], said: str, engine: str
) -> None:
    with pytest.raises(UserError, match=said):
        trained(learner, engine)


class Nested(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train/parts", {"a": 1.0, "b": 2.0})  # type: ignore[arg-type]
        return super().training_step(batch, batch_idx)


class Whole(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train/all", batch[0])
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_what_cannot_be_logged_is_named(engine: str) -> None:
    with pytest.raises(UserError, match=r"self\.log\('train/parts', …\) got a dict.*log_dict"):
        trained(Nested, engine)
    with pytest.raises(UserError, match=r"'train/all'.*shape \(8, 20\).*value\.mean\(\)"):
        trained(Whole, engine)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_ifca_measures_a_learner_that_takes_the_number_of_its_loader() -> None:
    module = federated(Requiring(), participation="all")
    trainer(2, [ClusteredModels(k=2, warmup=0)], limit_val_batches=0).fit(module, blobs(clients=4))
    assert module.trainer.current_epoch == 2


class SpikeDetection(Callback):
    """Stands for Lightning's, whose package may lack a dependency: it is known by its name."""


def test_lightnings_detection_of_spikes_is_refused() -> None:
    spike = pytest.importorskip("pytorch_lightning.callbacks.spike")
    for kind in (SpikeDetection, spike.SpikeDetection):
        with pytest.raises(UserError, match=r"SpikeDetection cannot work.*on_nonfinite='skip'"):
            trainer(1, [kind()]).fit(federated(), blobs(clients=4))
