"""Rates follow their schedules."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl

from fl_lightning import Exponential, UserError
from fl_lightning.schedules import Cosine
from tests.helpers.learners import blobs, federated, trainer


def test_learning_rates_follow_their_schedules() -> None:
    seen: list[float] = []

    class See(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            seen.extend([float(trainer.callback_metrics["client_lr"]), pl_module.optimizers().param_groups[0]["lr"]])

    trainer(3, [See()]).fit(federated(lr_decay=0.5, server_lr_decay=Exponential(0.1)), blobs())
    assert seen == pytest.approx([0.1, 1.0, 0.05, 0.1, 0.025, 0.01])


def test_schedules_start_at_their_scale() -> None:
    assert [Exponential(0.9, scale=0.1)(t) for t in (0, 2)] == pytest.approx([0.1, 0.081])
    assert [Exponential(0.9)(t) for t in (0, 2)] == pytest.approx([1.0, 0.81])
    cosine = Cosine(4, end=0.5, scale=0.2)
    assert [cosine(t) for t in (0, 2, 4, 9)] == pytest.approx([0.2, 0.15, 0.1, 0.1])
    assert Exponential(2.0, scale=-1.0)(10_000) == -float("inf") and Exponential(2.0, scale=0.0)(10_000) == 0


@pytest.mark.parametrize("make", [lambda: Exponential(0.9, scale=float("nan")), lambda: Cosine(3, scale=float("inf"))])
def test_a_scale_is_a_finite_number(make: Any) -> None:
    with pytest.raises(UserError, match=r"scale=.*finite"):
        make()
