"""Clients that are given, by number or name, and the samples that each is tested on."""

from __future__ import annotations

import csv
import itertools
import json
import warnings
from collections import Counter
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning import datamodules as dm
from fl_lightning.datamodules.partitions.partition import LazyClients
from tests.helpers.commands import table
from tests.helpers.learners import Loads
from tests.helpers.zygote import Cli

WARD_X = torch.arange(12.0).view(6, 2)
WARD_Y = torch.arange(6) % 2
WARDS: Any = {"ben": [0, 1], "anna": [2, 3, 4, 5]}
SETS = """
import torch
from torch.utils.data import Dataset, TensorDataset

def ward(patients: int) -> Dataset:
    x = torch.randn(patients, 4, generator=torch.Generator().manual_seed(patients))
    return TensorDataset(x, (x.sum(1) > 0).long())
"""
CONFIG = """
data:
  class_path: FromDatasets
  init_args:
    clients:
      ben: {class_path: my_wards.ward, init_args: {patients: 12}}
      anna: {class_path: my_wards.ward, init_args: {patients: 8}}
    test_clients:
      anna: {class_path: my_wards.ward, init_args: {patients: 5}}
model:
  participation: all
  learner:
    class_path: Classifier
    init_args:
      num_classes: 2
      network: {class_path: MLP, init_args: {sizes: [4, 2]}}
"""


def test_every_data_module_takes_names(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("a,b,y\n" + "".join(f"{i},{i + 1},{i % 2}\n" for i in range(6)))
    for data in (
        InMemoryDataModule((WARD_X, WARD_Y), clients=WARDS),
        dm.FromTable(table, target="y", clients=WARDS),
        dm.Digits(clients=WARDS),
    ):
        data.setup()
        assert list(data.client_names) == ["ben", "anna"]
        assert data.client_sizes().tolist() == [2, 4]
        assert "ben" in data.partition_table()
        assert data.card()["clients' names"] == "ben, anna"
    same = InMemoryDataModule((WARD_X, WARD_Y), clients=list(WARDS.values()))
    assert InMemoryDataModule((WARD_X, WARD_Y), clients=WARDS).partition_hash == same.partition_hash


def test_test_samples_go_to_the_client_of_the_name() -> None:
    data = InMemoryDataModule(
        (WARD_X, WARD_Y), test=(WARD_X, WARD_Y), clients=WARDS, test_clients={"anna": [1, 5]}
    )
    assert data.client_test_indices(0).tolist() == []
    assert data.client_test_indices(1).tolist() == [7, 11]
    sets: Any = {
        "ben": TensorDataset(WARD_X[:2], WARD_Y[:2]),
        "anna": TensorDataset(WARD_X[2:], WARD_Y[2:]),
    }
    made = dm.FromDatasets(clients=sets, test_clients={"anna": TensorDataset(WARD_X, WARD_Y)})
    assert [len(made.client_test_indices(i)) for i in range(2)] == [0, 6]
    assert list(made.client_names) == ["ben", "anna"]


@pytest.mark.parametrize(
    ("clients", "tests", "what"),
    [
        (WARDS, {"ana": [0]}, "names the client 'ana'.*Did you mean 'anna'"),
        (list(WARDS.values()), {"anna": [0]}, "'anna', and clients has no names"),
        ({"": [0], "b": [1]}, None, "give each client its own name"),
        ({1: [0], "1": [1]}, None, "names 1, 1: give each client its own name"),
    ],
)
def test_names_that_fit_nobody_are_refused(clients: Any, tests: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        test = (WARD_X, WARD_Y)
        InMemoryDataModule((WARD_X, WARD_Y), test=test, clients=clients, test_clients=tests)


def test_names_from_yaml_reach_the_tables_and_export(cli: Cli) -> None:
    (cli.folder / "my_wards.py").write_text(SETS)
    (cli.folder / "wards.yaml").write_text(CONFIG)
    run = cli(
        *("fit", "-c", "base", "-c", "trainer/cpu", "-c", "method/ditto", "-c", "wards.yaml"),
        *("--trainer.max_epochs", 1, "--trainer.callbacks+", "PerClientEvaluation"),
    )
    assert run.returncode == 0, run.stderr
    (folder,) = (cli.folder / "runs").iterdir()
    rows = table(folder / "clients.csv")
    assert [row["name"] for row in rows] == ["ben", "anna"]
    export = cli("export", folder, "--client", "anna")
    assert export.returncode == 0 and (folder / "client-1.pt").is_file(), export.stderr
    shown = cli("partition", "-c", "wards.yaml")
    assert shown.returncode == 0 and "anna" in shown.stdout, shown.stderr


@pytest.mark.parametrize(
    ("clients", "what"),
    [
        (
            "[{class_path: my_wards.ward}, {class_path: my_wards.unsaid}]",
            "clients[1]: my_wards.uns",
        ),
        (
            "{ben: {class_path: my_wards.ward, init_args: {patient: 3}}}",
            "clients.ben.patient: ward has no such argument. Did you mean "
            "`--data.clients.ben.patients`",
        ),
    ],
)
def test_the_data_set_at_fault_is_named(clients: str, what: str, cli: Cli) -> None:
    more = "\n\ndef unsaid():\n    return ward(3)\n"
    (cli.folder / "my_wards.py").write_text(SETS + more)
    text = f"data: {{class_path: FromDatasets, init_args: {{clients: {clients}}}}}\n"
    (cli.folder / "wards.yaml").write_text(text)
    run = cli("fit", "-c", "base", "-c", "wards.yaml")
    assert run.returncode == 2 and f"data.{what}" in run.stderr, run.stderr
    assert "NoneType" not in run.stderr and "init_args" not in run.stderr


CLASSES = 4


def data(clients=None, fraction=0.25, seed=0, labels=None, samples=200, **arguments):
    y = torch.arange(samples) % CLASSES if labels is None else labels
    x = torch.arange(len(y), dtype=torch.float32).view(-1, 1)
    made = InMemoryDataModule(
        (x, y), clients=clients, client_test_fraction=fraction, seed=seed, **arguments
    )
    made.setup()
    return made


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 199), min_size=1, max_size=80),
    st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.9]),
    st.integers(0, 2**63 - 1),
)
def test_each_distinct_sample_lies_on_one_side(indices, fraction, seed):
    made = data([indices], fraction, seed)
    train, test = made.client_indices(0).tolist(), made.client_test_indices(0).tolist()
    distinct = sorted(set(indices))
    assert sorted({*train, *test}) == distinct and not set(train) & set(test)
    assert train == [i for i in indices if i not in set(test)], (
        "those that are left keep their order and multiplicity"
    )
    assert test == sorted(set(test))
    half_up = int((Decimal(str(fraction)) * len(distinct)).quantize(Decimal(1), ROUND_HALF_UP))
    assert len(test) == (0 if len(distinct) == 1 else min(max(half_up, 1), len(distinct) - 1))
    assert made.client_sizes().tolist() == [len(train)]
    by_class, held = (Counter(i % CLASSES for i in side) for side in (distinct, test))
    assert all(abs(held[c] - len(test) * by_class[c] / len(distinct)) < 1 for c in by_class), (
        "of each class its share"
    )


