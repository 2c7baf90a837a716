"""What plain Lightning takes: scripted modules, profilers, steps with other arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import UserError
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


class OfItself(Lit):
    """A function that it makes refers to the learner, which a copy of the learner does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = lambda x: self.net[0](x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net[1:](self.first(batch[0])), batch[1])


@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_a_step_whose_copy_computes_with_the_learners_own_weights_is_refused(engine: str) -> None:
    with pytest.raises(UserError, match=r"^learner OfItself: a step of a copy .*net.0.w"):
        trained(OfItself, engine)


class Later(Lit):
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
    with pytest.raises(UserError, match=r"self\.log\('train/parts', …\) got a dict"):
        trained(Nested, engine)
    with pytest.raises(UserError, match=r"'train/all'.*shape \(8, 20\).*its mean"):
        trained(Whole, engine)
