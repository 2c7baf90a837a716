"""Tables: rows are samples, a column names the clients, and every fault is told by its place."""

from __future__ import annotations

import csv
import gzip
import subprocess
import sys
from datetime import date
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.model_selection import train_test_split

from fl_lightning.datamodules import IID, ByValue, FromTable, InMemoryDataModule
from fl_lightning.errors import UserError

pandas = pytest.importorskip("pandas", reason="pandas, of the extra tables, is not installed")
arrow = pytest.importorskip("pyarrow", reason="pyarrow, of the extra tables, is not installed")
parquet = pytest.importorskip("pyarrow.parquet")

HEADER = ["age", "hospital", "pulse", "outcome"]
ROWS: list[list[Any]] = [
    [30, "north", 61.5, "well"],
    [41, "south", 70, "ill"],
    [52, "north", 82.25, "ill"],
    [63, "east", 90, "well"],
    [74, "south", 77, "well"],
]
X = [[30, 61.5], [41, 70], [52, 82.25], [63, 90], [74, 77]]
NAMES: dict[str, Any] = {"target": "outcome", "client": "hospital"}


def written(path: Path, rows: list[list[Any]], header: list[str] = HEADER, by: str = ",") -> Path:
    """A table of these rows, by the ending of the path."""
    if path.suffix == ".parquet":
        columns = dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))
        parquet.write_table(arrow.table(columns), path)
        return path
    open_text = gzip.open if path.suffix == ".gz" else open
    with open_text(path, "wt", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=by).writerows([header, *rows])
    return path


