"""Labels and names of classes are those that the samples have when they are trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate
from torchvision import transforms
from torchvision.datasets import ImageFolder

from fl_lightning import UserError
from fl_lightning import datamodules as dm
from tests.helpers.learners import Loads


def flipped(y: int) -> int:
    return 3 - y


class Digits(Dataset[Any]):
    """Built as torchvision's: ``targets`` are the labels before ``target_transform``."""

    def __init__(self, target_transform: Callable[[int], Any] | None = None, count: int = 80):
        self.targets = torch.arange(count) * 7 % 4
        self.target_transform = target_transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> Any:
        y = int(self.targets[i])
        return torch.ones(3), y if self.target_transform is None else self.target_transform(y)


class Wrapped(Dataset[Any]):
    """A wrapper of one's own, which gives samples in another form."""

    def __init__(self, of: Digits, change: Callable[[Any, int, int], Any]) -> None:
        self.of = of
        self.targets = of.targets
        self.change = change

    def __len__(self) -> int:
        return len(self.of)

    def __getitem__(self, i: int) -> Any:
        x, y = self.of[i]
        return self.change(x, y, i)


def trained(data: Any, client: int) -> list[int]:
    """Return how many samples of each class a client trains on."""
    own = data.client_dataset(client)
    return np.bincount([int(own[i][1]) for i in range(len(own))], minlength=4).tolist()


@pytest.mark.parametrize(
    "made",
    [
        lambda: Digits(flipped),
        lambda: Subset(Digits(flipped), range(60)),
        lambda: ConcatDataset([Digits(), Digits(flipped)]),
        lambda: Digits(lambda y: torch.tensor(3 - y)),
        Digits,
    ],
    ids=["transform", "subset", "concat", "tensors", "none"],
)
def test_a_target_transform_is_split_and_counted(made: Callable[[], Any]) -> None:
    data = dm.FromDatasets(made(), partition=dm.Pathological(classes=1), num_clients=4)
    data.setup()
    for client in range(4):
        counts = data.client_label_counts(client)
        assert counts is not None and counts.tolist() == trained(data, client)
        assert sum(count > 0 for count in counts) == 1


CHANGES = {
    "pair": lambda x, y, i: (x, 3 - y),
    "one number": lambda x, y, i: (x, torch.tensor([3 - y])),
}
SAME = {
    "pair": lambda x, y, i: (x, y),
    "a tensor": lambda x, y, i: (x, torch.tensor(float(y))),
    "with a place": lambda x, y, i: (x, i, y),
    "one-hot": lambda x, y, i: (x, torch.eye(4)[3 - y]),
    "two pictures": lambda x, y, i: (x, x, y),
}


@pytest.mark.parametrize("name", CHANGES)
def test_labels_that_the_samples_do_not_have_count_as_unknown(name: str) -> None:
    made = Wrapped(Digits(), CHANGES[name])
    with pytest.warns(UserWarning, match=r"sample 0 .* label 3 .* says 0.*give targets"):
        assert dm.FromDatasets(made, num_clients=2).client_label_counts(0) is None
    with pytest.warns(UserWarning), pytest.raises(UserError, match="give targets"):
        dm.FromDatasets(made, num_clients=2, partition=dm.Dirichlet(1.0)).setup()
    given = dm.FromDatasets(made, num_clients=2, targets=[flipped(int(y)) for y in made.targets])
    given.setup()
    assert given.num_classes == 4


@pytest.mark.parametrize("name", SAME)
def test_labels_that_the_samples_have_are_known(name: str, recwarn: Any) -> None:
    assert dm.FromDatasets(Wrapped(Digits(), SAME[name]), num_clients=2).num_classes == 4
    assert not [str(one.message) for one in recwarn if "label" in str(one.message)]


def test_a_part_whose_labels_differ_is_found() -> None:
    parts = [Digits(), Digits(), Wrapped(Digits(), CHANGES["pair"])]
    with pytest.warns(UserWarning, match="sample 16. of the training data"):
        dm.FromDatasets(clients=parts).setup()


def test_comparing_draws_no_numbers_and_reads_no_later_sample_otherwise() -> None:
    noisy = Wrapped(Digits(), lambda x, y, i: (torch.rand(3), y))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    dm.FromDatasets(noisy, num_clients=2).setup()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loader_whose_collate_function_changes_labels() -> None:
    mine = Loads(DataLoader(Digits(), batch_size=4, collate_fn=coarse))
    with pytest.warns(UserWarning, match=r"sample 2 .* label 0 .* says 2"):
        assert dm.FromDataModule(mine, num_clients=2).num_classes is None


def coarse(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x, y % 2


@pytest.mark.parametrize("y", [[0, 1, 1_700_000_000_000], [0, 1, 10_000_000]])
def test_numbers_too_large_for_classes_are_no_classes(y: list[int]) -> None:
    """Counts per class would take the machine's memory."""
    data = dm.InMemoryDataModule((torch.zeros(3, 1), torch.tensor(y)), num_clients=1)
    assert data.num_classes is None and data.client_label_counts(0) is None
    labelled = Digits(count=3)
    labelled.targets = torch.tensor(y)
    assert dm.FromDatasets(labelled, num_clients=1).client_label_counts(0) is None


@pytest.mark.parametrize(
    ("y", "words"),
    [
        ([2.5, -3.0], "the labels are float64, such as 2.5"),
        ([-3, 1], "a label is -3"),
        (["a", "b"], "such as 'a'"),
        ([[0], [1]], r"the data set has no attribute targets or labels with one label"),
        ([1, 10**12], "a label is 1000000000000"),
    ],
)
def test_what_keeps_labels_from_being_classes_is_named(y: Any, words: str) -> None:
    labelled = Digits(count=2)
    labelled.targets = np.asarray(y)  # type: ignore[assignment]
    with pytest.raises(UserError, match=rf"uses classes, but .*: .*{words}.*give targets"):
        dm.FromDatasets(labelled, partition=dm.Dirichlet(1.0), num_clients=1).setup()
    if not isinstance(y[0], str | list):
        own = (torch.zeros(2, 1), np.asarray(y))
        with pytest.raises(UserError, match=words):
            dm.InMemoryDataModule(own, partition=dm.Dirichlet(1.0), num_clients=1).setup()


class Relabelled(Subset[Any]):
    """A Subset that knows its labels."""

    def __init__(self, dataset: Any, indices: list[int]) -> None:
        super().__init__(dataset, indices)
        self.targets = [flipped(int(dataset.targets[i])) for i in indices]

    def __getitem__(self, i: Any) -> Any:
        return super().__getitem__(i)[0], self.targets[i]

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[i] for i in indices]


