"""Tables: rows are samples, a column names the clients, and every fault is told by its place."""

from __future__ import annotations

import csv
import gzip
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.datamodules import IID, FromTable, InMemoryDataModule
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


def of_text(tmp_path: Path, text: str, target: str = "y", **options: Any) -> Any:
    (tmp_path / "t.csv").write_text(text, "utf-8")
    return ready(tmp_path / "t.csv", target, **{"num_clients": 1, **options})


def tensors(samples: Any) -> tuple[Any, Any]:
    return samples.x.tolist(), samples.y.tolist()


def test_rows_are_samples_and_a_column_names_the_clients(tmp_path: Path) -> None:
    data = ready(written(tmp_path / "t.csv", ROWS), **NAMES)
    assert tensors(data.train_set) == (X, [1, 0, 0, 1, 1]), "ill, well"
    assert data.client_names == ["east", "north", "south"] and data.num_clients == 3
    assert [data.client_indices(i).tolist() for i in range(3)] == [[3], [0, 2], [1, 4]]
    assert data.num_classes == 2 and data.test_set is None
    assert data.partition_table().splitlines()[:2] == [
        "client  samples   name  ill  well",
        "     0        1   east    ·     1",
    ]
    assert data.card()["clients' names"] == "east, north, south"


@pytest.mark.parametrize("name", ["t.csv.gz", "t.parquet", "T.PARQUET", "t.pq", "t.data", "pandas"])
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


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ([30, "north", "", "ill"], {}, ["'pulse'", "line 7", "1 of 6 rows"]),
        ([30, "", 60, "ill"], {}, ["no value", "'hospital'", "line 7"]),
        ([30, "  ", 60, "ill"], {}, ["no value", "'hospital'", "line 7"]),
        ([30, "north", 60, "NA"], {}, ["no value", "'outcome'", "line 7"]),
        ([30, "north", "fast", "ill"], {}, ["'fast'", "'pulse'", "line 7"]),
        ([30, "north", "1_2", "ill"], {}, ["'1_2'", "'pulse'", "line 7, which is not a number"]),
        ([30, "north", "inf", "ill"], {}, ["inf in column 'pulse' of line 7", "not a finite"]),
        ([30, "north", 1e39, "ill"], {}, ["'pulse'", "line 7", "single precision"]),
        ([30, "north"], {}, ["Row #7: Expected 4 columns, got 2", "data.separator is ','"]),
        (None, {"target": "outcom"}, ["'outcom'", "Did you mean 'outcome'?"]),
        (None, {"client": "clinic"}, ["'clinic'", "age, hospital, pulse, outcome"]),
        (None, {"features": ["agee"]}, ["'agee'", "Did you mean 'age'?"]),
        (None, {"features": ["age", "outcome"]}, ["'outcome', which is data.target"]),
        (None, {"features": ["age", "hospital"]}, ["'hospital', which is data.client"]),
        (None, {"features": ["age", "pulse", "age"]}, ["data.features names 'age' twice"]),
        (None, {"classes": ["ill", "well", "ill"]}, ["data.classes names 'ill' twice"]),
        (None, {"classes": ["ill", "dead"]}, ["has 'well'", "line 2, which", "data.classes: ill"]),
        (None, {"partition": IID()}, ["client='hospital'", "partition"]),
        (None, {"test": 1.5}, ["data.test=1.5", "below 1"]),
        (None, {"test": 0.01}, ["0 of 5 rows"]),
        (None, {"test": "nowhere.csv"}, ["'nowhere.csv'", "not there"]),
        (None, {"test": {"share": 0.3}}, ["give a share, a file, or {'share'"]),
        (None, {"separator": ";"}, ["'outcome'"]),
        (None, {"regression": True}, ["'well' in column 'outcome'", "data.regression"]),
        (None, {"above": 1.0, "classes": ["a"]}, ["data.above=1.0", "data.classes=['a'] both say"]),
        (None, {"above": 1.0, "regression": True}, ["data.above=1.0", "data.regression=True both"]),
        (None, {"above": float("nan")}, ["above=nan is not accepted"]),
        (
            None,
            {"regression": True, "classes": [30]},
            ["data.classes=[30]", "data.regression=True"],
        ),
        (None, {"encode": "onehot"}, ["encode='onehot'", "Did you mean 'one-hot'"]),
        (None, {"encode": {"plse": "codes"}}, ["encode has 'plse'", "Did you mean 'pulse'"]),
        (
            None,
            {"encode": {"outcome": "codes"}},
            ["'outcome', which is not among the columns of x"],
        ),
        (None, {"missing": "drop", "missing_marks": ["30"], "test": {}}, ["data.test is of type"]),
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
        (b"", {}, "Empty CSV file. Its first line has to name the columns"),
        (b"a,b\n", {}, "has no rows"),
        (b"a,a\n1,2\n", {}, "two columns 'a'"),
        (b"a,b\nx\xff,1\n", {}, "not in UTF-8 in column 'a': save it as UTF-8"),
        (b"a\xff,b\n1,1\n", {}, "not in UTF-8"),
        (b'a,b\n1,2\n"3,4\n5,6\n', {}, "each quote has to be closed"),
        (b"a\n1\n", {}, "no columns besides 'a', so x is empty"),
        (b"a,b\n1,?\n2,?\n", {"missing": "drop"}, r"'b' \(2 rows\), so data.missing=drop leaves"),
        (b"a,b\n1,r\n2,r\n", {"encode": "one-hot", "drop_first": True}, "so x is empty"),
    ],
)
def test_files_that_are_no_table_are_refused(
    tmp_path: Path, text: bytes, options: dict[str, Any], words: str
) -> None:
    (tmp_path / "t.csv").write_bytes(text)
    with pytest.raises(UserError, match=words):
        ready(tmp_path / "t.csv", target="a", num_clients=1, **options)


