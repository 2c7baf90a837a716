"""What a client brings home: an update that is finite, buffers, and nothing of a client that diverged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.learners import Lit, blobs, federated, trainer


def test_buffers_are_averaged_or_kept() -> None:
    class Normed(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    averaged, kept = federated(Normed()), federated(Normed(), buffers="keep")
    trainer(1).fit(averaged, blobs())
    trainer(1).fit(kept, blobs())
    assert averaged.learner.net[1].num_batches_tracked == 3  # the maximum over clients
    assert averaged.learner.net[1].running_mean.abs().sum() > 0
    assert kept.learner.net[1].num_batches_tracked == 0 and not kept.learner.net[1].running_mean.any()


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_clients_that_diverge_stop_the_run_or_are_left_out(policy: str) -> None:
    class Diverges(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if len(batch[1]) == 2 else loss  # the short last batch of some clients

    module = federated(Diverges(), on_nonfinite=policy, participation="all")
    if policy == "stop":
        with pytest.raises(RuntimeError, match=r"client \d+ in round 0"):
            trainer(2).fit(module, blobs())
    else:
        trainer(2).fit(module, blobs())
        assert torch.isfinite(module.global_vector).all() and any("left out" in note for note in module.notes)
