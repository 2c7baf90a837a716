"""Clients whose samples are given.

Each keeps its own where some are held out, and sequences have an end.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

from fl_lightning.datamodules import (
    ByGroup,
    FromDataModule,
    FromDatasets,
    FromLEAF,
    InMemoryDataModule,
    InstructionTuning,
    Saved,
)
from fl_lightning.datamodules.partitions.partition import LazyClients
from fl_lightning.errors import UserError
from fl_lightning.machine.lightning import pl

N = 60
# client k has the samples k, k + 3, …, the first of them twice
OWN = [[*range(k, N, 3), k] for k in range(3)]
X, Y = torch.arange(N, dtype=torch.float32).view(N, 1), torch.arange(N) % 2


class Endless:
    """Says how many there are, and answers beyond that too."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, client: int) -> Any:
        return OWN[client % 3]


class EndlessPositions(Endless):
    """The same of one client's positions."""

    def __getitem__(self, i: int) -> int:
        return 3 * i


class Inner(pl.LightningDataModule):
    def __init__(self, sampler: Any = None) -> None:
        super().__init__()
        self.sampler = sampler

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(X, Y), batch_size=5, sampler=self.sampler)


def in_memory(clients: Any, **arguments: Any) -> Any:
    return InMemoryDataModule((X, Y), clients=clients, seed=3, **arguments)


def first_held_out() -> int:
    """The first sample that ``val_fraction=0.3`` holds out, whoever has it."""
    return int(next(iter(in_memory(OWN, val_fraction=0.3).val_dataloader()))[0][0])


