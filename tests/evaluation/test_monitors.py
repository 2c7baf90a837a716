"""EarlyStopping and ModelCheckpoint on a metric that is measured in some rounds only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

from fl_lightning import InMemoryDataModule
from fl_lightning.callbacks import GlobalLossLogger, PerClientEvaluation
from tests.helpers.learners import Lit, federated, trainer

ROUNDS = 9
MONITORS = {
    "clients/loss": lambda: PerClientEvaluation(every_n_rounds=3),
    "global/train_loss": lambda: GlobalLossLogger(every_n_rounds=3),
}


@pytest.fixture(params=MONITORS)
def monitor(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def clients_data(validated: bool) -> InMemoryDataModule:
    x = torch.randn(200, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x[:, :4].argmax(1)
    test = (x[:50], y[:50]) if validated else None
    return InMemoryDataModule(
        (x, y), test=test, num_clients=4, batch_size=10, client_test_fraction=0.25
    )


def run(monitor: str, *callbacks: Any, validated: bool, before: bool = False, **given: Any) -> Any:
    """A slow learner, so that each measurement is better than the last; rounds 2, 5, 8 have one."""
    data = clients_data(validated)
    order = [MONITORS[monitor](), *callbacks]
    fit = trainer(ROUNDS, order[::-1] if before else order, enable_checkpointing=True, **given)
    fit.fit(federated(Lit(lr=0.003), participation="all"), data)
    return fit


@pytest.mark.parametrize(("before", "validated"), [(True, False), (False, True)])
def test_patience_counts_measurements(
    monitor: str, validated: bool, before: bool, tmp_path: Path
) -> None:
    stop = EarlyStopping(monitor, patience=2)
    fit = run(monitor, stop, validated=validated, before=before, default_root_dir=tmp_path)
    assert fit.current_epoch == ROUNDS and stop.wait_count == 0
    bored = EarlyStopping(monitor, patience=1, min_delta=100.0)
    fit = run(monitor, bored, validated=validated, before=before, default_root_dir=tmp_path)
    assert fit.current_epoch == 6, "the second measurement is no better than the first"
    assert "on_train_epoch_end" not in vars(bored), "the callback is the user's own again"


def test_checkpoints_are_of_measured_rounds(monitor: str, tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor=monitor, save_top_k=-1, filename="{epoch}")
    run(monitor, best, validated=monitor.startswith("clients"))
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {f"epoch={t}.ckpt" for t in (2, 5, 8)}


def test_a_monitor_that_no_measurement_logs_is_lightnings(tmp_path: Path) -> None:
    stop = EarlyStopping("val/loss", patience=1, min_delta=100.0)
    fit = run("clients/loss", stop, validated=True, default_root_dir=tmp_path)
    assert fit.current_epoch == 2


def test_the_last_round_of_an_early_stop_is_kept(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, monitor="clients/loss", save_top_k=-1, filename="{epoch}")
    stop = EarlyStopping("val/loss", patience=1, min_delta=100.0)
    measurement = PerClientEvaluation(every_n_rounds=None)
    fit = trainer(ROUNDS, [measurement, stop, best], enable_checkpointing=True)
    fit.fit(federated(Lit(), participation="all"), clients_data(validated=True))
    assert fit.current_epoch == 2
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=1.ckpt"]
    again = trainer(4, [PerClientEvaluation(every_n_rounds=None)])
    data = clients_data(validated=True)
    again.fit(federated(Lit(), participation="all"), data, ckpt_path=best.best_model_path)
    assert again.current_epoch == 4