def ready(*arguments: Any, **options: Any) -> Any:
    data = FromTable(*arguments, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def tensors(samples: Any) -> tuple[Any, Any]:
    return samples.x.tolist(), samples.y.tolist()


def test_rows_are_samples_and_a_column_names_the_clients(tmp_path: Path) -> None:
    data = ready(written(tmp_path / "t.csv", ROWS), **NAMES)
    assert tensors(data.train_set) == (X, [1, 0, 0, 1, 1]), "ill, well"
    assert data.client_names == ["east", "north", "south"] and data.num_clients == 3
    assert [data.client_indices(i).tolist() for i in range(3)] == [[3], [0, 2], [1, 4]]
    assert data.num_classes == 2 and data.test_set is None
    expected = ["client  samples   name  ill  well", "     0        1   east    ·     1"]
    assert data.partition_table().splitlines()[:2] == expected
    assert data.card()["clients' names"] == "east, north, south"


@pytest.mark.parametrize("name", ["t.csv.gz", "t.parquet", "T.PARQUET", "t.pq", "pandas"])
def test_other_files_and_frames_hold_the_same(tmp_path: Path, name: str) -> None:
    rows = [[*row[:3], row[0] > 50, row[3]] for row in ROWS]
    header = [*HEADER[:3], "old", "outcome"]
    path: Any = tmp_path / name
    if name == "pandas":
        path = pandas.DataFrame(dict(zip(header, zip(*rows, strict=True), strict=True)))
    elif name.endswith("gz"):
        written(path, rows, header)
    else:
        written(tmp_path / "made.parquet", rows, header).rename(path)
    same = ready(written(tmp_path / "plain.csv", rows, header), **NAMES)
    data = ready(path, **NAMES, test=path)
    assert tensors(data.train_set) == tensors(same.train_set) == tensors(data.test_set)
    assert [row[2] for row in same.train_set.x.tolist()] == [0, 0, 1, 1, 1], "truth values"
    for name in ("client_names", "column_names", "class_names", "partition_hash"):
        assert getattr(data, name) == getattr(same, name), name
    assert FromTable.shape_of_samples(path=path, **NAMES) == (3,)


def test_numbers_are_ordered_by_size_and_fractions_make_a_target_a_number(tmp_path: Path) -> None:
    rows = [[i, 0.5 * i, 10 - i, c] for i, c in enumerate((2, 10, 2, 1))]
    path = written(tmp_path / "t.csv", rows, header=["a", "b", "client", "c"])
    data = ready(path, target="c", client="client", features=["a"])
    assert data.train_set.y.tolist() == [1, 2, 1, 0], "1, 2, 10"
    assert data.client_names == ["7", "8", "9", "10"]
    real = ready(path, target="b", client="client", features=["a"])
    assert real.train_set.y.tolist() == [0, 0.5, 1, 1.5] and real.num_classes is None


def test_test_rows_come_from_a_file_or_are_held_out(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", ROWS)
    # Its columns stand elsewhere, and it names no clients.
    others = written(
        tmp_path / "u.csv", [["well", 1, 2], ["ill", 3, 4]], ["outcome", "pulse", "age"]
    )
    data = ready(path, **NAMES, test=others)
    assert tensors(data.test_set) == ([[2, 1], [4, 3]], [1, 0])
    many = [[i, f"h{i % 3}", 2 * i, "well" if i % 2 else "ill"] for i in range(40)]
    path = written(tmp_path / "many.csv", many)
    held = [ready(path, **NAMES, test=0.25, seed=seed) for seed in (0, 1)]
    ages = [sorted(row[0] for row in tensors(data.test_set)[0]) for data in held]
    assert ages[0] == ages[1] and len(ages[0]) == 10, "the same rows whatever the seed"
    trained = sorted(row[0] for row in tensors(held[0].train_set)[0])
    assert sorted(ages[0] + trained) == list(range(40))
    for client, name in enumerate(held[0].client_names):
        own = held[0].train_set.x[held[0].client_indices(client)][:, 0]
        assert {f"h{int(age) % 3}" for age in own} == {name}


@pytest.mark.parametrize("name", ["t.tsv", "t.tsv.gz"])
def test_a_quote_is_text_in_a_tab_separated_file(tmp_path: Path, name: str) -> None:
    """As in GLUE's files, in which a line is a sample."""
    rows = ['"a\t0', "b\t1", 'c "d\t1', '"e"\t0']
    open_text = gzip.open if name.endswith(".gz") else open
    with open_text(tmp_path / name, "wt", encoding="utf-8") as file:
        file.write("\n".join(["text\ty", *rows]) + "\n")
    data = ready(tmp_path / name, "y", num_clients=1, encode="codes")
    assert data.encoding.categories["text"] == ['"a', '"e"', "b", 'c "d']
    assert tensors(data.train_set) == ([[0], [2], [3], [1]], [0, 1, 1, 0])
    quoted = written(tmp_path / "q.csv", [["a\tb", 0], ["c", 1]], ["text", "y"], "\t")
    options: dict[str, Any] = {"num_clients": 1, "encode": "codes", "separator": "\t"}
    data = ready(quoted, "y", quotes=True, **options)
    assert data.encoding.categories["text"] == ["a\tb", "c"]
    with pytest.raises(UserError, match=r"Row #2: Expected 2 .*data\.quotes is false"):
        ready(quoted, "y", **options)
    with open_text(tmp_path / name, "at", encoding="utf-8") as file:
        file.write("f\t1\tg\n")
    with pytest.raises(UserError, match="Row #6: Expected 2 columns, got 3"):
        ready(tmp_path / name, "y", num_clients=1, encode="codes")


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ([30, "north", "", "ill"], {}, ["no value", "'pulse'", "row 7", "1 of 6 rows"]),
        ([30, "  ", 60, "ill"], {}, ["no value", "'hospital'", "row 7"]),
        ([30, "north", 60, "NA"], {}, ["no value", "'outcome'", "row 7"]),
        ([30, "north", "1_2", "ill"], {}, ["'1_2'", "'pulse'", "row 7, which is not a finite"]),
        ([30, "north", "inf", "ill"], {}, ["inf in column 'pulse' of row 7", "not a finite"]),
        ([30, "north", 1e39, "ill"], {}, ["'pulse'", "row 7", "single precision"]),
        ([30, "north"], {}, ["Row #7: Expected 4 columns, got 2", "data.separator is ','"]),
        (
            ["x", "", "b", "ill"],
            {"features": ["age", "pulse", "hospital"], "client": None, "num_clients": 2},
            [
                "has 'x' in column 'age' of row 7, which is not a finite number",
                "; 'b' in column 'pulse' of row 7, which is not",
                "; no value in column 'hospital' of row 7 (1 of 6 rows): convert",
                "data.encode",
                "data.missing=drop",
            ],
        ),
        (None, {"target": "outcom"}, ["'outcom'", "Did you mean 'outcome'?"]),
        (None, {"client": "clinic"}, ["'clinic'", "age, hospital, pulse, outcome"]),
        (None, {"features": ["agee"]}, ["'agee'", "Did you mean 'age'?"]),
        (None, {"features": ["age", "outcome"]}, ["'outcome', which is data.target"]),
        (None, {"features": ["age", "pulse", "age"]}, ["data.features names 'age' twice"]),
        (None, {"classes": ["ill", "well", "ill"]}, ["data.classes names 'ill' twice"]),
        (None, {"classes": ["ill", "dead"]}, ["has 'well'", "row 2, which", "data.classes: ill"]),
        (None, {"partition": IID()}, ["client='hospital'", "partition", "give one"]),
        (None, {"test": 1.5}, ["data.test=1.5", "below 1"]),
        (None, {"test": "nowhere.csv"}, ["'nowhere.csv'", "not there"]),
        (None, {"separator": ";"}, ["'outcome'"]),
        (None, {"regression": True}, ["'well' in column 'outcome'", "data.regression"]),
        (None, {"above": 1.0, "regression": True}, ["data.above=1.0 and data.regression=True"]),
        (None, {"encode": {"plse": "codes"}}, ["encode='plse'", "Did you mean 'pulse'"]),
    ],
)
def test_what_is_wrong_is_told_by_its_place(
    tmp_path: Path, row: list[Any] | None, options: dict[str, Any], words: list[str]
) -> None:
    path = written(tmp_path / "t.csv", ROWS if row is None else [*ROWS, row])
    with pytest.raises(UserError) as refused:
        ready(path, **{**NAMES, **options})
    assert [word for word in words if word not in str(refused.value)] == []
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (b"", {}, "first line names the columns"),
        (b"a,b\n", {}, "has no rows"),
        (b"a,b\nx\xff,1\n", {}, "column 'a' is not text in UTF-8"),
        (b"a\xff,b\n1,1\n", {}, "text in UTF-8"),
        (b'a,b\n1,2\n"3,4\n5,6\n', {}, "Row #3: .* each quote has to be closed"),
        (b'a,b\n"1\n0",2\n\n3,4,5\n', {}, "Row #3: Expected 2 columns, got 3: 3,4,5"),
        (b"a\n1\n", {}, "no columns for x besides 'a'"),
        (b"a,b\n1,r\n2,r\n", {"encode": "one-hot", "drop_first": True}, "no columns for x"),
    ],
)
def test_files_that_are_no_table_are_refused(
    tmp_path: Path, text: bytes, options: dict[str, Any], words: str
) -> None:
    (tmp_path / "t.csv").write_bytes(text)
    with pytest.raises(UserError, match=words):
        ready(tmp_path / "t.csv", target="a", num_clients=1, **options)


