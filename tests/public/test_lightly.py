"""BYOL of lightly's examples.

A momentum encoder written in training_step, judged by lightly's own kNN accuracy.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightly.data import LightlyDataset
from lightly.loss import NegativeCosineSimilarity
from lightly.models import ResNetGenerator
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import BYOLTransform, BYOLView1Transform, BYOLView2Transform
from lightly.utils.benchmarking import BenchmarkModule
from lightly.utils.scheduler import cosine_schedule
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.transforms import ToTensor

from fl_lightning.datamodules import FromDatasets
from tests.public.agreement import MIDDLE, ROUNDS, Recipe, check, quiet_trainer

SIDE, CLASSES = 16, 3


class Stripes(torch.utils.data.Dataset[Any]):
    """Noisy images with stripes in one of three directions.

    With a transform, as torchvision's datasets.
    """

    transform: Any = None

    def __init__(self, number: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.targets = [i % CLASSES for i in range(number)]
        across, down = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
        waves = [np.sin(across), np.sin(down), np.sin((across + down) / 1.4)]
        pixels = [
            128 + 40 * waves[k][..., None] + 60 * rng.normal(size=(SIDE, SIDE, 3))
            for k in self.targets
        ]
        self.images = [Image.fromarray(p.clip(0, 255).astype(np.uint8)) for p in pixels]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        return self.transform(self.images[i]), self.targets[i]


def dataset(number: int, seed: int, transform: Any) -> LightlyDataset:
    return LightlyDataset.from_torch_dataset(Stripes(number, seed), transform=transform)


def known() -> DataLoader[Any]:
    return DataLoader(dataset(60, 1, ToTensor()), batch_size=30)


class BYOL(BenchmarkModule):
    """As in lightly's examples, with a small backbone."""

    def __init__(self, dataloader_kNN: DataLoader[Any]) -> None:
        super().__init__(dataloader_kNN, num_classes=CLASSES, knn_k=5)
        resnet = ResNetGenerator("resnet-9", width=0.125)
        self.backbone = nn.Sequential(*list(resnet.children())[:-1], nn.AdaptiveAvgPool2d(1))
        self.projection_head = BYOLProjectionHead(64, 64, 32)
        self.prediction_head = BYOLPredictionHead(32, 64, 32)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x: Tensor) -> Tensor:
        return self.prediction_head(self.projection_head(self.backbone(x).flatten(start_dim=1)))

    def forward_momentum(self, x: Tensor) -> Tensor:
        return self.projection_head_momentum(
            self.backbone_momentum(x).flatten(start_dim=1)
        ).detach()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        momentum = cosine_schedule(self.current_epoch, 10, 0.9, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        x0, x1 = batch[0]
        p0, z0 = self.forward(x0), self.forward_momentum(x0)
        p1, z1 = self.forward(x1), self.forward_momentum(x1)
        return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.06)


def views() -> BYOLTransform:
    return BYOLTransform(
        BYOLView1Transform(input_size=SIDE, gaussian_blur=0.0),
        BYOLView2Transform(input_size=SIDE, gaussian_blur=0.0),
    )


def federated(num_workers: int) -> FromDatasets:
    val = dataset(60, 2, ToTensor())
    return FromDatasets(
        dataset(60, 1, views()), val, num_clients=3, batch_size=10, num_workers=num_workers
    )


def accuracy(exported: Path) -> float:
    loader = DataLoader(dataset(60, 2, ToTensor()), batch_size=20)
    model = BYOL.load_from_checkpoint(exported, dataloader_kNN=known())
    return float(quiet_trainer().validate(model, loader, verbose=False)[0]["kNN_accuracy"])


@pytest.mark.public
@pytest.mark.parametrize(("engine", "num_workers"), [("auto", 0), ("concurrent", 1)])
def test_byol(tmp_path: Path, engine: str, num_workers: int) -> None:
    options = {"participation": 2, "local_epochs": 1, "engine": engine}
    data = partial(federated, num_workers)
    check(
        Recipe("lightly", lambda: BYOL(known()), data, "kNN_accuracy", accuracy, options), tmp_path
    )
    files = (tmp_path / "whole" / f"epoch={t}.ckpt" for t in (MIDDLE, ROUNDS - 1))
    early, late = (torch.load(file, weights_only=True)["state_dict"] for file in files)
    teacher = next(
        name for name in early if name.startswith("backbone_momentum") and name.endswith("weight")
    )
    assert not torch.equal(early[teacher], late[teacher]), "the momentum encoder stands still"