def test_the_draw_is_a_function_of_seed_and_client():
    clients = [list(range(0, 40)), list(range(0, 40)), list(range(40, 80))]
    one, again, other = data(clients), data(clients[:2]), data(clients, seed=1)
    assert (one.client_test_indices(0) == again.client_test_indices(0)).all()
    assert (one.client_test_indices(0) != one.client_test_indices(1)).any()
    assert (one.client_test_indices(0) != other.client_test_indices(0)).any()


def test_it_is_part_of_the_hash_the_table_and_the_card():
    clients = [list(range(0, 40)), [5]]
    one, none = data(clients), data(clients, 0.0)
    assert len({one.partition_hash, none.partition_hash, data(clients, 0.5).partition_hash}) == 3
    lines = one.partition_table().splitlines()
    assert lines[0].split()[:3] == ["client", "samples", "test"]
    assert lines[1].split()[:3] == ["0", "30", "10"] and lines[2].split()[:3] == ["1", "1", "0"]
    assert one.card()["held out by each client"] == "0.25 of its samples"
    assert none.client_test_indices(0).tolist() == [] and "test" not in none.partition_table()


def test_what_a_client_trains_on_and_is_tested_on():
    made = data([list(range(40)), [7]], batch_size=8)
    seen = [
        int(v) for batch in made.client_batches(0, 0, made.batches_per_epoch(0)) for v in batch[0]
    ]
    assert sorted(seen) == made.client_indices(0).tolist()
    batches = list(made.full_batches(0, what="test"))
    expected = made.client_test_indices(0).tolist()
    assert [int(v) for batch, _ in batches for v in batch[0]] == expected
    assert [n for _, n in batches] == [8, 2]
    assert list(made.full_batches(1, what="test")) == []


