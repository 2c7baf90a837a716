"""Test sets of clients' own: given by position, as Datasets, or by a table's column."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from fl_lightning import FederatedModule, UserError
from fl_lightning.callbacks import PerClientEvaluation
from fl_lightning.datamodules import FromDataModule, FromDatasets, FromTable, InMemoryDataModule
from fl_lightning.machine.lightning import pl

# Samples to train on are 0 to 19, to test on 100 to 107; the label is whether x is even.
X = torch.arange(20, dtype=torch.float32).view(-1, 1)
TESTS = torch.arange(100, 108, dtype=torch.float32).view(-1, 1)
CLIENTS = [[*range(8)], [*range(8, 14)], [*range(14, 20)]]
OWN = [[0, 1, 2], [], [7, 3]]


def labels(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] % 2 == 0).long()


def in_memory(**arguments: Any) -> InMemoryDataModule:
    arguments = {"test_clients": OWN, "clients": CLIENTS, "batch_size": 4, **arguments}
    return InMemoryDataModule((X, labels(X)), test=(TESTS, labels(TESTS)), seed=0, **arguments)


def from_datasets(**arguments: Any) -> FromDatasets:
    train = TensorDataset(X, labels(X))
    tests = TensorDataset(TESTS, labels(TESTS))
    arguments = {"test_clients": [Subset(tests, own) for own in OWN], "batch_size": 4, **arguments}
    return FromDatasets(clients=[Subset(train, own) for own in CLIENTS], seed=0, **arguments)


def from_table(folder: Path) -> FromTable:
    for name, x, clients in (("train", X, CLIENTS), ("test", TESTS, OWN)):
        owner = {i: client for client, own in enumerate(clients) for i in own}
        with open(folder / f"{name}.csv", "w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["who", "x", "y"])
            for i, value in enumerate(x[:, 0].tolist()):
                rows.writerow([f"client {owner.get(i, 'x')}", value, int(value % 2 == 0)])
    test = folder / "test.csv"
    return FromTable(folder / "train.csv", "y", "who", test=test, batch_size=4, seed=0)


def read_tests(data: Any) -> list[list[float]]:
    """x of each client's test samples, as they are read."""
    read = [data.full_batches(client, what="test") for client in range(data.num_clients)]
    return [[x for (batch, _), _ in batches for x in batch[:, 0].tolist()] for batches in read]


def made(kind: str, folder: Path) -> Any:
    data = {"positions": in_memory, "datasets": from_datasets}
    return from_table(folder) if kind == "table" else data[kind]()


@pytest.mark.parametrize("kind", ["positions", "datasets", "table"])
def test_each_is_tested_on_its_own_and_trains_on_all_of_its_own(kind: str, tmp_path: Path) -> None:
    data = made(kind, tmp_path)
    data.setup()
    own = [[100.0 + i for i in sorted(one)] for one in OWN]
    assert [sorted(one) for one in read_tests(data)] == own
    assert [len(data.client_test_indices(i)) for i in range(3)] == [3, 0, 2]
    assert data.client_sizes().tolist() == [8, 6, 6]
    trained = [x for (batch, _), _ in data.full_batches(0) for x in batch[:, 0].tolist()]
    assert trained == X[:8, 0].tolist()
    assert "test" in data.partition_table().splitlines()[0]
    assert data.card()["test samples"] == "each client's own"
    # What is evaluated in common is whole: a table's rows of nobody are among them.
    common = torch.cat([x for x, _ in data.test_dataloader()])
    assert len(common) == (5 if kind == "datasets" else 8)


class Wrong(pl.LightningModule):
    """Says 1 of everything: its accuracy is the share of even numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.weight**2

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/acc", batch[1].float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", ["positions", "datasets", "table"])
def test_clients_are_evaluated_on_them(kind: str, tmp_path: Path) -> None:
    evaluation = PerClientEvaluation()
    trainer = pl.Trainer(
        max_epochs=1,
        callbacks=[evaluation],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    module = FederatedModule(Wrong(), participation="all", local_steps=1, engine="sequential")
    trainer.fit(module, made(kind, tmp_path))
    assert evaluation.samples == {0: 3, 1: 0, 2: 2}
    # 100, 101, 102; and 107, 103.
    assert evaluation.table["acc"] == pytest.approx({0: 2 / 3, 2: 0.0})


def test_they_belong_to_the_hash_and_a_tables_do_not(tmp_path: Path) -> None:
    one = in_memory().partition_hash
    others = [in_memory(test_clients=given).partition_hash for given in (None, [[0], [], [7, 3]])]
    assert (
        len({one, *others}) == 3
        and from_datasets().partition_hash
        == from_datasets(
            test_clients=[Subset(TensorDataset(TESTS, labels(TESTS)), own) for own in OWN]
        ).partition_hash
    )
    table = from_table(tmp_path)
    without = FromTable(tmp_path / "train.csv", "y", "who", seed=0)
    assert table.partition_hash == without.partition_hash


def test_a_share_of_a_tables_rows_stays_with_their_clients(tmp_path: Path) -> None:
    from_table(tmp_path)
    data = FromTable(tmp_path / "train.csv", "y", "who", test=0.5, seed=0)
    data.setup()
    tested = read_tests(data)
    assert sum(map(len, tested)) == 10
    for own, xs in zip(CLIENTS, tested, strict=True):
        assert set(xs) <= {float(i) for i in own}


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
        data = FromTable(*paths, test=tmp_path / "test.csv", val_fraction=0.3, seed=seed)
        found.add(tuple(tuple(one) for one in read_tests(data)))
    assert found == {((100.0,), (200.0,), (300.0,)), ((200.0,), (300.0,))}


class Plain(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(X, labels(X)), batch_size=4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: in_memory(test_clients=OWN[:2]), "gives 2 clients' test samples.*3 clients"),
        (lambda: in_memory(test_clients=[[0], [8], []]), r"test_clients\[1\].*from 8 to 8.*8 test"),
        (lambda: in_memory(test_clients=[[0], [-1], []]), r"test_clients\[1\].*from -1"),
        (lambda: in_memory(test_clients=[[0.5], [], []]), r"test_clients\[0\].*float64"),
        (lambda: in_memory(test_clients=[[[0], [1, 2]], [], []]), r"test_clients\[0\].*object"),
        (lambda: in_memory(test_clients=5), "test_clients is of type int"),
        (
            lambda: in_memory(client_test_fraction=0.2),
            "client_test_fraction is 0.2.*one of the two",
        ),
        (
            lambda: InMemoryDataModule((X, labels(X)), clients=CLIENTS, test_clients=OWN),
            "positions in the test data, and InMemoryDataModule has none",
        ),
        (
            lambda: FromDataModule(Plain(), num_clients=3, test_clients=OWN),
            "FromDataModule has none",
        ),
        (lambda: from_datasets(test_clients=[Subset(X, [])] * 3), "test_clients has no samples"),
        (lambda: from_datasets(test_clients=[[]] * 2 + [5]), "FromDatasets' test_client 2"),
    ],
)
def test_what_is_wrong_is_refused_by_name(make: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make().setup()


def test_given_lazily_they_are_read_as_asked() -> None:
    class Lazy:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, client: int) -> Any:
            return np.array([client])

    data = in_memory(test_clients=Lazy())
    assert read_tests(data) == [[100.0], [101.0], [102.0]]
