"""What a learner changes in its own steps: buffers, attributes, metrics, frozen parameters; the same in each engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learners import Lit, blobs, federated, trainer
from torch import Tensor, nn

from fl_lightning.errors import UserError

ENGINES: list[dict[str, Any]] = [{"engine": "sequential"}, *({"engine": "concurrent", "workers": k} for k in (1, 2))]


def fitted(learner: type[Lit], rounds: int = 2, **arguments: Any) -> tuple[Any, dict[str, Tensor]]:
    """A module after a few rounds of all clients, and what was logged."""
    torch.manual_seed(3)
    module = federated(learner(), **{"participation": 1.0, **arguments})
    run = trainer(rounds)
    run.fit(module, blobs())
    return module, run.callback_metrics


class InPlace(Lit):
    """Centres its inputs at a running mean, kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(20))

    def move(self, x: Tensor) -> None:
        self.mean.mul_(0.9).add_(0.1 * x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.move(batch[0].mean(0))
        return nn.functional.cross_entropy(self.net(batch[0] - self.mean), batch[1])


class Assigned(InPlace):
    def move(self, x: Tensor) -> None:
        self.mean = self.mean * 0.9 + 0.1 * x


@pytest.mark.parametrize("arguments", [*ENGINES, {"engine": "stacked", "workers": 2}])
@pytest.mark.filterwarnings("ignore:engine='stacked'")
def test_assigning_to_a_buffer_is_as_changing_it_in_place(arguments: dict[str, Any]) -> None:
    reference, _ = fitted(InPlace, engine="sequential")
    module, _ = fitted(Assigned, **arguments)
    assert module.engine_facts["engine"] != "stacked"
    assert torch.equal(module.learner.mean, reference.learner.mean) and bool(module.learner.mean.any())
    assert torch.equal(module.global_vector, reference.global_vector)


def test_a_buffer_of_another_shape_has_no_average() -> None:
    class Growing(InPlace):
        def move(self, x: Tensor) -> None:
            self.mean = x.expand(2, -1).mean(0, keepdim=True)

    with pytest.raises(UserError, match=r"buffer mean has shape \(20,\).*\(1, 20\).*buffers='keep'"):
        fitted(Growing, engine="sequential")
    fitted(Growing, engine="sequential", buffers="keep")