def test_a_warning_counts_test_samples_on_which_others_train_and_pooled_refuses_them():
    told = "16 of 18 samples on which clients are tested are training"
    with pytest.warns(UserWarning, match=told):
        data([[*range(40)], [*range(40)]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data([[*range(40)], [*range(40, 80)]])
    split = dm.Dirichlet(0.5, replacement=True, samples_per_client=40)
    test = (torch.zeros(9, 1), torch.arange(9) % CLASSES)
    with pytest.raises(UserError, match=r"pooled=True: .* training samples of other clients"):
        data(partition=split, num_clients=10, pooled=True, test=test)


# Samples to train on are 0 to 19, to test on 100 to 107; the label is whether x is even.
ROWS = torch.arange(20, dtype=torch.float32).view(-1, 1)
TESTS = torch.arange(100, 108, dtype=torch.float32).view(-1, 1)
CLIENTS = [[*range(8)], [*range(8, 14)], [*range(14, 20)]]
TESTED = [[0, 1, 2], [], [7, 3]]


def is_even(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] % 2 == 0).long()


def of_positions(**arguments: Any) -> InMemoryDataModule:
    arguments = {"test_clients": TESTED, "clients": CLIENTS, "batch_size": 4, **arguments}
    return InMemoryDataModule(
        (ROWS, is_even(ROWS)), test=(TESTS, is_even(TESTS)), seed=0, **arguments
    )


def from_datasets(**arguments: Any) -> dm.FromDatasets:
    train = TensorDataset(ROWS, is_even(ROWS))
    tests = TensorDataset(TESTS, is_even(TESTS))
    arguments = {
        "test_clients": [Subset(tests, own) for own in TESTED],
        "batch_size": 4,
        **arguments,
    }
    return dm.FromDatasets(clients=[Subset(train, own) for own in CLIENTS], seed=0, **arguments)


def from_table(folder: Path) -> dm.FromTable:
    for name, x, clients in (("train", ROWS, CLIENTS), ("test", TESTS, TESTED)):
        owner = {i: client for client, own in enumerate(clients) for i in own}
        with open(folder / f"{name}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["who", "x", "y"])
            for i, value in enumerate(x[:, 0].tolist()):
                rows.writerow([f"client {owner.get(i, 'x')}", value, int(value % 2 == 0)])
    test = folder / "test.csv"
    return dm.FromTable(folder / "train.csv", "y", "who", test=test, batch_size=4, seed=0)


def read_tests(data: Any) -> list[list[float]]:
    """x of each client's test samples, as they are read."""
    read = [data.full_batches(client, what="test") for client in range(data.num_clients)]
    return [[x for (batch, _), _ in batches for x in batch[:, 0].tolist()] for batches in read]


def made(kind: str, folder: Path) -> Any:
    data = {"positions": of_positions, "datasets": from_datasets}
    return from_table(folder) if kind == "table" else data[kind]()


@pytest.mark.parametrize("kind", ["positions", "datasets", "table"])
def test_each_is_tested_on_its_own_and_trains_on_all_of_its_own(kind: str, tmp_path: Path) -> None:
    data = made(kind, tmp_path)
    data.setup()
    own = [[100.0 + i for i in sorted(one)] for one in TESTED]
    assert [sorted(one) for one in read_tests(data)] == own
    assert [len(data.client_test_indices(i)) for i in range(3)] == [3, 0, 2]
    assert data.client_sizes().tolist() == [8, 6, 6]
    trained = [x for (batch, _), _ in data.full_batches(0) for x in batch[:, 0].tolist()]
    assert trained == ROWS[:8, 0].tolist()
    assert "test" in data.partition_table().splitlines()[0]
    assert data.card()["test samples"] == "each client's own"
    # What is evaluated in common is whole: a table's rows of nobody are among them.
    common = torch.cat([x for x, _ in data.test_dataloader()])
    assert len(common) == (5 if kind == "datasets" else 8)


def test_they_belong_to_the_hash_and_a_tables_do_not(tmp_path: Path) -> None:
    one = of_positions().partition_hash
    others = [
        of_positions(test_clients=given).partition_hash for given in (None, [[0], [], [7, 3]])
    ]
    assert (
        len({one, *others}) == 3
        and from_datasets().partition_hash
        == from_datasets(
            test_clients=[Subset(TensorDataset(TESTS, is_even(TESTS)), own) for own in TESTED]
        ).partition_hash
    )
    table = from_table(tmp_path)
    without = dm.FromTable(tmp_path / "train.csv", "y", "who", seed=0)
    assert table.partition_hash == without.partition_hash


def test_groups_that_are_left_without_training_samples_move_nobodys_test_set(
    tmp_path: Path,
) -> None:
    with open(tmp_path / "train.csv", "w") as file:
        print("who,x,y", file=file)
        # a has one row; with val_fraction it is sometimes held out, and b is client 0.
        for i, who in enumerate("a" + "b" * 8 + "c" * 8):
            print(f"{who},{i},{i % 2}", file=file)
    (tmp_path / "test.csv").write_text("who,x,y\nc,300,0\na,100,0\nb,200,0\n")
    paths = (tmp_path / "train.csv", "y", "who")
    found = set()
    for seed in range(8):
        data = dm.FromTable(*paths, test=tmp_path / "test.csv", val_fraction=0.3, seed=seed)
        found.add(tuple(tuple(one) for one in read_tests(data)))
    assert found == {((100.0,), (200.0,), (300.0,)), ((200.0,), (300.0,))}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: of_positions(test_clients=TESTED[:2]), "gives 2 clients' test samples.*3 clients"),
        (lambda: of_positions(test_clients=[[0], [8], []]), r"test_clients\[1\] .*as 8: .*0 to 7"),
        (lambda: of_positions(test_clients=[[0], [-1], []]), r"test_clients\[1\] .*such as -1"),
        (lambda: of_positions(test_clients=[[0.5], [], []]), r"test_clients\[0\] .*such as 0.5"),
        (lambda: of_positions(client_test_fraction=0.2), "fraction is 0.2.*one of the two"),
        (
            lambda: dm.FromDataModule(of_loader(), num_clients=3, test_clients=TESTED),
            "positions in the test data, and FromDataModule has none",
        ),
        (lambda: from_datasets(test_clients=[Subset(ROWS, [])] * 3), "test_clients has no samples"),
        (lambda: from_datasets(test_clients=[[]] * 2 + [5]), "test_clients: client 2 is"),
    ],
)
def test_what_is_wrong_is_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make().setup()


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