def test_what_is_wrong_in_the_second_file_is_named_by_its_file_and_row(tmp_path: Path) -> None:
    """A value of two lines and rows that are left out do not shift the number."""
    (tmp_path / "north.csv").write_text("age,note,y\n" + "40,a,0\n41,b,1\n" * 9)
    (tmp_path / "south.csv").write_text('age,note,y\n40,"a\nb",0\n,c,1\nabc,d,1\n')
    files = {name: f"{name}.csv" for name in ("north", "south")}
    with pytest.raises(UserError, match=r"south\.csv' has 'abc' in column 'age' of row 4,"):
        ready(files, "y", features=["age"], root=tmp_path, missing="drop")
    told = r"south\.csv' has 'abc' in column 'age' of row 4, .*; no value .* row 3 \(1 of 21 rows"
    with pytest.raises(UserError, match=told):
        ready(files, "y", features=["age"], root=tmp_path)


@pytest.mark.parametrize(
    ("south", "words"),
    [("y,age\n0,1\n", "all need the same, in the same order"), ("age,y,who\n1,0,a\n", "the same")],
)
def test_clients_files_have_the_same_columns(tmp_path: Path, south: str, words: str) -> None:
    (tmp_path / "north.csv").write_text("age,y\n1,0\n")
    (tmp_path / "south.csv").write_text(south)
    files = {name: tmp_path / f"{name}.csv" for name in ("north", "south")}
    with pytest.raises(UserError, match=rf"south\.csv' has the columns .*{words}"):
        ready(files, "y")
    with pytest.raises(UserError, match=r"a file per client, and .* has a column 'age'"):
        ready({"north": files["north"]}, "y", client="age")


