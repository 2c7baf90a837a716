"""Clients' data sets whose classes have other names, or another order, are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from fl_lightning import UserError
from fl_lightning.datamodules import FromDatasets


def folder(root: Path, *classes: str) -> ImageFolder:
    for name in classes:
        (root / name).mkdir(parents=True)
        for j in range(3):
            Image.new("RGB", (4, 4), (j, j, j)).save(root / name / f"{j}.png")
    return ImageFolder(str(root), transforms.ToTensor())


class Wrapped(Dataset[Any]):
    """A wrapper of a user's own."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Any:
        return self.dataset[i]


def test_folders_with_other_classes_are_refused_by_name(tmp_path: Path) -> None:
    one = folder(tmp_path / "anna", "bird", "cat")
    other = folder(tmp_path / "ben", "cat", "dog")
    with pytest.raises(
        UserError, match=r"clients: client 1 .*'cat', 'dog'.*client 0.*'bird', 'cat'"
    ):
        FromDatasets(clients=[one, other])
    for wrapped in (
        Subset(other, [0, 1]),
        Wrapped(other),
        ConcatDataset([other]),
        Subset(Wrapped(other), [0]),
    ):
        with pytest.raises(UserError, match="'cat', 'dog'"):
            FromDatasets(clients=[one, wrapped])
    with pytest.raises(UserError, match=r"FromDatasets' test .*'cat', 'dog'.*'bird', 'cat'"):
        FromDatasets(one, test=other, num_clients=2)
    with pytest.raises(UserError, match=r"test_clients.*client 1.*'cat', 'dog'"):
        FromDatasets(clients=[one, one], test_clients=[one, other])
    with pytest.raises(UserError, match="'cat', 'dog'"):
        FromDatasets(ConcatDataset([one, other]), num_clients=2)


def test_alike_classes_and_data_sets_without_names_are_taken(tmp_path: Path) -> None:
    one = folder(tmp_path / "anna", "bird", "cat")
    other = folder(tmp_path / "ben", "bird", "cat")
    data = FromDatasets(clients=[one, Subset(other, [0, 5])], test=Wrapped(other))
    assert data.client_sizes().tolist() == [6, 2]
    plain = torch.utils.data.TensorDataset(torch.zeros(4, 3), torch.arange(4) % 2)
    assert FromDatasets(clients=[plain, plain]).num_clients == 2
    assert FromDatasets(clients=[one, plain]).num_clients == 2
    third = folder(tmp_path / "clara", "bird", "cat", "dog")
    assert FromDatasets(clients=[one, third, other]).num_clients == 3
    shifted = ImageFolder(str(tmp_path / "clara"), target_transform=lambda label: 2 - label)
    assert FromDatasets(clients=[one, shifted]).num_clients == 2
