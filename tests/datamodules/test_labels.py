"""Splits and counts of classes follow the labels that the samples have when they are trained on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from fl_lightning import UserError
from fl_lightning.datamodules import (
    Dirichlet,
    FromDataModule,
    FromDatasets,
    InMemoryDataModule,
    Pathological,
)


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
    data = FromDatasets(made(), partition=Pathological(classes=1), num_clients=4)
    data.setup()
    for client in range(4):
        counts = data.client_label_counts(client)
        assert counts is not None and counts.tolist() == trained(data, client)
        assert sum(count > 0 for count in counts) == 1


CHANGES = {
    "pair": lambda x, y, i: (x, 3 - y),
    "three": lambda x, y, i: (x, 3 - y, -1 - i),
    "dictionary": lambda x, y, i: {"pixels": x, "labels": 3 - y},
    "in a dictionary": lambda x, y, i: (x, {"label": 3 - y}),
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
        assert FromDatasets(made, num_clients=2).client_label_counts(0) is None
    with pytest.warns(UserWarning), pytest.raises(UserError, match="give targets"):
        FromDatasets(made, num_clients=2, partition=Dirichlet(1.0)).setup()
    given = FromDatasets(made, num_clients=2, targets=[flipped(int(y)) for y in made.targets])
    given.setup()
    assert given.num_classes == 4


@pytest.mark.parametrize("name", SAME)
def test_labels_that_the_samples_have_are_known(name: str, recwarn: Any) -> None:
    assert FromDatasets(Wrapped(Digits(), SAME[name]), num_clients=2).num_classes == 4
    assert not [str(one.message) for one in recwarn if "label" in str(one.message)]


def test_a_part_whose_labels_differ_is_found() -> None:
    parts = [Digits(), Digits(), Wrapped(Digits(), CHANGES["pair"])]
    with pytest.warns(UserWarning, match="sample 16. of the training data"):
        FromDatasets(clients=parts).setup()


def test_targets_that_differ_from_the_samples_are_told() -> None:
    made = Digits()
    with pytest.warns(UserWarning, match=r"sample 0 .* follow targets"):
        data = FromDatasets(made, num_clients=2, targets=[1 - int(y) % 2 for y in made.targets])
        assert data.num_classes == 2


def test_comparing_draws_no_numbers_and_reads_no_later_sample_otherwise() -> None:
    noisy = Wrapped(Digits(), lambda x, y, i: (torch.rand(3), y))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    FromDatasets(noisy, num_clients=2).setup()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_sample_that_cannot_be_read_is_left_to_the_run() -> None:
    def broken(x: Any, y: int, i: int) -> Any:
        raise OSError("no such picture")

    assert FromDatasets(Wrapped(Digits(), broken), num_clients=2).num_classes == 4


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_whose_collate_function_changes_labels(workers: int) -> None:
    class Mine(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(
                Digits(),
                batch_size=4,
                collate_fn=coarse,
                num_workers=workers,
            )

    with pytest.warns(UserWarning, match=r"sample 2 .* label 0 .* says 2"):
        assert FromDataModule(Mine(), num_clients=2).num_classes is None


def coarse(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return x, y % 2


@pytest.mark.parametrize("y", [[0, 1, 1_700_000_000_000], [0, 1, 10_000_000]])
def test_numbers_too_large_for_classes_are_no_classes(y: list[int]) -> None:
    """Counts per class would take the machine's memory."""
    data = InMemoryDataModule((torch.zeros(3, 1), torch.tensor(y)), num_clients=1)
    assert data.num_classes is None and data.client_label_counts(0) is None
    labelled = Digits(count=3)
    labelled.targets = torch.tensor(y)
    assert FromDatasets(labelled, num_clients=1).client_label_counts(0) is None


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
        FromDatasets(labelled, partition=Dirichlet(1.0), num_clients=1).setup()
    if not isinstance(y[0], str | list):
        own = (torch.zeros(2, 1), np.asarray(y))
        with pytest.raises(UserError, match=words):
            InMemoryDataModule(own, partition=Dirichlet(1.0), num_clients=1).setup()


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
    data = FromDatasets(
        Relabelled(Digits(), list(range(60))), num_clients=2, partition=Dirichlet(1.0)
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
        InMemoryDataModule(pair, num_clients=1).setup()


def test_whole_numbers_of_a_frame_of_objects_are_whole() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    x = pandas.DataFrame({"a": [1.0, 2.0]})
    data = InMemoryDataModule((x, pandas.Series([16777217, 1], dtype=object)), num_clients=1)
    data.setup()
    assert data.train_set is not None
    assert data.train_set.y.tolist() == [16777217, 1]  # type: ignore[attr-defined]
