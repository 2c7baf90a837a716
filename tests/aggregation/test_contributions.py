"""What a client brings home: an update that is finite, buffers, and nothing of a client that diverged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning.errors import Diverged, UserError
from tests.helpers.learners import InPlace, Lit, Normed, blobs, federated, fitted, trainer


def test_buffers_are_averaged_or_kept() -> None:
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
            short = batch_idx == 2 and len(batch[1]) == 2  # the last batch of some clients, and of that alone
            return loss * float("nan") if short else loss

    module = federated(Diverges(), on_nonfinite=policy, participation="all")
    if policy == "stop":
        with pytest.raises(RuntimeError, match=r"client \d+ in round 0"):
            trainer(2).fit(module, blobs())
    else:
        trainer(2).fit(module, blobs())
        assert torch.isfinite(module.global_vector).all() and any("left out" in note for note in module.notes)


def test_a_buffer_of_another_shape_has_no_average() -> None:
    class Growing(InPlace):
        def move(self, x: Tensor) -> None:
            self.mean = x.expand(2, -1).mean(0, keepdim=True)

    with pytest.raises(UserError, match=r"buffer mean has shape \(20,\).*\(1, 20\).*buffers='keep'"):
        fitted(Growing, engine="sequential")
    fitted(Growing, engine="sequential", buffers="keep")


@pytest.mark.parametrize("policy", ["average", "keep"])
def test_a_client_whose_buffer_is_not_finite_has_diverged(policy: str) -> None:
    class Overflowing(InPlace):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.nan]))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.mean.add_(torch.inf if len(batch[0]) == 6 else 1.0)  # the last batch of one client in five
            return Lit.training_step(self, batch, batch_idx)

    if policy == "average":
        with pytest.raises(Diverged, match="client 1 "):
            fitted(Overflowing, engine="sequential")
        with pytest.warns(UserWarning, match=r"clients \[1, 6\] were left out"):
            module, _ = fitted(Overflowing, 1, engine="sequential", on_nonfinite="skip")
        assert bool(module.learner.mean.isfinite().all()) and bool((module.learner.mean >= 2).all())
    else:
        module, _ = fitted(Overflowing, engine="sequential", buffers=policy)
        assert not bool(module.learner.mean.any())
    torch.testing.assert_close(module.learner.mask, torch.tensor([0.0, -torch.inf, torch.nan]).double(), equal_nan=True)


def test_bool_and_complex_buffers() -> None:
    class Kinds(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
            self.register_buffer("phase", torch.zeros(1, dtype=torch.complex64))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen[batch[1]] = True
            self.phase.add_(1j)
            return super().training_step(batch, batch_idx)

    module, _ = fitted(Kinds, 1, engine="sequential", local_steps=3)
    assert module.learner.seen.dtype == torch.bool and bool(module.learner.seen.all())
    torch.testing.assert_close(module.learner.phase, torch.tensor([3j]))


def test_a_buffer_that_counts_far_is_not_cut_short() -> None:
    class Counting(InPlace):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

        def move(self, x: Tensor) -> None:
            self.passes += 300

    module, _ = fitted(Counting, 1, engine="sequential", local_steps=1)
    assert int(module.learner.passes) == 300
