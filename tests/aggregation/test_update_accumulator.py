"""Buffers that a client brings home: of the server's shape, and finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning.errors import Diverged, UserError
from tests.helpers.learners import InPlace, Lit, fitted


def test_a_buffer_of_another_shape_has_no_average() -> None:
    class Growing(InPlace):
        def move(self, x: Tensor) -> None:
            self.running_mean = x.expand(2, -1).mean(0, keepdim=True)

    with pytest.raises(
        UserError, match=r"buffer running_mean has shape \(20,\).*\(1, 20\).*buffers='keep'"
    ):
        fitted(Growing, engine="sequential")
    fitted(Growing, engine="sequential", buffers="keep")


@pytest.mark.parametrize("policy", ["average", "keep"])
def test_a_client_whose_buffer_is_not_finite_has_diverged(policy: str) -> None:
    class Overflowing(InPlace):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.nan]))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            # the last batch of one client in five
            self.running_mean.add_(torch.inf if len(batch[0]) == 6 else 1.0)
            return Lit.training_step(self, batch, batch_idx)

    if policy == "average":
        with pytest.raises(Diverged, match="client 1 "):
            fitted(Overflowing, engine="sequential")
        with pytest.warns(UserWarning, match=r"clients \[1, 6\] were left out"):
            module, _ = fitted(Overflowing, 1, engine="sequential", on_nonfinite="skip")
        assert bool(module.learner.running_mean.isfinite().all()) and bool(
            (module.learner.running_mean >= 2).all()
        )
    else:
        module, _ = fitted(Overflowing, engine="sequential", buffers=policy)
        assert not bool(module.learner.running_mean.any())
    torch.testing.assert_close(
        module.learner.mask, torch.tensor([0.0, -torch.inf, torch.nan]).double(), equal_nan=True
    )
