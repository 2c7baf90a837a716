"""torchgeo's task and data module on images in the layout of EuroSAT, whose batches the data module
normalises."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rasterio
from torchgeo.datamodules import EuroSATDataModule
from torchgeo.datamodules.eurosat import MEAN, STD
from torchgeo.datasets import EuroSAT
from torchgeo.trainers import ClassificationTask

from fl_lightning.datamodules import Dirichlet, FromDataModule
from tests.public.agreement import Recipe, check, quiet_trainer

CLASSES, SIDE = ("Forest", "Highway", "River"), 32
SPLITS = {"train": 20, "val": 8}  # images of a class


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder as EuroSAT is unpacked: 13 bands, brighter in some of them by class."""
    rng = np.random.default_rng(0)
    root = tmp_path / "eurosat"
    names: dict[str, list[str]] = {split: [] for split in SPLITS}
    mean, std = (
        np.array([of[band] for band in EuroSAT.all_band_names])[:, None, None] for of in (MEAN, STD)
    )
    for k, label in enumerate(CLASSES):
        folder = root / EuroSAT.base_dir / label
        folder.mkdir(parents=True)
        for split, number in SPLITS.items():
            for i in range(number):
                names[split].append(f"{label}_{split}_{i}.tif")
                noise = rng.normal(size=(13, SIDE, SIDE))
                pixels = mean + std * (0.3 * (np.arange(13) % 3 == k)[:, None, None] + noise)
                kind = {
                    "driver": "GTiff",
                    "count": 13,
                    "width": SIDE,
                    "height": SIDE,
                    "dtype": "uint16",
                }
                with rasterio.open(folder / names[split][-1], "w", **kind) as file:
                    file.write(pixels.clip(0, 65535).astype("uint16"))
    for split, files in names.items():
        (root / EuroSAT.split_filenames[split]).write_text("\n".join(files))
    return root


def learner() -> ClassificationTask:
    return ClassificationTask(
        model="test_resnet", in_channels=13, num_classes=len(CLASSES), lr=1e-3
    )


@pytest.mark.public
def test_task_and_data_module(images: Path, tmp_path: Path) -> None:
    def plain() -> EuroSATDataModule:
        return EuroSATDataModule(root=images, batch_size=8)

    def federated() -> FromDataModule:
        return FromDataModule(plain(), partition=Dirichlet(alpha=1.0), num_clients=3)

    def outside(exported: Path) -> float:
        task = ClassificationTask.load_from_checkpoint(exported)
        return float(
            quiet_trainer().validate(task, datamodule=plain(), verbose=False)[0]["val_loss"]
        )

    options = {"participation": 2, "local_epochs": 1}
    check(Recipe("torchgeo", learner, federated, "val_loss", outside, options), tmp_path)