MAKERS = {
    "lists": lambda **a: in_memory(OWN, **a),
    "lazy": lambda **a: in_memory(
        LazyClients(np.array([21] * 3), lambda i: np.array(OWN[i]), "own"), **a
    ),
    "endless": lambda **a: in_memory(Endless(), **a),
    "array": lambda **a: in_memory(np.array(OWN), **a),
    "datamodule": lambda **a: FromDataModule(Inner(), clients=OWN, seed=3, **a),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_held_out_samples_leave_each_clients_own_list(kind: str, share: float) -> None:
    data = MAKERS[kind](val_fraction=0.3, client_test_fraction=share)
    held = {int(v) for x, _ in data.val_dataloader() for v in x}
    assert len(held) == 18
    for client, own in enumerate(OWN):
        left = [i for i in own if i not in held]
        trained, tested = (
            data.client_indices(client).tolist(),
            data.client_test_indices(client).tolist(),
        )
        assert sorted([*set(trained), *tested]) == sorted(set(left)) and bool(tested) == bool(share)
        assert trained == [i for i in left if i not in tested], (
            "in the order given, as often as given"
        )
        seen = torch.cat([batch[0] for batch, _ in data.full_batches(client)])[:, 0].tolist()
        assert seen == trained and data.client_sizes()[client] == len(trained)


def test_datasets_of_clients_may_hold_samples_out() -> None:
    sets = [TensorDataset(X[k : k + 20], Y[k : k + 20]) for k in (0, 20, 40)]
    data = FromDatasets(clients=sets, val_fraction=0.3, seed=3)
    held = {int(v) for x, _ in data.val_dataloader() for v in x}
    for client in range(3):
        own = torch.cat([batch[0] for batch, _ in data.full_batches(client)])[:, 0].tolist()
        assert own == [i for i in range(20 * client, 20 * client + 20) if i not in held]


def test_a_client_all_of_whose_samples_are_held_out_is_refused_by_number() -> None:
    with pytest.raises(
        UserError, match=r"val_fraction holds out all 1 samples of client 1, .*smaller val_fraction"
    ):
        in_memory([OWN[0], [first_held_out()]], val_fraction=0.3).setup()


def test_a_saved_split_holds_the_same_samples_out(tmp_path: Any) -> None:
    """Without labels too, where another seed holds others out and nothing else would show it."""
    numbers = torch.zeros(N)
    made = InMemoryDataModule((X, numbers), clients=OWN, val_fraction=0.3, seed=3)
    made.save_partition(tmp_path / "split.npz")
    saved = Saved(tmp_path / "split.npz")
    again = InMemoryDataModule((X, numbers), partition=saved, val_fraction=0.3, seed=3)
    assert all(np.array_equal(again.client_indices(i), made.client_indices(i)) for i in range(3))
    with pytest.raises(
        UserError, match=r"other samples were held out for validation.*val_fraction and the seed"
    ):
        InMemoryDataModule((X, numbers), partition=saved, val_fraction=0.3, seed=4).setup()


def test_a_group_that_is_held_out_whole_is_told() -> None:
    held = first_held_out()
    groups = [1 + (i % 2) for i in range(N)]
    groups[held] = 0
    with pytest.warns(
        UserWarning, match="2 of 3 groups are clients: val_fraction=0.3 holds out all samples"
    ):
        InMemoryDataModule((X, Y), partition=ByGroup(groups), val_fraction=0.3, seed=3).setup()


@pytest.mark.parametrize("kind", ["partition", "data"])
def test_groups_keep_their_names_where_one_is_held_out_whole(kind: str) -> None:
    held = first_held_out()
    groups = ["anna" if i == held else "ben" if i % 2 else "carla" for i in range(N)]

    class Named(InMemoryDataModule):
        """Brings its own groups, as numbers, and their names."""

        def load(self) -> None:
            super().load()
            self.groups = np.unique(groups, return_inverse=True)[1]
            self.client_names = ["anna", "ben", "carla"]

    made = InMemoryDataModule if kind == "partition" else Named
    own = ByGroup(groups) if kind == "partition" else ByGroup()
    data = made((X, Y), partition=own, val_fraction=0.3, seed=3)
    with pytest.warns(UserWarning, match="2 of 3 groups"):
        data.setup()
    assert list(data.client_names) == ["ben", "carla"]
    for client, name in enumerate(data.client_names):
        assert {groups[i] for i in data.client_indices(client)} == {name}


def test_groups_of_more_samples_than_there_are_are_refused_before_some_are_held_out() -> None:
    groups = [i % 3 for i in range(N + 5)]
    with pytest.raises(UserError, match=rf"shape \({N + 5},\).*{N} training samples"):
        InMemoryDataModule((X, Y), partition=ByGroup(groups), val_fraction=0.3, seed=3).setup()


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_clients_that_answer_beyond_their_length_are_read_to_it(
    share: float, tmp_path: Any
) -> None:
    data = in_memory(Endless(), val_fraction=share)
    assert data.partition_hash == in_memory(OWN, val_fraction=share).partition_hash
    data.save_partition(tmp_path / "split.npz")
    assert data.client_sizes().shape == (3,)
    alone = in_memory([EndlessPositions(), [1, 2]])
    assert alone.client_indices(0).tolist() == [0, 3, 6] and alone.client_sizes().tolist() == [3, 2]


@pytest.mark.parametrize(
    "clients",
    [itertools.count(), iter(OWN), (c for c in OWN), {1, 2}, 7, "012"],
)
def test_clients_without_a_length_are_refused_by_type(clients: Any) -> None:
    for make in (in_memory, lambda given: FromDatasets(clients=given)):
        with pytest.raises(
            UserError, match=f"clients is of type {type(clients).__name__}, .*len\\(clients\\)"
        ):
            make(clients)


def test_a_client_whose_indices_never_end_is_refused() -> None:
    for clients in ([itertools.count(), [1]], LazyOf(itertools.count()), LazyOf(iter([1, 2]))):
        with pytest.raises(UserError, match="Client 0 has no samples"):
            in_memory(clients).client_sizes()


class LazyOf:
    def __init__(self, one: Any) -> None:
        self.one = one

    def __len__(self) -> int:
        return 2

    def __getitem__(self, client: int) -> Any:
        return self.one


def test_positions_beside_a_loader_of_fewer_samples_could_mean_either() -> None:
    half = SubsetRandomSampler(list(range(0, N, 2)))
    with pytest.raises(
        UserError, match="clients are given, and the training loader of Inner uses 30 of 60 samples"
    ):
        FromDataModule(Inner(half), clients=[[0, 1], [2, 3]]).setup()


def test_clients_are_the_fourth_argument_of_data_in_memory() -> None:
    assert InMemoryDataModule((X, Y), None, None, OWN).client_sizes().tolist() == [21, 21, 21]


class Tagged(Dataset[Tensor]):
    """Each sample has a list of tags, as data sets of tokens or boxes do."""

    labels = ((1, 2, 3), (4, 5))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor(i)


@pytest.mark.parametrize("labels", [Tagged.labels, 7, len], ids=["lists", "number", "method"])
def test_what_is_no_label_per_sample_is_no_class(labels: Any) -> None:
    dataset = Tagged()
    dataset.labels = labels
    data = FromDatasets(dataset, num_clients=2)
    assert data.num_clients == 2 and data.num_classes is None


def test_whole_numbers_that_are_measurements_are_no_table_of_classes() -> None:
    data = InMemoryDataModule((torch.randn(20, 3), torch.arange(20) * 10**8), num_clients=5)
    data.plot_partition()
    assert "5 clients" in data.partition_table()


def test_given_clients_are_no_groups_of_the_data(tmp_path: Path) -> None:
    for side, count in (("train", 2), ("test", 1)):
        own = {"x": [[0.5, 1.0]] * count, "y": [0] * count}
        content = {
            "users": ["a", "b"],
            "num_samples": [count] * 2,
            "user_data": {"a": own, "b": own},
        }
        (tmp_path / side).mkdir()
        (tmp_path / side / "all.json").write_text(json.dumps(content))
    data = FromLEAF(tmp_path, clients=[[0, 1, 2, 3]])
    data.setup()
    assert list(data.client_names) == [] and data.own_tests is None
    named = FromLEAF(tmp_path, clients={"both": [0, 1, 2, 3]})
    named.setup()
    assert list(named.client_names) == ["both"]


def test_clients_of_records_may_be_given() -> None:
    records = [{"instruction": str(i), "output": "x"} for i in range(4)]
    data = InstructionTuning(train=records, clients=[[0, 1], [2, 3]])
    data.setup()
    assert data.num_clients == 2 and data.client_sizes().tolist() == [2, 2]