def test_texts_that_look_like_numbers_in_one_file_are_texts_if_another_has_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "north.csv").write_text("code,x,y\n01,1,0\n1,1,1\n")
    (tmp_path / "south.csv").write_text("code,x,y\nA1,1,0\n01,1,1\n")
    (tmp_path / "test.csv").write_text("code,x,y\n1,1,0\n01,1,1\n")
    files = {name: tmp_path / f"{name}.csv" for name in ("north", "south")}
    data = ready(files, "y", encode="codes", test=tmp_path / "test.csv")
    assert data.train_set.x[:, 0].tolist() == [0, 1, 2, 0], "01, 1, A1"
    assert data.test_set.x[:, 0].tolist() == [1, 0]


def test_pandas_and_pyarrow_are_asked_for_only_where_a_table_is_read() -> None:
    code = (
        "import sys; sys.modules['pandas'] = None\n"
        "from fl_lightning.datamodules import Digits, FromTable\n"
        "Digits(num_clients=2).setup()\n"
        "try: FromTable('t.csv', 'y', num_clients=1).setup()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.startswith("UserError A table needs pandas")
    assert "pip install 'fl-lightning[tables]'" in said.stdout


def test_labels_of_the_test_rows_that_nobody_trains_on_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", ROWS)
    others = written(tmp_path / "u.csv", [[1, "north", 2, "dead"]])
    with pytest.raises(UserError, match=r"'dead' in column 'outcome'.*ill, well"):
        ready(path, **NAMES, test=others)


def test_classes_that_are_named_have_their_numbers_in_a_file_that_lacks_one(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", [row for row in ROWS if row[3] == "well"])
    data = ready(path, "outcome", features=["age"], classes=["ill", "well"], num_clients=1)
    assert data.train_set.y.tolist() == [1, 1, 1] and data.num_classes == 2


@pytest.mark.parametrize("index", ["Unnamed: 0", "__index_level_0__"])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_row_index_is_refused_where_no_features_are_given(
    tmp_path: Path, index: str, ending: str
) -> None:
    rows = [[number, *row] for number, row in enumerate(ROWS)]
    path = written(tmp_path / f"t.{ending}", rows, [index, *HEADER])
    words = rf"t\.\w+' has a column '{index}', .*index=False.*data\.features"
    for read in (
        lambda: ready(path, **NAMES),
        lambda: FromTable.shape_of_samples(path=path, **NAMES),
    ):
        with pytest.raises(UserError, match=words):
            read()
    assert ready(path, **NAMES, features=["pulse", "age"]).column_names == ["pulse", "age"]
    # As the target or the clients' column it is no feature.
    assert ready(path, target=index, features=["age"], num_clients=2).num_classes == 5


def test_rows_to_test_on_that_are_of_no_client_are_told(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", ROWS)
    tests = [[1, " north", 2, "ill"], [1, "west", 2, "ill"], [1, "west", 2, "well"]]
    others = written(tmp_path / "u.csv", tests)
    with pytest.warns(UserWarning, match=r"u\.csv': 2 of 3 rows .*'hospital': west\)"):
        data = ready(path, **NAMES, test=others)
    assert [len(data.client_test_indices(i)) for i in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("1.0 0.0 1.0", "1 0"),
        ("TRUE FALSE true", "True False"),
        ("02 1 2.0", "2 01"),
        ("red blue red", "red blue"),
        (" red blue red", "red\u00a0 blue"),
        ("caf\u00e9 bar cafe\u0301", "cafe\u0301 bar"),
    ],
)
@pytest.mark.parametrize("column", ["class", "client", "category"])
def test_values_are_compared_as_pandas_reads_them(
    train: str, test: str, column: str, tmp_path: Path
) -> None:
    """Numbers by value, truth values in any spelling, texts without blanks around them; macOS
    writes é as two characters.
    """
    paths = []
    for name, text in (("t.csv", train), ("u.csv", test)):
        rows = [[k, k % 2, value] for k, value in enumerate(text.split(" "))]
        rows = [[k, y, value] for k, y, value in rows if value]
        paths.append(written(tmp_path / name, rows, ["x", "y", "v"]))
    asked = {
        "class": {"target": "v", "features": ["x"], "num_clients": 1},
        "client": {"target": "y", "features": ["x"], "client": "v"},
        "category": {"target": "y", "encode": {"v": "codes"}, "num_clients": 1},
    }[column]
    data = ready(paths[0], test=paths[1], **asked)
    if column == "class":
        assert [data.train_set.y.tolist(), data.test_set.y.tolist()] == [[1, 0, 1], [1, 0]]
    elif column == "category":
        found = [samples.x[:, -1].tolist() for samples in (data.train_set, data.test_set)]
        assert found == [[1, 0, 1], [1, 0]]
    else:
        assert [data.client_indices(i).tolist() for i in range(2)] == [[1], [0, 2]]
        assert [len(data.client_test_indices(i)) for i in range(2)] == [1, 1]


@pytest.mark.parametrize(("mark", "left"), [("-999", [1, 3]), ("3", [1, -999])])
@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_marks_of_missing_values_are_compared_by_value(
    mark: str, left: list[int], kind: str, tmp_path: Path
) -> None:
    rows = [[1.0, True, "u"], [-999.0, False, "v"], [3.0, True, "u"]]
    path: Any = tmp_path / f"t.{kind}"
    if kind == "frame":
        path = pandas.DataFrame(rows, columns=["a", "b", "y"])
    else:
        written(path, rows, ["a", "b", "y"])
    data = ready(path, "y", missing="drop", missing_marks=[mark], num_clients=1)
    assert data.train_set.x[:, 0].tolist() == left


def test_a_class_of_which_all_rows_are_held_out_counts(tmp_path: Path) -> None:
    """Whichever row is the only one of its class."""
    for alone in range(10):
        rows = [[i, "z" if i == alone else "ab"[i % 2]] for i in range(10)]
        path = written(tmp_path / "t.csv", rows, ["x", "y"])
        data = ready(path, target="y", test=0.2, num_clients=2)
        assert data.class_names == ["a", "b", "z"] and data.num_classes == 3
        assert data.partition_table().splitlines()[0].split()[2:] == ["a", "b", "z"]


def test_whole_numbers_are_amounts_where_that_is_said(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", [[1, 30], [2, 41], [3, 67], [4, 30]], ["x", "y"])
    others = written(tmp_path / "u.csv", [[5, 12], [6, 30.5]], ["x", "y"])
    data = ready(path, "y", num_clients=2, test=others, regression=True)
    assert tensors(data.train_set)[1] == [30, 41, 67, 30]
    assert tensors(data.test_set)[1] == [12, 30.5]
    assert data.num_classes is None and data.class_names == []
    assert data.train_set.y.dtype == torch.float32
    with pytest.warns(UserWarning, match=r"3 whole numbers in 4 rows .*data\.regression=true"):
        ready(path, "y", num_clients=2)


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match=r"cannot be read \(.*Duplicate column names"):
        ready(pandas.DataFrame([[1, 2, 3]], columns=["x", "x", "y"]), target="y", num_clients=2)


def test_what_is_no_frame_is_told() -> None:
    with pytest.raises(UserError, match=r"data.path is of type ndarray: .*InMemoryDataModule\(\(x"):
        FromTable(np.zeros(3), target="y")
    mixed = pandas.DataFrame({"x": ["a", 1], "y": [0, 1]})
    told = r"'<DataFrame>' cannot be read \(.*column x with type object"
    with pytest.raises(UserError, match=told):
        ready(mixed, target="y", num_clients=1)


class Polars:
    """As much of a frame of polars as is asked for."""

    columns = ("x", "y")

    def to_numpy(self) -> Any:
        raise AssertionError("Arrow's columns keep their types")

    def to_arrow(self) -> Any:
        dictionary = arrow.array(["b", "a"]).dictionary_encode()
        return arrow.table({"x": arrow.array(["u", "v"], arrow.large_string()), "y": dictionary})


def test_a_frame_of_polars_is_read_by_arrow() -> None:
    data = ready(Polars(), target="y", encode="codes", num_clients=1)
    assert tensors(data.train_set) == ([[0], [1]], [1, 0]) and data.class_names == ["a", "b"]


def test_frames_are_taken_in_memory_as_numbers_that_a_network_takes() -> None:
    x = pandas.DataFrame({"a": [1.5, 3.0], "b": [True, False]})
    data: Any = InMemoryDataModule((x, pandas.Series([0, 1])), num_clients=2)
    data.setup()
    assert data.client_sizes().tolist() == [1, 1] and data.num_classes == 2
    assert data.train_set.x.dtype == torch.float32
    assert data.train_set.x.tolist() == [[1.5, 1.0], [3.0, 0.0]]
    named = InMemoryDataModule((x, pandas.Series(["no", "yes"])), num_clients=2)
    with pytest.raises(UserError, match=r"y is a Series that .*'no'.*FromTable\(df, target"):
        named.setup()


COLOURS = """colour,size,city,sick
red,1,A,no
blue,2,A,yes
red,3,B,no
green,4,B,yes
blue,?,B,yes
"""
DAYS = np.arange(20240101, 20240132)


def text_file(tmp_path: Path, text: str = COLOURS, name: str = "t.csv") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def columned(path: Path, columns: dict[str, Any], rows: slice = slice(None)) -> Path:
    """Return a CSV of these rows of the columns; a single value fills its column."""
    whole = np.broadcast_arrays(*(np.asarray(one, object) for one in columns.values()))
    lines = [",".join(map(str, row)) for row in zip(*(one[rows] for one in whole), strict=True)]
    return text_file(path.parent, "\n".join([",".join(columns), *lines]) + "\n", path.name)


def x_of(path: Any, target: str, **options: Any) -> Any:
    return ready(path, target, num_clients=1, **options).train_set.x.tolist()


@pytest.mark.parametrize(
    ("options", "names", "x", "held"),
    [
        (
            {"encode": "one-hot", "features": ["colour", "size"]},
            ["colour=blue", "colour=green", "colour=red", "size"],
            [[0, 0, 1, 1], [1, 0, 0, 2], [0, 0, 1, 3], [0, 1, 0, 4]],
            [0, 0, 0, 1],
        ),
        (
            {"encode": "one-hot", "features": ["colour", "size"], "drop_first": True},
            ["colour=green", "colour=red", "size"],
            [[0, 1, 1], [0, 0, 2], [0, 1, 3], [1, 0, 4]],
            [0, 0, 1],
        ),
        (
            {"encode": {"colour": "codes"}, "features": ["size", "colour"]},
            ["size", "colour"],
            [[1, 2], [2, 0], [3, 2], [4, 1]],
            [1, 3],
        ),
    ],
)
def test_texts_are_encoded_by_the_training_rows(
    options: Any, names: list[str], x: Any, held: list[int], tmp_path: Path
) -> None:
    test = text_file(tmp_path, "colour,size,city,sick\npink,1,A,no\n", "u.csv")
    options = {"client": "city", "missing": "drop", **options}
    with pytest.warns(UserWarning, match="1 values of 'colour' occur in no training row"):
        data = ready(text_file(tmp_path), "sick", test=test, **options)
    assert list(data.column_names) == names and data.train_set.x.tolist() == x
    assert data.test_set.x.tolist() == [held]
    arguments = {"path": tmp_path / "t.csv", "target": "sick", **options}
    assert FromTable.shape_of_samples(**arguments) == (len(names),)


@pytest.mark.parametrize(("odd", "shown"), [("-", "-"), ('"2,5"', "2,5")])
def test_a_column_of_numbers_with_a_text_is_told_to_be_categories(
    odd: str, shown: str, tmp_path: Path
) -> None:
    path = text_file(tmp_path, f"price,city,y\n1.5,A,0\n{odd},B,1\n2,A,1\n3,C,0\n")
    said = f"has '{shown}' in column 'price' of row 3, which is not .* so its 4 values are cat"
    with pytest.warns(UserWarning, match=said) as told:
        ready(path, "y", num_clients=1, encode="one-hot")
    assert not [one for one in told if "'city'" in str(one.message)]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_dates_are_no_categories_unless_the_column_is_named(ending: str, tmp_path: Path) -> None:
    """A column of each date would be learnt by heart."""
    columns = {"d": [date(2020, 1, 1), date(2020, 1, 2)], "y": [0, 1]}
    path = tmp_path / f"t.{ending}"
    if ending == "csv":
        columned(path, columns)
    else:
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path)
    with pytest.raises(UserError, match=r"has datetime.date\(2020, 1, 1\) in column 'd' of row"):
        x_of(path, "y", encode="one-hot")
    assert x_of(path, "y", encode={"d": "codes"}) == [[0], [1]]


def test_decimals_of_parquet_are_numbers(tmp_path: Path) -> None:
    columns = {"d": [Decimal("1.10"), Decimal("2.50")], "y": [0, 1]}
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), tmp_path / "t.pq")
    assert np.allclose(x_of(tmp_path / "t.pq", "y"), [[1.1], [2.5]])
    assert x_of(tmp_path / "t.pq", "y", encode={"d": "codes"}) == [[0], [1]]


