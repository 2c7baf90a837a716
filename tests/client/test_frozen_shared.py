"""A base that no step writes is held once: `frozen_stay`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fl_lightning.callbacks import GlobalLossLogger
from fl_lightning.client.flat_learner import FlatLearner
from tests.helpers.learners import Lit, blobs, federated, trainer


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
