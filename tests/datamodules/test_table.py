"""Tables: rows are samples, a column names the clients, and every fault is told by its place."""

from __future__ import annotations

import csv
import gzip
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.datamodules import IID, FromTable
from fl_lightning.datamodules.formats.tables import codes
from fl_lightning.errors import UserError

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
        "client  samples   name  ill  well",
        "     0        1   east    ·     1",
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
        (b"a,b\n\xff\xfe,1\n", "not in UTF-8.* at byte 4.*: save it as UTF-8"),
        (b'a,b\n1,2\n"3,4\n5,6\n7,8\n', "unexpected end of data. Close each quote"),
        (b'a,b\n1,"2"3\n', "Close each quote"),
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


def test_classes_that_are_named_have_their_numbers_in_a_file_that_lacks_one(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "t.csv", [row for row in ROWS if row[3] == "well"])
    data = FromTable(path, "outcome", features=["age"], classes=["ill", "well"], num_clients=1)
    data.setup()
    assert data.train_set is not None and data.train_set.y.tolist() == [1, 1, 1]
    assert data.num_classes == 2
    other = FromTable(path, "outcome", features=["age"], classes=["ill", "dead"], num_clients=1)
    with pytest.raises(
        UserError, match=r"has 'well' in column 'outcome' of line 2, .* data.classes: ill"
    ):
        other.setup()


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", ROWS)
    with pytest.raises(UserError, match=r"data\.features names 'age' twice"):
        FromTable(path, "outcome", features=["age", "pulse", "age"], num_clients=1)
    with pytest.raises(UserError, match=r"data\.classes names 'ill' twice"):
        FromTable(path, "outcome", classes=["ill", "well", "ill"], num_clients=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [("outcome,hospital\nill,a\n", "x is empty"), ("", "has no columns, so x is empty")],
)
def test_a_table_without_a_column_to_learn_from_is_told(
    tmp_path: Path, text: str, words: str
) -> None:
    """Before a network is built for no inputs."""
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=words):
        FromTable.shape_of_samples(path=tmp_path / "t.csv", target="outcome", client="hospital")


def of_rows(data: FromTable, client: int) -> set[int]:
    """The tens of x of a client's samples."""
    samples: Any = data.train_set
    return {int(x) // 10 for x in samples.x[data.client_indices(client)][:, 0].tolist()}


@pytest.mark.parametrize("index", ["", " ", "Unnamed: 0"])
def test_a_row_index_is_refused_where_no_features_are_given(tmp_path: Path, index: str) -> None:
    rows = [[number, *row] for number, row in enumerate(ROWS)]
    path = written(tmp_path / "t.csv", rows, [index, *HEADER])
    options = {"target": "outcome", "client": "hospital"}
    words = rf"t\.csv' has a column '{index}' \(its column 1\).*index=False.*data\.features"
    for read in (lambda: ready(path, **options), lambda: FromTable.shape_of_samples(path=path)):
        with pytest.raises(UserError, match=words):
            read()
    asked = ready(path, **options, features=["pulse", "age"])
    assert asked.column_names == ["pulse", "age"]
    # As the target or the clients' column it is no feature.
    assert ready(path, target=index, features=["age"], num_clients=2).num_classes == 5


def test_a_row_index_of_parquet_is_refused(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"x": [1.5, 2, 3], "y": [0, 1, 1], "__index_level_0__": [5, 6, 7]}
    parquet.write_table(pytest.importorskip("pyarrow").table(columns), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"'__index_level_0__' \(its column 3\).*index=False"):
        ready(tmp_path / "t.parquet", target="y", num_clients=1)


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
    data = FromTable(path, target="y", client="who", **left)
    for again in (seed, seed + 1):
        data.seed = again
        data.setup()
        assert len(data.client_names) == data.num_clients
        of_names = [{names.index(name)} for name in data.client_names]
        assert [of_rows(data, i) for i in range(data.num_clients)] == of_names


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        ([["1", 1, 1]], r"te\.csv' has '1' in column 'who' of line 2.*call that client '01'"),
        ([["02", 1, 1], ["1.0", 1, 1]], r"'1.0' in column 'who' of line 3.*client '01'"),
        ([["02 ", 1, 1]], r"'02 ' in column 'who' of line 2.*client '02'"),
        ([["02", 1, 1], ["", 1, 1]], r"te\.csv' has no value in column 'who' of line 3"),
        ([["02", 1, 1], ["2", 1, 1]], r"one number in two ways in column 'who': '02' and '2'"),
    ],
)
def test_clients_of_the_test_file_in_another_spelling_are_refused(
    tmp_path: Path, tests: list[list[Any]], words: str
) -> None:
    header = ["who", "x", "y"]
    rows = [[who, k, k % 2] for who in ("01", "02") for k in range(4)]
    path = written(tmp_path / "tr.csv", rows, header)
    with pytest.raises(UserError, match=words):
        ready(path, "y", "who", test=written(tmp_path / "te.csv", tests, header))


