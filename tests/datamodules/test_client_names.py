"""Clients that are given by name: every data module, the tables, and the command line."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning.datamodules import Digits, FromDatasets, FromTable
from tests.helpers.zygote import Cli

X = torch.arange(12.0).view(6, 2)
Y = torch.arange(6) % 2
OWN: Any = {"ben": [0, 1], "anna": [2, 3, 4, 5]}
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
    class_path: ImageClassifier
    init_args:
      num_classes: 2
      network: {class_path: MLP, init_args: {sizes: [4, 2]}}
"""


def test_every_data_module_takes_names(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("a,b,y\n" + "".join(f"{i},{i + 1},{i % 2}\n" for i in range(6)))
    for data in (
        InMemoryDataModule((X, Y), clients=OWN),
        FromTable(table, target="y", clients=OWN),
        Digits(clients=OWN),
    ):
        data.setup()
        assert list(data.client_names) == ["ben", "anna"]
        assert data.client_sizes().tolist() == [2, 4]
        assert "ben" in data.partition_table()
        assert data.card()["clients' names"] == "ben, anna"
    same = InMemoryDataModule((X, Y), clients=list(OWN.values()))
    assert InMemoryDataModule((X, Y), clients=OWN).partition_hash == same.partition_hash


def test_test_samples_go_to_the_client_of_the_name() -> None:
    data = InMemoryDataModule((X, Y), test=(X, Y), clients=OWN, test_clients={"anna": [1, 5]})
    assert data.client_test_indices(0).tolist() == []
    assert data.client_test_indices(1).tolist() == [7, 11]
    sets: Any = {"ben": TensorDataset(X[:2], Y[:2]), "anna": TensorDataset(X[2:], Y[2:])}
    made = FromDatasets(clients=sets, test_clients={"anna": TensorDataset(X, Y)})
    assert [len(made.client_test_indices(i)) for i in range(2)] == [0, 6]
    assert list(made.client_names) == ["ben", "anna"]


@pytest.mark.parametrize(
    ("clients", "tests", "what"),
    [
        (OWN, {"ana": [0]}, "names the client 'ana'.*Did you mean 'anna'"),
        (list(OWN.values()), {"anna": [0]}, "'anna', and clients has no names"),
        ({"": [0], "b": [1]}, None, "the name '' is empty"),
        ({1: [0], "1": [1]}, None, "'1' stands for two clients"),
    ],
)
def test_names_that_fit_nobody_are_refused(clients: Any, tests: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        InMemoryDataModule((X, Y), test=(X, Y), clients=clients, test_clients=tests)


def test_names_from_yaml_reach_the_tables_and_export(cli: Cli) -> None:
    (cli.folder / "my_wards.py").write_text(SETS)
    (cli.folder / "wards.yaml").write_text(CONFIG)
    run = cli(
        *("fit", "-c", "base", "-c", "trainer/cpu", "-c", "method/ditto", "-c", "wards.yaml"),
        *("--trainer.max_epochs", 1, "--trainer.callbacks+", "PerClientEvaluation"),
    )
    assert run.returncode == 0, run.stderr
    (folder,) = (cli.folder / "runs").iterdir()
    rows = list(csv.DictReader((folder / "clients.csv").open()))
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
            "{ben: {class_path: my_wards.unsaid}}",
            "clients.ben: my_wards.unsaid is no subclass of Dataset",
        ),
        (
            "{ben: {class_path: my_wards.Plain}}",
            "clients.ben: my_wards.Plain is no subclass of Dataset",
        ),
        (
            "{ben: {class_path: my_wards.ward, init_args: {patient: 3}}}",
            "clients.ben.patient: ward has no such argument. Did you mean "
            "`--data.clients.ben.patients`",
        ),
    ],
)
def test_the_data_set_at_fault_is_named(clients: str, what: str, cli: Cli) -> None:
    more = "\n\ndef unsaid():\n    return ward(3)\n\nclass Plain:\n    pass\n"
    (cli.folder / "my_wards.py").write_text(SETS + more)
    text = f"data: {{class_path: FromDatasets, init_args: {{clients: {clients}}}}}\n"
    (cli.folder / "wards.yaml").write_text(text)
    run = cli("fit", "-c", "base", "-c", "wards.yaml")
    assert run.returncode == 2 and f"data.{what}" in run.stderr, run.stderr
    assert "NoneType" not in run.stderr and "init_args" not in run.stderr