@pytest.mark.parametrize("column", ["size", "weight", "colour"])
def test_rows_are_split_by_a_columns_value(column: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"features": ["size"], "missing": "drop", "num_clients": 2}
    data = FromTable(text_file(tmp_path), "sick", partition=ByValue(column=column), **options)
    if column == "size":
        assert sorted(data.client_indices(0).tolist()) == [0, 1]
        return
    words = {"weight": "no column 'weight'", "colour": r"'red' .*another data\.partition\.column"}
    with pytest.raises(UserError, match=words[column]):
        data.setup()


HEART = ("age", "sex", "chol", "num")


def test_centres_are_read_scaled_and_split_as_flamby_does(tmp_path: Path) -> None:
    """Files without a first line of names, a file per centre."""
    draw = np.random.default_rng(0)
    files = {name: f"processed.{name}.data" for name in ("cleveland", "va")}
    for file, count in zip(files.values(), (40, 25), strict=True):
        rows = [
            f"{draw.integers(30, 80)},{draw.integers(2)},{draw.integers(100, 300)},{i % 4}"
            for i in range(count)
        ]
        rows[3] = "50,1,?,0"
        (tmp_path / file).write_text("\n".join(rows) + "\n")
    share = 1 - 0.66
    options: dict[str, Any] = {"columns": HEART, "missing": "drop", "above": 0, "scale": "client"}
    test = {"share": share, "rule": "sklearn", "seed": 43}
    data = ready(files, "num", root=tmp_path, test=test, **options)
    assert list(data.client_names) == ["cleveland", "va"] and data.num_classes == 2
    for client, file in enumerate(files.values()):
        lines = (tmp_path / file).read_text().split()
        rows = np.array([line.split(",") for line in lines if "?" not in line], float)
        y = (rows[:, 3] > 0).astype(int)
        train, test = train_test_split(
            np.arange(len(rows)), train_size=1 - share, test_size=share, random_state=43, stratify=y
        )
        x = rows[:, :3].astype(np.float32).astype(float)
        expected = (x - x[train].mean(0)) / (x[train].std(0, ddof=1) + 1e-9)
        own = data.client_indices(client)
        assert np.allclose(data.train_set.x[own], expected[train], atol=1e-5)
        assert data.train_set.y[own].tolist() == y[train].tolist()
        held = data.client_test_indices(client) - len(data.train_set)
        assert np.allclose(data.test_set.x[held], expected[test], atol=1e-5)