def test_a_subset_s_own_labels_count() -> None:
    partition = dm.Dirichlet(1.0)
    data = dm.FromDatasets(
        Relabelled(Digits(), list(range(60))), num_clients=2, partition=partition
    )
    counts = data.client_label_counts(0)
    assert counts is not None and counts.tolist() == trained(data, 0)


@pytest.mark.parametrize("what", ["x", "y"])
def test_missing_values_of_a_frame_are_refused(what: str) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    whole = pandas.DataFrame({"a": [1.0, 2.0], "b": [1.0, 2.0]})
    gap = pandas.DataFrame({"a": [1.0, 2.0], "b": [1.0, None]})
    pair = (gap, whole["a"]) if what == "x" else (whole, gap["b"])
    with pytest.raises(UserError, match=rf"{what} is a \w+ without a value in row 1"):
        dm.InMemoryDataModule(pair, num_clients=1).setup()


def test_whole_numbers_of_a_frame_of_objects_are_whole() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    x = pandas.DataFrame({"a": [1.0, 2.0]})
    data = dm.InMemoryDataModule((x, pandas.Series([16777217, 1], dtype=object)), num_clients=1)
    data.setup()
    assert data.train_set is not None
    assert data.train_set.y.tolist() == [16777217, 1]  # type: ignore[attr-defined]


def folder(root: Path, *classes: str) -> ImageFolder:
    for name in classes:
        (root / name).mkdir(parents=True)
        for j in range(3):
            Image.new("RGB", (4, 4), (j, j, j)).save(root / name / f"{j}.png")
    return ImageFolder(str(root), transforms.ToTensor())


class Around(Dataset[Any]):
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
    told = r"clients: client 1 .*'cat', 'dog'.*client 0.*'bird', 'cat'"
    with pytest.raises(UserError, match=told):
        dm.FromDatasets(clients=[one, other])
    for wrapped in (
        Subset(other, [0, 1]),
        Around(other),
        ConcatDataset([other]),
        Subset(Around(other), [0]),
    ):
        with pytest.raises(UserError, match="'cat', 'dog'"):
            dm.FromDatasets(clients=[one, wrapped])
    with pytest.raises(UserError, match=r"FromDatasets' test .*'cat', 'dog'.*'bird', 'cat'"):
        dm.FromDatasets(one, test=other, num_clients=2)
    with pytest.raises(UserError, match=r"test_clients.*client 1.*'cat', 'dog'"):
        dm.FromDatasets(clients=[one, one], test_clients=[one, other])
    with pytest.raises(UserError, match="'cat', 'dog'"):
        dm.FromDatasets(ConcatDataset([one, other]), num_clients=2)


def test_alike_classes_and_data_sets_without_names_are_taken(tmp_path: Path) -> None:
    one = folder(tmp_path / "anna", "bird", "cat")
    other = folder(tmp_path / "ben", "bird", "cat")
    data = dm.FromDatasets(clients=[one, Subset(other, [0, 5])], test=Around(other))
    assert data.client_sizes().tolist() == [6, 2] and list(data.class_names) == ["bird", "cat"]
    plain = torch.utils.data.TensorDataset(torch.zeros(4, 3), torch.arange(4) % 2)
    assert dm.FromDatasets(clients=[plain, plain]).num_clients == 2
    assert dm.FromDatasets(clients=[one, plain]).num_clients == 2
    third = folder(tmp_path / "clara", "bird", "cat", "dog")
    assert dm.FromDatasets(clients=[one, third, other]).num_clients == 3
    shifted = ImageFolder(str(tmp_path / "clara"), target_transform=lambda label: 2 - label)
    assert dm.FromDatasets(clients=[one, shifted]).num_clients == 2


def test_a_data_modules_validation_set_with_other_classes_is_refused(tmp_path: Path) -> None:
    class Animals(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(folder(tmp_path / "train", "bird", "cat"), batch_size=2)

        def val_dataloader(self) -> Any:
            return DataLoader(folder(tmp_path / "val", "cat", "dog"), batch_size=2)

    data = dm.FromDataModule(Animals(), num_clients=2)
    data.setup()
    assert list(data.class_names) == ["bird", "cat"]
    with pytest.raises(UserError, match=r"val_dataloader of Animals.*'cat', 'dog'.*'bird', 'cat'"):
        data.val_dataloader()


def test_labels_in_a_column_are_labels() -> None:
    """As MedMNIST's, whose shape is (N, 1)."""
    y = torch.arange(12) % 3
    data = dm.InMemoryDataModule((torch.eye(12), y[:, None]), num_clients=3)
    data.setup()
    assert data.num_classes == 3
    assert data.one_batch(0, 2)[1].shape == (2,)

    given = dm.FromDatasets(Digits(count=12), targets=y[:, None].numpy(), num_clients=3)
    given.setup()
    assert given.num_classes == 3
