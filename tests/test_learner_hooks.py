"""The learner's own hooks happen where Lightning calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.learners import Lit, blobs, federated, trainer


def test_what_the_learner_hooks_do_happens() -> None:
    called: list[str] = []

    class Hooked(Lit):
        def setup(self, stage: str) -> None:
            called.append("setup fit" if stage == "fit" else "setup")

        def configure_model(self) -> None:
            called.append("configure_model")

        def on_train_epoch_start(self) -> None:
            called.append(f"epoch {self.current_epoch}")

        def on_validation_epoch_end(self) -> None:
            called.append("validated")

    trainer(2).fit(federated(Hooked()), blobs())
    assert called == ["setup fit", "configure_model", "epoch 0", "validated", "epoch 1", "validated"]


class Transferring(Lit):
    """Scales what arrives, by the hook that Lightning calls after a batch was moved."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return 2 * x, y


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_the_learners_transfer_hooks_see_its_batches_in_training_and_in_evaluation(engine: str) -> None:
    class Scaled(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step((2 * batch[0], batch[1]), batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step((2 * batch[0], batch[1]), batch_idx)

    found = []
    for learner in (Scaled, Transferring):
        torch.manual_seed(3)
        module, run = federated(learner(), engine=engine), trainer(2)
        run.fit(module, blobs())
        assert module.engine_facts["engine"] == engine
        found.append((module.global_vector.detach(), run.callback_metrics["val/loss"]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