@pytest.mark.parametrize(("of", "size"), [("column", 1), ("values", 1e-14)])
def test_clients_by_value_do_not_overlap(of: str, size: float, tmp_path: Path) -> None:
    """Neither in large numbers nor in small ones, of which float32 would lose the order."""
    seconds = (1_700_000_000 + np.random.default_rng(0).permutation(200)) * size
    columns = {"x": np.arange(200), "y": np.arange(200) % 2, "when": seconds}
    path = columned(tmp_path / "t.csv", columns)
    partition = ByValue(column="when") if of == "column" else ByValue(values=seconds.tolist())
    data = ready(path, target="y", features=["x"], partition=partition, num_clients=4)
    spans = sorted(
        (own.min(), own.max()) for own in (seconds[data.client_indices(i)] for i in range(4))
    )
    assert all(before[1] < after[0] for before, after in pairwise(spans)), spans


@pytest.mark.parametrize(("scale", "centre"), [("client", 60), ("all", 66.25)])
def test_a_column_that_is_constant_in_the_training_rows_is_only_centred(
    scale: str, centre: float, tmp_path: Path
) -> None:
    columns = {"pulse": [60, 60, 71, 74], "who": list("aabb"), "y": [0, 1] * 2}
    train = columned(tmp_path / "t.csv", columns)
    tests = columned(tmp_path / "u.csv", {"pulse": [62, 60], "who": ["a", "a"], "y": [0, 1]})
    data = ready(train, target="y", client="who", scale=scale, test=tests)
    spread = 1 if scale == "client" else np.std([60, 60, 71, 74], ddof=1)
    expected = (np.array([62, 60]) - centre) / spread
    assert np.allclose(data.test_set.x[:, 0], expected, atol=1e-6)


def test_a_client_of_one_row_has_zeros_if_each_is_scaled(tmp_path: Path) -> None:
    path = text_file(tmp_path, "who,size,y\na,1,0\nb,2,1\nb,4,0\n")
    data = ready(path, "y", client="who", scale="client")
    assert data.train_set.x[0].tolist() == [0]
    with pytest.raises(UserError, match=r"data\.scale is 'client', and data\.client names no"):
        ready(path, "y", features=["size"], scale="client", num_clients=2)


def test_whole_numbers_that_float32_does_not_hold_are_told(tmp_path: Path) -> None:
    path = columned(tmp_path / "t.csv", {"day": DAYS, "x": 0.1, "y": np.arange(31) % 2})
    with pytest.warns(UserWarning, match=r"'day'.* 20240101") as told:
        ready(path, target="y", num_clients=1)
    assert not [one for one in told if "'x'" in str(one.message)]