def test_rows_to_test_on_that_are_of_no_client_are_told(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", ROWS)
    tests = [[1, "north", 2, "ill"], [1, "west", 2, "ill"], [1, "west", 2, "well"]]
    others = written(tmp_path / "u.csv", tests)
    with pytest.warns(UserWarning, match=r"u\.csv': 2 of 3 rows .*'hospital': west\)"):
        data = ready(path, "outcome", "hospital", test=others)
    assert [len(data.client_test_indices(i)) for i in range(3)] == [0, 1, 0]


@pytest.mark.parametrize("column", ["outcome", "hospital"])
@given(st.text(" \t\u00a0", min_size=1, max_size=2), st.booleans())
def test_names_that_differ_in_blanks_alone_are_refused(
    tmp_path_factory: pytest.TempPathFactory, column: str, blanks: str, before: bool
) -> None:
    place = HEADER.index(column)
    rows = [list(row) for row in ROWS]
    rows[4][place] = blanks + rows[4][place] if before else rows[4][place] + blanks
    path = written(tmp_path_factory.mktemp("t") / "t.csv", rows)
    with pytest.raises(UserError, match=rf"one name in two ways in column '{column}'.*line 6"):
        ready(path, "outcome", "hospital")


@pytest.mark.parametrize("missing", ["#N/A", "<NA>", "NaT", "-nan", "#NA", " null "])
@pytest.mark.parametrize("column", ["outcome", "hospital", "pulse"])
def test_what_spreadsheets_and_pandas_write_for_no_value_is_missing(
    tmp_path: Path, missing: str, column: str
) -> None:
    row: list[Any] = [30, "north", 60, "ill"]
    row[HEADER.index(column)] = missing
    path = written(tmp_path / "t.csv", [*ROWS, row])
    with pytest.raises(UserError, match=rf"no value in column '{column}' of line 7"):
        ready(path, "outcome", "hospital")


def test_a_class_of_which_all_rows_are_held_out_counts(tmp_path: Path) -> None:
    """Whichever row is the only one of its class."""
    for alone in range(10):
        rows = [[i, "z" if i == alone else "ab"[i % 2]] for i in range(10)]
        path = written(tmp_path / "t.csv", rows, ["x", "y"])
        data = ready(path, target="y", test=0.2, num_clients=2)
        assert data.class_names == ["a", "b", "z"] and data.num_classes == 3
        assert data.partition_table().splitlines()[0].split() == [
            "client",
            "samples",
            "a",
            "b",
            "z",
        ]


@pytest.mark.parametrize("name", ["outcome", "hospital"])
def test_features_that_are_the_answer_or_the_client_are_refused(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "t.csv", [[age, 1, pulse, 0] for age, _, pulse, _ in ROWS])
    option = {"outcome": "target", "hospital": "client"}[name]
    with pytest.raises(UserError, match=rf"data.features has '{name}', which is data.{option}"):
        ready(path, "outcome", "hospital", features=["age", name])


def test_whole_numbers_are_amounts_where_that_is_said(tmp_path: Path) -> None:
    rows = [[1, 30], [2, 41], [3, 67], [4, 30]]
    path = written(tmp_path / "t.csv", rows, ["x", "y"])
    others = written(tmp_path / "u.csv", [[5, 12], [6, 30.5]], ["x", "y"])
    options: dict[str, Any] = {"target": "y", "num_clients": 2}
    data = ready(path, **options, test=others, regression=True)
    assert tensors(data.train_set)[1] == [30, 41, 67, 30]
    assert tensors(data.test_set)[1] == [12, 30.5]
    assert data.num_classes is None and data.class_names == []
    assert data.train_set.y.dtype == torch.float32  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match=r"3 whole numbers in 4 rows .*data\.regression=true"):
        ready(path, **options)
    with pytest.raises(UserError, match=r"data.classes=\[30\].*data.regression=True"):
        ready(path, **options, regression=True, classes=[30])
    named = written(tmp_path / "v.csv", [[1, "ill"]], ["x", "y"])
    with pytest.raises(UserError, match=r"'ill' in column 'y' of line 2.*data.regression"):
        ready(named, **options, regression=True)


@pytest.mark.parametrize(("classes", "told"), [(50, False), (51, True)])
@pytest.mark.filterwarnings("error")
def test_many_whole_numbers_are_told(tmp_path: Path, classes: int, told: bool) -> None:
    rows = [[i, i % classes] for i in range(3 * classes)]
    path = written(tmp_path / "t.csv", rows, ["x", "y"])
    said = (
        pytest.warns(UserWarning, match="51 whole numbers in 153 rows") if told else nullcontext()
    )
    with said:
        ready(path, target="y", num_clients=2)
