"""Arguments, settings of the Trainer and data that have no meaning here are refused by name."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BackboneFinetuning, ModelCheckpoint, ThroughputMonitor

from fl_lightning import UserError
from tests.helpers.learners import blobs, federated, trainer


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"participation": 0}, ["participation=0", "'all'"]),
        ({"participation": 1.5}, ["participation=1.5", "above 0 up to 1"]),
        ({"participation": 11}, ["participation=11", "10 are registered"]),
        ({"participation": "al"}, ["participation='al'", "Did you mean 'all'"]),
        ({"sampling": "bernouli"}, ["sampling='bernouli'", "Did you mean 'bernoulli'"]),
        ({"local_steps": 1.5}, ["local_steps=1.5", "integer"]),
        ({"clip_norm": 0.0}, ["clip_norm=0.0", "above 0"]),
        ({"init_from": "/nowhere.ckpt"}, ["/nowhere.ckpt"]),
        ({"client_optimizer": torch.optim.LBFGS}, ["LBFGS", "torch.optim.SGD"]),
    ],
)
def test_arguments_are_refused_with_name_value_and_what_is_accepted(
    arguments: Any, words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        trainer(1).fit(federated(**arguments), blobs())
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_steps": 5}, ["max_steps=5", "max_epochs"]),
        ({"accumulate_grad_batches": 2}, ["accumulate_grad_batches=2", "model.accumulate"]),
        ({"gradient_clip_val": 1.0}, ["gradient_clip_val=1.0", "clip_norm"]),
        ({"val_check_interval": 0.5}, ["val_check_interval", "check_val_every_n_epoch"]),
        ({"limit_train_batches": 3}, ["limit_train_batches=3", "local_steps"]),
        ({"limit_train_batches": 1}, ["limit_train_batches=1", "local_steps"]),
        ({"overfit_batches": 1}, ["overfit_batches=1"]),
    ],
)
def test_trainer_settings_without_meaning_are_refused(settings: Any, words: list[str]) -> None:
    with pytest.raises((UserError, ValueError)) as refused:
        trainer(1, **settings).fit(federated(), blobs())
    assert all(word in str(refused.value) for word in words), refused.value


def test_data_without_clients_is_refused_with_the_line_that_federates_it() -> None:
    class Plain(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([0])

    with pytest.raises(UserError, match=r"FromDataModule\(Plain\(…\), num_clients=100\)"):
        trainer(1).fit(federated(), Plain())
    with pytest.raises(UserError, match="FromDatasets"):
        trainer(1).fit(federated(), torch.utils.data.DataLoader([0]))


class SpikeDetection(pl.Callback):
    """Stands for Lightning's, whose package may lack a dependency: it is known by its name."""


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (
            ModelCheckpoint(train_time_interval=timedelta(seconds=1)),
            "train_time_interval would save nothing",
        ),
        (
            ModelCheckpoint(every_n_train_steps=1, monitor="val/acc", mode="max"),
            r"every_n_train_steps would save another model.*every_n_epochs",
        ),
        (SpikeDetection(), "SpikeDetection cannot work .*on_nonfinite='skip'"),
        (BackboneFinetuning(), "BackboneFinetuning cannot work .* unfreezes parameters"),
        (ThroughputMonitor(batch_size_fn=len), "ThroughputMonitor cannot work .*counts samples"),
    ],
)
def test_callbacks_that_cannot_work_are_refused(callback: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        trainer(1, [callback], enable_checkpointing=True).fit(federated(), blobs())


@pytest.mark.parametrize("option", ["default_root_dir", "dirpath"])
def test_a_folder_that_is_not_on_a_disk_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"enable_checkpointing": True}
    if option == "dirpath":
        settings["callbacks"] = [ModelCheckpoint(dirpath="memory://run/checkpoints")]
    else:
        settings["default_root_dir"] = "memory://run"
    with pytest.raises(
        UserError, match=f"{option}='memory://run.*not a folder of a disk.*[Mm]ount"
    ):
        trainer(1, **settings).fit(federated(), blobs())
    assert not (tmp_path / "memory:").exists()