def test_an_archive_is_refused_as_one(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "t.xlsx", "w") as file:
        file.writestr("t.csv", "a,y\n1,0\n")
    with pytest.raises(UserError, match="is a zip archive, as Excel's"):
        ready(tmp_path / "t.xlsx", "y", num_clients=1)


def test_what_is_wrong_in_the_second_file_is_named_by_its_file_and_line(tmp_path: Path) -> None:
    """An empty line, a value of two lines and rows that are left out do not shift the number."""
    (tmp_path / "north.csv").write_text("age,note,y\n" + "40,a,0\n41,b,1\n" * 9)
    (tmp_path / "south.csv").write_text('age,note,y\n\n40,"a\nb",0\n,c,1\nabc,d,1\n')
    files = {name: f"{name}.csv" for name in ("north", "south")}
    with pytest.raises(UserError, match=r"south\.csv' has 'abc' in column 'age' of line 6,"):
        ready(files, "y", features=["age"], root=tmp_path, missing="drop")
    with pytest.raises(UserError, match=r"south\.csv' has no value in column 'age' of line 5 "):
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
    assert said.stdout.startswith("UserError Tables are read by pandas and pyarrow")
    assert "pip install 'fl-lightning[tables]'" in said.stdout


def test_labels_of_the_test_rows_that_nobody_trains_on_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", ROWS)
    others = written(tmp_path / "u.csv", [[1, "north", 2, "dead"]])
    with pytest.raises(UserError, match=r"'dead' in column 'outcome'.*ill, well"):
        ready(path, **NAMES, test=others)


def test_classes_that_are_named_have_their_numbers_in_a_file_that_lacks_one(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "t.csv", [row for row in ROWS if row[3] == "well"])
    data = ready(path, "outcome", features=["age"], classes=["ill", "well"], num_clients=1)
    assert data.train_set.y.tolist() == [1, 1, 1] and data.num_classes == 2


@pytest.mark.parametrize("index", ["", " ", "Unnamed: 0", "__index_level_0__"])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_row_index_is_refused_where_no_features_are_given(
    tmp_path: Path, index: str, ending: str
) -> None:
    rows = [[number, *row] for number, row in enumerate(ROWS)]
    path = written(tmp_path / f"t.{ending}", rows, [index, *HEADER])
    words = rf"t\.\w+' has a column '{index}' \(its column 1\).*index=False.*data\.features"
    for read in (
        lambda: ready(path, **NAMES),
        lambda: FromTable.shape_of_samples(path=path, **NAMES),
    ):
        with pytest.raises(UserError, match=words):
            read()
    assert ready(path, **NAMES, features=["pulse", "age"]).column_names == ["pulse", "age"]
    # As the target or the clients' column it is no feature.
    assert ready(path, target=index, features=["age"], num_clients=2).num_classes == 5


@given(
    sizes=st.lists(st.integers(1, 4), min_size=3, max_size=6),
    seed=st.integers(0, 99),
    left=st.sampled_from([{"val_fraction": 0.4}, {"samples": 5}, {"test": 0.4}]),
)
def test_a_client_is_called_by_the_name_of_its_rows(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seed: int, left: dict[str, Any]
) -> None:
    """Also where all rows of a client are held out, so that the others' numbers move."""
    sizes = [*sizes, 6]
    names = "abcdefg"
    rows = [[names[i], 10 * i + k, k % 2] for i, size in enumerate(sizes) for k in range(size)]
    path = written(tmp_path_factory.mktemp("t") / "t.csv", rows, ["who", "x", "y"])
    data: Any = FromTable(path, target="y", client="who", **left)
    for again in (seed, seed + 1):
        data.seed = again
        data.setup()
        assert len(data.client_names) == data.num_clients
        for client, name in enumerate(data.client_names):
            tens = data.train_set.x[data.client_indices(client)][:, 0] // 10
            assert set(tens.tolist()) == {names.index(name)}


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


@pytest.mark.parametrize("mark", ["", "#N/A", "<NA>", "-nan", "#NA", "None", "1.#IND", "#N/A N/A"])
@pytest.mark.parametrize("column", ["outcome", "hospital", "pulse"])
def test_what_pandas_takes_for_no_value_is_missing(tmp_path: Path, mark: str, column: str) -> None:
    row: list[Any] = [30, "north", 60, "ill"]
    row[HEADER.index(column)] = mark
    path = written(tmp_path / "t.csv", [*ROWS, row])
    with pytest.raises(UserError, match=rf"no value in column '{column}' of line 7"):
        ready(path, **NAMES)
    assert len(ready(path, **NAMES, missing="drop").train_set) == 5


