"""The Temporal Fusion Transformer of pytorch-forecasting, as in its tutorial.

Each client has some of the series.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from pytorch_forecasting import MAE, QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer
from pytorch_forecasting.data.examples import generate_ar_data

from fl_lightning.datamodules import ByGroup, FromDataModule
from tests.public.agreement import Recipe, check

SERIES, TIMES, AHEAD = 6, 30, 4


def series() -> tuple[TimeSeriesDataSet, TimeSeriesDataSet]:
    """Training on all but the last steps of each series, validation on these."""
    frame = generate_ar_data(n_series=SERIES, timesteps=TIMES, seed=0)
    frame["series"] = frame["series"].astype(str)
    train = TimeSeriesDataSet(
        frame[frame["time_idx"] < TIMES - AHEAD],
        time_idx="time_idx",
        target="value",
        group_ids=["series"],
        static_categoricals=["series"],
        time_varying_known_reals=["time_idx"],
        time_varying_unknown_reals=["value"],
        min_encoder_length=6,
        max_encoder_length=12,
        max_prediction_length=AHEAD,
        target_normalizer=GroupNormalizer(groups=["series"]),
        add_relative_time_idx=True,
        add_target_scales=True,
        add_encoder_length=True,
    )
    return train, TimeSeriesDataSet.from_dataset(
        train, frame, predict=True, stop_randomization=True
    )


class Series(LightningDataModule):
    """The loaders of the tutorial."""

    def setup(self, stage: str) -> None:
        self.train, self.val = series()

    def train_dataloader(self) -> Any:
        return self.train.to_dataloader(train=True, batch_size=12)

    def val_dataloader(self) -> Any:
        return self.val.to_dataloader(train=False, batch_size=4)


def learner() -> TemporalFusionTransformer:
    sizes = {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 4}
    return TemporalFusionTransformer.from_dataset(
        series()[0], learning_rate=0.01, dropout=0.1, loss=QuantileLoss(), log_interval=-1, **sizes
    )


def federated() -> FromDataModule:
    owners = [int(name) % 3 for name in series()[0].decoded_index["series"]]
    return FromDataModule(Series(), partition=ByGroup(owners))


def error(exported: Path) -> float:
    """MAE of the tutorial's ``predict``."""
    model = TemporalFusionTransformer.load_from_checkpoint(exported)
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    loader = series()[1].to_dataloader(train=False, batch_size=SERIES)
    predicted = model.predict(loader, return_y=True, trainer_kwargs=quiet)
    return float(MAE()(predicted.output, predicted.y))


@pytest.mark.public
def test_temporal_fusion_transformer(tmp_path: Path) -> None:
    options = {"participation": 2, "local_epochs": 1}
    trusted = False  # the model saves parameters of the dataset, objects among them
    check(
        Recipe(
            "pytorch-forecasting",
            learner,
            federated,
            "val_MAE",
            error,
            options,
            weights_only=trusted,
        ),
        tmp_path,
    )
