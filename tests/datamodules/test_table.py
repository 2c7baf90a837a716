"""Tables: rows are samples, a column names the clients, and every fault is told by its place."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fl_lightning import FederatedModule
from fl_lightning.callbacks import PerClientEvaluation
from fl_lightning.datamodules import IID, FromTable
from fl_lightning.datamodules.table import codes
from fl_lightning.errors import UserError
from fl_lightning.models import ImageClassifier
from tests.helpers.learners import trainer

HEADER = ["age", "hospital", "pulse", "outcome"]
ROWS: list[list[Any]] = [
    [30, "north", 61.5, "well"],
    [41, "south", 70, "ill"],
    [52, "north", 82.25, "ill"],
    [63, "east", 90, "well"],
    [74, "south", 77, "well"],
]
X = [[30, 61.5], [41, 70], [52, 82.25], [63, 90], [74, 77]]


def written(path: Path, rows: list[list[Any]], header: list[str] = HEADER, by: str = ",") -> Path:
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "wt", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=by).writerows([header, *rows])
    return path


def tensors(samples: Any) -> tuple[Any, Any]:
    return samples.x.tolist(), samples.y.tolist()


def ready(*arguments: Any, **options: Any) -> FromTable:
    data = FromTable(*arguments, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def test_rows_are_samples_and_a_column_names_the_clients(tmp_path: Path) -> None:
    data = ready(written(tmp_path / "t.csv", ROWS), target="outcome", client="hospital")
    assert tensors(data.train_set) == (X, [1, 0, 0, 1, 1]), "ill, well"
    assert data.client_names == ["east", "north", "south"] and data.num_clients == 3
    assert [data.client_indices(i).tolist() for i in range(3)] == [[3], [0, 2], [1, 4]]
    assert data.num_classes == 2 and data.test_set is None
    assert data.partition_table().splitlines()[:2] == [
        "client  samples   name  0  1",
        "     0        1   east  ·  1",
    ]
    assert data.card()["clients' names"] == "east, north, south"
    assert FromTable.shape_of_samples(
        path=tmp_path / "t.csv", target="outcome", client="hospital"
    ) == (2,)


@pytest.mark.parametrize("name", ["t.csv.gz", "t.parquet"])
def test_other_files_hold_the_same(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("parquet"):
        parquet = pytest.importorskip("pyarrow.parquet")
        columns = dict(zip(HEADER, zip(*ROWS, strict=True), strict=True))
        parquet.write_table(
            pytest.importorskip("pyarrow").table({k: list(v) for k, v in columns.items()}), path
        )
    else:
        written(path, ROWS)
    same = ready(written(tmp_path / "plain.csv", ROWS), "outcome", "hospital")
    data = ready(path, "outcome", "hospital")
    assert tensors(data.train_set) == tensors(same.train_set)
    assert data.client_names == same.client_names and data.partition_hash == same.partition_hash
    names = {"path": path, "target": "outcome", "client": "hospital"}
    assert FromTable.shape_of_samples(**names) == (2,)


def test_columns_are_taken_in_the_order_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", ROWS, by=";")
    asked = {"features": ["pulse"], "separator": ";"}
    data = ready(path, "outcome", partition=IID(), num_clients=2, **asked)
    assert tensors(data.train_set)[0] == [[61.5], [70], [82.25], [90], [77]]
    assert data.num_clients == 2 and FromTable.shape_of_samples(path=path, **asked) == (1,)


def test_numbers_are_ordered_by_size_and_a_target_with_fractions_is_a_number(
    tmp_path: Path,
) -> None:
    rows = [[i, 0.5 * i, 10 - i, c] for i, c in enumerate((2, 10, 2, 1))]
    path = written(tmp_path / "t.csv", rows, header=["a", "b", "client", "c"])
    data = ready(path, target="c", client="client", features=["a"])
    assert data.train_set.y.tolist() == [1, 2, 1, 0], "1, 2, 10"  # type: ignore[union-attr]
    assert data.client_names == ["7", "8", "9", "10"]
    real = ready(path, target="b", client="client", features=["a"])
    assert real.train_set.y.tolist() == [0, 0.5, 1, 1.5]  # type: ignore[union-attr]
    assert real.num_classes is None


def test_test_rows_come_from_a_file_or_are_held_out(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", ROWS)
    # Its columns stand elsewhere, and it names no clients.
    others = written(
        tmp_path / "u.csv", [["well", 1, 2], ["ill", 3, 4]], ["outcome", "pulse", "age"]
    )
    data = ready(path, "outcome", "hospital", test=others)
    assert tensors(data.test_set) == ([[2, 1], [4, 3]], [1, 0])
    many = [[i, f"h{i % 3}", 2 * i, "well" if i % 2 else "ill"] for i in range(40)]
    path = written(tmp_path / "many.csv", many)
    held = [ready(path, "outcome", "hospital", test=0.25, seed=seed) for seed in (0, 1)]
    ages = [sorted(row[0] for row in tensors(data.test_set)[0]) for data in held]
    assert ages[0] == ages[1] and len(ages[0]) == 10, "the same rows whatever the seed"
    trained = sorted(row[0] for row in tensors(held[0].train_set)[0])
    assert sorted(ages[0] + trained) == list(range(40))
    for client, name in enumerate(held[0].client_names):
        own = held[0].train_set.x[held[0].client_indices(client)][:, 0]  # type: ignore[union-attr]
        assert {f"h{int(age) % 3}" for age in own} == {name}


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ([30, "north", "", "ill"], {}, ["'pulse'", "line 7", "1 of 6 rows"]),
        ([30, "", 60, "ill"], {}, ["'hospital'", "line 7"]),
        ([30, "north", 60, "NA"], {}, ["'outcome'", "line 7"]),
        ([30, "north", "fast", "ill"], {}, ["'fast'", "'pulse'", "line 7"]),
        ([30, "north", "inf", "ill"], {}, ["'inf'", "'pulse'", "line 7"]),
        ([30, "north"], {}, ["2 values in line 7", "4 columns"]),
        (None, {"target": "outcom"}, ["'outcom'", "Did you mean 'outcome'?"]),
        (None, {"client": "clinic"}, ["'clinic'", "age, hospital, pulse, outcome"]),
        (None, {"features": ["agee"]}, ["'agee'", "Did you mean 'age'?"]),
        (None, {"partition": IID()}, ["client='hospital'", "partition"]),
        (None, {"test": 1.5}, ["data.test=1.5", "below 1"]),
        (None, {"test": 0.01}, ["0 of 5 rows"]),
        (None, {"test": "nowhere.csv"}, ["'nowhere.csv'", "not there"]),
        (None, {"separator": ";"}, ["'outcome'"]),
    ],
)
def test_what_is_wrong_is_told_by_its_place(
    tmp_path: Path, row: list[Any] | None, options: dict[str, Any], words: list[str]
) -> None:
    path = written(tmp_path / "t.csv", ROWS if row is None else [*ROWS, row])
    with pytest.raises(UserError) as refused:
        ready(path, **{"target": "outcome", "client": "hospital", **options})
    assert [word for word in words if word not in str(refused.value)] == []
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("column", ["outcome", "hospital"])
def test_one_number_in_two_ways_is_refused(tmp_path: Path, column: str) -> None:
    place = HEADER.index(column)
    rows = [
        [*row[:place], number, *row[place + 1 :]] for row, number in zip(ROWS, "12121", strict=True)
    ]
    rows[3][place] = "1.0"
    path = written(tmp_path / "t.csv", rows)
    with pytest.raises(UserError, match=rf"in two ways in column '{column}': '1' and '1.0'"):
        ready(path, "outcome", "hospital")


def test_labels_of_the_test_rows_that_nobody_trains_on_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", ROWS)
    others = written(tmp_path / "u.csv", [[1, "north", 2, "dead"]])
    with pytest.raises(UserError, match=r"'dead' in column 'outcome'.*ill, well"):
        ready(path, "outcome", "hospital", test=others)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is empty"),
        (b"a,b\n", "has no rows"),
        (b"a,a\n1,2\n", "two columns 'a'"),
        (b"a,b\n\xff\xfe,1\n", "cannot be read"),
    ],
)
def test_files_that_are_no_table_are_refused(tmp_path: Path, text: bytes, words: str) -> None:
    (tmp_path / "t.csv").write_bytes(text)
    with pytest.raises(UserError, match=words):
        ready(tmp_path / "t.csv", target="a", num_clients=1)


@given(st.lists(st.integers(-50, 50) | st.floats(-9, 9), min_size=1))
def test_codes_keep_the_order_of_numbers_whatever_their_text(values: list[Any]) -> None:
    texts = [repr(value) for value in values]
    found, names = codes(texts)
    assert [names[code] for code in found] == texts
    floats = np.array([float(name) for name in names])
    assert (np.diff(floats) >= 0).all()


def test_it_trains(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(90, 2, generator=draw)
    rows = [
        [a, f"h{i % 4}", b, "up" if a + b > 0 else "down"] for i, (a, b) in enumerate(x.tolist())
    ]
    data = FromTable(written(tmp_path / "t.csv", rows), "outcome", "hospital", test=0.2)
    network = nn.Linear(2, 2)
    module = FederatedModule(ImageClassifier(network, num_classes=2, lr=0.5), participation=0.5)
    fit = trainer(8)
    fit.fit(module, data)
    assert float(fit.callback_metrics["val/acc"]) > 0.8


def test_its_clients_names_stand_in_the_tables_of_clients(tmp_path: Path) -> None:
    rows = [[i, ["south", "east", "north"][i % 3], 1.0, i // 3 % 2] for i in range(60)]
    table = written(tmp_path / "t.csv", rows)
    data = FromTable(table, "outcome", "hospital", client_test_fraction=0.3)
    learner = ImageClassifier(nn.Linear(2, 2), num_classes=2, lr=0.01)
    folder = tmp_path / "run"
    fit = trainer(2, [PerClientEvaluation()], default_root_dir=folder, enable_checkpointing=True)
    fit.fit(FederatedModule(learner), data)
    for name in ("clients.csv", "clients_rounds.csv"):
        told = list(csv.DictReader((folder / name).open()))
        names = {(row["client"], row["name"]) for row in told}
        assert names == {("0", "east"), ("1", "north"), ("2", "south")}, name


def test_classes_that_are_named_have_their_numbers_in_a_file_that_lacks_one(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "t.csv", [row for row in ROWS if row[3] == "well"])
    data = FromTable(path, "outcome", features=["age"], classes=["ill", "well"], num_clients=1)
    data.setup()
    assert data.train_set is not None and data.train_set.y.tolist() == [1, 1, 1]
    assert data.num_classes == 2
    other = FromTable(path, "outcome", features=["age"], classes=["ill", "dead"], num_clients=1)
    with pytest.raises(UserError, match=r"has 'well' in column 'outcome', .* data.classes: ill"):
        other.setup()