@pytest.mark.parametrize("gone", [pandas.NA, float("nan"), pandas.NaT, None])
def test_missing_values_of_frames_are_told(gone: Any) -> None:
    frame = pandas.DataFrame({"x": pandas.Series([1.0, gone], dtype=object), "y": [0, 1]})
    with pytest.raises(UserError, match="'<DataFrame>' has no value in column 'x' of line 2"):
        ready(frame, target="y", num_clients=2)


@pytest.mark.parametrize(
    ("mark", "left"), [("-999", [1, 3]), ("3", [1, -999]), ("0", [1, -999, 3]), ("True", [-999])]
)
@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_marks_of_missing_values_are_compared_by_value(
    mark: str, left: list[int], kind: str, tmp_path: Path
) -> None:
    """A number does not mark a truth value, and in a CSV a text marks what is spelled so."""
    if mark == "True" and kind != "csv":
        pytest.skip("Parquet and frames hold truth values, which no text marks")
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


@pytest.mark.parametrize(("classes", "told"), [(50, False), (51, True)])
@pytest.mark.filterwarnings("error")
def test_many_whole_numbers_are_told(tmp_path: Path, classes: int, told: bool) -> None:
    rows = [[i, i % classes] for i in range(3 * classes)]
    path = written(tmp_path / "t.csv", rows, ["x", "y"])
    said: Any = nullcontext()
    if told:
        said = pytest.warns(UserWarning, match="51 whole numbers in 153 rows")
    with said:
        ready(path, target="y", num_clients=2)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_integers_beyond_the_reach_of_floats_are_told_apart(ending: str, tmp_path: Path) -> None:
    big = 2**53
    rows = [[big + 1, 1.0, 0], [big, 2.0, 1], [big, 3.0, 1], [big + 1, 4.0, 0]]
    data = ready(written(tmp_path / f"t.{ending}", rows, ["who", "x", "y"]), "y", client="who")
    assert list(data.client_names) == [str(big), str(big + 1)]
    assert data.client_indices(0).tolist() == [1, 2]


@pytest.mark.parametrize("kind", ["parquet", "frame"])
def test_two_columns_of_one_name_are_refused(kind: str, tmp_path: Path) -> None:
    given: Any = pandas.DataFrame([[1, 2, 3]], columns=["x", "x", "y"])
    if kind == "parquet":
        given = tmp_path / "t.parquet"
        columns = [arrow.array([1.0, 2.0])] * 2 + [arrow.array([0, 1])]
        parquet.write_table(arrow.Table.from_arrays(columns, names=["x", "x", "y"]), given)
    with pytest.raises(UserError, match="has two columns 'x': name each once"):
        ready(given, target="y", num_clients=2)


def test_what_is_no_frame_is_told() -> None:
    with pytest.raises(UserError, match=r"data.path is of type ndarray: .*InMemoryDataModule\(\(x"):
        FromTable(np.zeros(3), target="y")
    mixed = pandas.DataFrame({"x": ["a", 1], "y": [0, 1]})
    with pytest.raises(
        UserError, match=r"'<DataFrame>' cannot be read: .*column x with type object"
    ):
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


def test_columns_of_a_frame_may_have_numbers_as_names() -> None:
    frame = pandas.DataFrame([[1.0, 0, 5], [2.0, 1, 6]])
    data = ready(frame, target=1, features=[2, 0], num_clients=1)
    assert tensors(data.train_set) == ([[5, 1], [6, 2]], [0, 1])


def test_frames_are_taken_in_memory_as_numbers_that_a_network_takes() -> None:
    x = pandas.DataFrame({"a": [1.5, 3.0], "b": [True, False]})
    data: Any = InMemoryDataModule((x, pandas.Series([0, 1])), num_clients=2)
    data.setup()
    assert data.client_sizes().tolist() == [1, 1] and data.num_classes == 2
    assert data.train_set.x.dtype == torch.float32
    assert data.train_set.x.tolist() == [[1.5, 1.0], [3.0, 0.0]]
    named = InMemoryDataModule((x, pandas.Series(["no", "yes"])), num_clients=2)
    with pytest.raises(UserError, match=r"y is a Series with .*'no'.*FromTable\(df, target"):
        named.setup()


@pytest.mark.parametrize(
    "given",
    [
        {"target": "tags", "features": ["x"]},
        {"target": "y", "client": "tags", "features": ["x"]},
        {"target": "y", "features": ["x", "tags"]},
        {"target": "y", "features": ["x", "tags"], "encode": "one-hot"},
    ],
)
def test_cells_of_several_values_are_refused_by_place(given: Any, tmp_path: Path) -> None:
    columns = {"x": [1.0, 2.0], "y": [0, 1], "tags": [[1, 2], []]}
    parquet.write_table(arrow.table(columns), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"in column 'tags' of line 1, but a table needs one"):
        ready(tmp_path / "t.parquet", num_clients=1, **given)
