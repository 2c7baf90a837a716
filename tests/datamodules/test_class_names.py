"""Clients' data sets whose classes have other names, or another order, are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from fl_lightning import UserError
from fl_lightning.datamodules import FromDataModule, FromDatasets


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


def labels_of(data: FromDatasets, client: int) -> list[int]:
    dataset: Any = data.client_dataset(client)
    return [int(dataset[i][1]) for i in range(len(dataset))]


def test_labels_are_mapped_by_name_where_asked(tmp_path: Path) -> None:
    """A folder that lacks a class numbers the others anew, and is given the run's numbers back."""
    one = folder(tmp_path / "anna", "bird", "cat")
    other = folder(tmp_path / "ben", "cat", "dog")
    with pytest.raises(UserError, match=r"Give classes=\['bird', 'cat', 'dog'\]"):
        FromDatasets(clients=[one, other])
    classes = ["dog", "cat", "bird"]
    given: Any = {"anna": one, "ben": Subset(other, [0, 5])}
    data = FromDatasets(
        clients=given, test=ConcatDataset([one, other]), classes=classes, test_clients={"ben": one}
    )
    assert data.class_names == classes and data.num_classes == 3
    assert labels_of(data, 0) == [2, 2, 2, 1, 1, 1] and labels_of(data, 1) == [1, 0]
    assert data.client_label_counts(0).tolist() == [0, 3, 3]  # type: ignore[union-attr]
    assert [len(data.client_test_indices(i)) for i in range(2)] == [0, 6]
    (tested,) = [batch[1].tolist() for batch in data.test_dataloader()]
    assert tested == [2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0]


def test_what_cannot_be_mapped_by_name_is_refused(tmp_path: Path) -> None:
    one = folder(tmp_path / "anna", "bird", "cat")
    plain = torch.utils.data.TensorDataset(torch.zeros(4, 3), torch.arange(4) % 2)
    with pytest.raises(UserError, match=r"client 0 has the class 'bird', which is not in classes"):
        FromDatasets(clients=[one], classes=["birds", "cat"])
    with pytest.raises(UserError, match="client 1 does not name its classes"):
        FromDatasets(clients=[one, plain], classes=["cat", "bird"])
    with pytest.raises(UserError, match=r"classes is .*give each name once"):
        FromDatasets(clients=[one], classes=["cat", "cat"])
    with pytest.raises(UserError, match="classes numbers the labels by name, and targets"):
        FromDatasets(one, targets=[0] * 6, classes=["cat", "bird"], num_clients=2)


def test_a_data_modules_validation_set_with_other_classes_is_refused(tmp_path: Path) -> None:
    class Animals(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(folder(tmp_path / "train", "bird", "cat"), batch_size=2)

        def val_dataloader(self) -> Any:
            return DataLoader(folder(tmp_path / "val", "cat", "dog"), batch_size=2)

    data = FromDataModule(Animals(), num_clients=2)
    data.setup()
    assert list(data.class_names) == ["bird", "cat"]
    with pytest.raises(UserError, match=r"val_dataloader of Animals.*'cat', 'dog'.*'bird', 'cat'"):
        data.val_dataloader()
