"""Rates follow their schedules."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl

from fl_lightning import Exponential
from tests.helpers.learners import blobs, federated, trainer


def test_learning_rates_follow_their_schedules() -> None:
    seen: list[float] = []

    class See(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            seen.extend([float(trainer.callback_metrics["client_lr"]), pl_module.optimizers().param_groups[0]["lr"]])

    trainer(3, [See()]).fit(federated(lr_decay=0.5, server_lr_decay=Exponential(0.1)), blobs())
    assert seen == pytest.approx([0.1, 1.0, 0.05, 0.1, 0.025, 0.01])