def in_memory(clients: Any, **arguments: Any) -> Any:
    return InMemoryDataModule((X, Y), clients=clients, seed=3, **arguments)


def of_loader(sampler: Any = None) -> Loads:
    return Loads(DataLoader(TensorDataset(X, Y), batch_size=5, sampler=sampler))


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
    "datamodule": lambda **a: dm.FromDataModule(of_loader(), clients=OWN, seed=3, **a),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_held_out_samples_leave_each_clients_own_list(kind: str, share: float) -> None:
    data = MAKERS[kind](val_fraction=0.3, client_test_fraction=share)
    held = {int(v) for x, _ in data.val_dataloader() for v in x}
    assert len(held) == 18
    for client, own in enumerate(OWN):
        left = [i for i in own if i not in held]
        trained = data.client_indices(client).tolist()
        tested = data.client_test_indices(client).tolist()
        assert sorted([*set(trained), *tested]) == sorted(set(left)) and bool(tested) == bool(share)
        assert trained == [i for i in left if i not in tested], (
            "in the order given, as often as given"
        )
        seen = torch.cat([batch[0] for batch, _ in data.full_batches(client)])[:, 0].tolist()
        assert seen == trained and data.client_sizes()[client] == len(trained)


def test_a_client_all_of_whose_samples_are_held_out_is_refused_by_number() -> None:
    told = r"val_fraction holds out all 1 samples of client 1, .*smaller val_fraction"
    with pytest.raises(UserError, match=told):
        in_memory([OWN[0], [first_held_out()]], val_fraction=0.3).setup()


def test_a_saved_split_holds_the_same_samples_out(tmp_path: Any) -> None:
    """Without labels too, where another seed holds others out and nothing else would show it."""
    numbers = torch.zeros(N)
    made = InMemoryDataModule((X, numbers), clients=OWN, val_fraction=0.3, seed=3)
    made.save_partition(tmp_path / "split.npz")
    saved = dm.Saved(tmp_path / "split.npz")
    again = InMemoryDataModule((X, numbers), partition=saved, val_fraction=0.3, seed=3)
    assert all(np.array_equal(again.client_indices(i), made.client_indices(i)) for i in range(3))
    told = r"other samples were held out for validation.*val_fraction and the seed"
    with pytest.raises(UserError, match=told):
        InMemoryDataModule((X, numbers), partition=saved, val_fraction=0.3, seed=4).setup()


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
    own = dm.ByGroup(groups) if kind == "partition" else dm.ByGroup()
    data = made((X, Y), partition=own, val_fraction=0.3, seed=3)
    with pytest.warns(UserWarning, match="2 of 3 groups"):
        data.setup()
    assert list(data.client_names) == ["ben", "carla"]
    for client, name in enumerate(data.client_names):
        assert {groups[i] for i in data.client_indices(client)} == {name}


def test_a_client_whose_indices_never_end_is_refused() -> None:
    with pytest.raises(UserError, match="Client 0 has no samples"):
        in_memory([itertools.count(), [1]]).client_sizes()


def test_positions_beside_a_loader_of_fewer_samples_could_mean_either() -> None:
    half = SubsetRandomSampler(list(range(0, N, 2)))
    told = "clients are given, and the training loader of Loads uses 30 of 60 samples"
    with pytest.raises(UserError, match=told):
        dm.FromDataModule(of_loader(half), clients=[[0, 1], [2, 3]]).setup()


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
    data = dm.FromLEAF(tmp_path, clients=[[0, 1, 2, 3]])
    data.setup()
    assert list(data.client_names) == [] and data.own_tests is None
    named = dm.FromLEAF(tmp_path, clients={"both": [0, 1, 2, 3]})
    named.setup()
    assert list(named.client_names) == ["both"]
