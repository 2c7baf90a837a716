"""A metric that cannot be computed is named, before round 0 or in a note; no round is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning.callbacks import GlobalLossLogger, PerClientEvaluation
from tests.helpers.learners import Lit, blobs, federated, trainer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Regressed(Lit):
    """Logs R² of the first output in validation, which needs two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.r2 = torchmetrics.R2Score()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        super().validation_step(batch, batch_idx)
        self.r2.update(self.net(x)[:, 0].detach(), y.double())
        self.log("val/r2", self.r2)


def blobs_with_tests(sizes: list[int]) -> Any:
    x = torch.randn(200, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x[:, :4].argmax(1)
    own = [list(range(10 * i, 10 * i + 10)) for i in range(len(sizes))]
    tests = [list(range(100 + 10 * i, 100 + 10 * i + n)) for i, n in enumerate(sizes)]
    return InMemoryDataModule(
        (x, y), test=(x, y), clients=own, test_clients=tests, batch_size=5, seed=1
    )


def test_a_client_whose_metric_fails_has_no_value_and_a_note_names_both() -> None:
    measure = PerClientEvaluation(1, modes={"r2": "max"})
    module = federated(Regressed(), participation="all")
    trainer(2, [measure]).fit(module, blobs_with_tests([1, 6, 7, 8]))
    assert measure.table["r2"].keys() == {1, 2, 3} and measure.table["acc"].keys() == {0, 1, 2, 3}
    (note,) = [note for note in module.notes if "R2Score, logged as val/r2" in note]
    assert "client 0" in note and "Needs at least two samples" in note


def test_a_metric_that_no_client_can_compute_is_refused_before_round_0() -> None:
    measure = PerClientEvaluation(1, modes={"r2": "max"})
    module = federated(Regressed(), participation="all")
    with pytest.raises(UserError, match=r"R2Score, logged as val/r2, cannot be computed.*client 0"):
        trainer(2, [measure]).fit(module, blobs_with_tests([1, 1, 1]))
    assert module.run.state.rounds == 0


class Late(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.training and self.current_epoch == 1:
            raise RuntimeError("no measurement today")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("rounds", [2, 4])
def test_a_measurement_that_fails_loses_no_round(rounds: int, tmp_path: Path) -> None:
    module = federated(Late(), participation="all")
    fit = trainer(
        rounds, [GlobalLossLogger(1)], enable_checkpointing=True, default_root_dir=tmp_path
    )
    with pytest.raises(RuntimeError, match="no measurement today"):
        fit.fit(module, blobs())
    (kept,) = tmp_path.rglob("*.ckpt")
    saved = torch.load(kept, weights_only=False)
    assert saved["federated"]["rounds"] == 2
