"""Tables of texts, gaps, files per client and centres as in FLamby."""

from __future__ import annotations

import zipfile
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.model_selection import train_test_split

from fl_lightning import UserError
from fl_lightning.datamodules import ByValue, FromTable

ROWS = """colour,size,city,sick
red,1,A,no
blue,2,A,yes
red,3,B,no
green,4,B,yes
blue,?,B,yes
"""


def table(tmp_path: Path, text: str = ROWS, name: str = "t.csv") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def x_of(data: FromTable) -> Any:
    data.setup()
    assert data.train_set is not None
    return data.train_set.x.tolist()  # type: ignore[attr-defined]


def test_texts_are_encoded_by_the_training_rows(tmp_path: Path) -> None:
    path = table(tmp_path)
    data = FromTable(path, "sick", client="city", encode="one-hot", missing="drop")
    assert x_of(data) == [[0, 0, 1, 1], [1, 0, 0, 2], [0, 0, 1, 3], [0, 1, 0, 4]]
    assert list(data.column_names) == ["colour=blue", "colour=green", "colour=red", "size"]
    assert data.client_sizes().tolist() == [2, 2]
    first = FromTable(
        path, "sick", encode="one-hot", drop_first=True, missing="drop", num_clients=1
    )
    assert x_of(first)[1] == [0, 0, 2, 0]
    coded = FromTable(
        path,
        "sick",
        encode={"colour": "codes"},
        missing="drop",
        num_clients=1,
        features=["size", "colour"],
    )
    assert x_of(coded) == [[1, 2], [2, 0], [3, 2], [4, 1]]
    test = table(tmp_path, "colour,size,city,sick\npink,1,A,no\n", "u.csv")
    unseen = FromTable(
        path,
        "sick",
        encode="one-hot",
        missing="drop",
        test=test,
        num_clients=1,
        features=["colour"],
    )
    x_of(unseen)
    assert unseen.test_set.x.tolist() == [[0, 0, 0]]  # type: ignore[union-attr]
    codes = FromTable(
        path, "sick", encode="codes", missing="drop", test=test, num_clients=1, features=["colour"]
    )
    x_of(codes)
    assert codes.test_set.x.tolist() == [[3]]  # type: ignore[union-attr]


def test_gaps_are_refused_unless_dropped(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no value in column 'size' of line 6"):
        FromTable(table(tmp_path), "sick", encode="codes", num_clients=1).setup()
    with pytest.raises(
        UserError, match="'red' in column 'colour' of line 2, which is not a number"
    ):
        FromTable(
            table(tmp_path), "sick", missing="drop", num_clients=1, features=["colour"]
        ).setup()
    with pytest.raises(UserError, match=r"FromTable: encode='onehot' .*Did you mean 'one-hot'"):
        FromTable("t.csv", "sick", encode="onehot")  # type: ignore[arg-type]


HEART = ("age", "sex", "chol", "num")


@pytest.fixture
def centres(tmp_path: Path) -> Path:
    """Files without a header, a file per centre."""
    draw = np.random.default_rng(0)
    for name, count in (("cleveland", 40), ("va", 25)):
        rows = [
            f"{draw.integers(30, 80)},{draw.integers(2)},{draw.integers(100, 300)},{i % 4}"
            for i in range(count)
        ]
        rows[3] = "50,1,?,0"
        (tmp_path / f"processed.{name}.data").write_text("\n".join(rows) + "\n")
    return tmp_path


def test_centres_are_read_scaled_and_split_as_flamby_does(centres: Path) -> None:
    files = {name: f"processed.{name}.data" for name in ("cleveland", "va")}
    share = 1 - 0.66
    data = FromTable(
        files,
        "num",
        root=centres,
        columns=HEART,
        missing="drop",
        above=0,
        scale="client",
        test={"share": share, "rule": "sklearn", "seed": 43},
    )
    data.setup()
    assert list(data.client_names) == ["cleveland", "va"] and data.num_classes == 2
    for client, name in enumerate(files):
        lines = (centres / files[name]).read_text().split()
        rows = np.array([line.split(",") for line in lines if "?" not in line], float)
        y = (rows[:, 3] > 0).astype(int)
        train, test = train_test_split(
            np.arange(len(rows)), train_size=1 - share, test_size=share, random_state=43, stratify=y
        )
        x = rows[:, :3].astype(np.float32).astype(float)
        expected = (x - x[train].mean(0)) / (x[train].std(0, ddof=1) + 1e-9)
        own = data.client_indices(client)
        trained: Any = data.train_set
        tested: Any = data.test_set
        assert np.allclose(trained.x[own], expected[train], atol=1e-5)
        assert trained.y[own].tolist() == y[train].tolist()
        held = data.client_test_indices(client) - len(trained)
        assert np.allclose(tested.x[held], expected[test], atol=1e-5)
    with pytest.raises(UserError, match=r"give a share, a file, or \{'share'"):
        FromTable("a.csv", "y", test={"share": 0.3})


def test_what_is_wrong_in_the_second_file_is_named_by_its_file_and_line(tmp_path: Path) -> None:
    """An empty line, a value of two lines and rows that are left out do not shift the number."""
    (tmp_path / "north.csv").write_text("age,note,y\n" + "40,a,0\n41,b,1\n" * 9)
    (tmp_path / "south.csv").write_text('age,note,y\n\n40,"a\nb",0\n,c,1\nabc,d,1\n')
    files = {name: f"{name}.csv" for name in ("north", "south")}
    with pytest.raises(UserError, match=r"south\.csv' has 'abc' in column 'age' of line 6,"):
        FromTable(files, "y", features=["age"], root=tmp_path, missing="drop").setup()
    with pytest.raises(UserError, match=r"south\.csv' has no value in column 'age' of line 5 "):
        FromTable(files, "y", features=["age"], root=tmp_path).setup()


def test_rows_are_split_by_a_columns_value(tmp_path: Path) -> None:
    data = FromTable(
        table(tmp_path),
        "sick",
        features=["size"],
        missing="drop",
        num_clients=2,
        partition=ByValue(column="size"),
    )
    assert sorted(data.client_indices(0).tolist()) == [0, 1]
    with pytest.raises(UserError, match="no column 'weight'"):
        FromTable(
            table(tmp_path),
            "sick",
            features=["size"],
            missing="drop",
            num_clients=2,
            partition=ByValue(column="weight"),
        ).setup()


def columns_of(data: FromTable) -> Any:
    data.setup()
    train: Any = data.train_set
    test: Any = data.test_set
    return list(data.column_names), train.x.tolist(), test.x.tolist()


def test_categories_are_compared_by_value(tmp_path: Path) -> None:
    """A whole number beside gaps is written 1.0, and without gaps 1."""
    train = table(tmp_path, "grade,colour,y\n1.0,red,0\n2.0,blue,1\n1.0,red ,0\n?,red,1\n")
    test = table(tmp_path, "grade,colour,y\n1,blue ,0\n2, red,1\n02.0,red,1\n", "u.csv")
    kinds = {"grade": "one-hot", "colour": "codes"}
    data = FromTable(train, "y", encode=kinds, test=test, missing="drop", num_clients=1)
    names, x, held = columns_of(data)
    assert names == ["grade=1.0", "grade=2.0", "colour"]
    assert x == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    assert held == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]


def test_truth_values_are_one_category_in_every_spelling(tmp_path: Path) -> None:
    train = table(tmp_path, "smokes,x,y\nTrue,1,0\nFALSE,2,1\nTRUE,3,0\n")
    test = table(tmp_path, "smokes,x,y\nfalse,1,0\n1,2,1\n", "u.csv")
    data = FromTable(train, "y", encode={"smokes": "one-hot"}, test=test, num_clients=1)
    _, x, held = columns_of(data)
    assert [row[:2] for row in x] == [[0, 1], [1, 0], [0, 1]]
    assert [row[:2] for row in held] == [[1, 0], [0, 1]]


def test_a_truth_value_in_two_spellings_is_no_third_class(tmp_path: Path) -> None:
    train = table(tmp_path, "x,y\n1,True\n2,False\n3,TRUE\n")
    with pytest.raises(UserError, match="one name in two ways in column 'y': 'True' and 'TRUE'"):
        FromTable(train, "y", num_clients=1).setup()


@pytest.mark.parametrize(
    ("train", "test"), [("1.0 0.0 1.0", "1 0"), ("TRUE FALSE TRUE", "True False")]
)
def test_classes_of_a_test_file_are_compared_by_value(
    train: str, test: str, tmp_path: Path
) -> None:
    rows = [
        table(tmp_path, "x,y\n" + "".join(f"{k},{y}\n" for k, y in enumerate(text.split())), name)
        for text, name in ((train, "t.csv"), (test, "u.csv"))
    ]
    data = FromTable(rows[0], "y", test=rows[1], num_clients=1)
    data.setup()
    assert data.train_set.y.tolist() == [1, 0, 1]  # type: ignore[union-attr]
    assert data.test_set.y.tolist() == [1, 0]  # type: ignore[union-attr]


def test_a_name_with_an_underscore_is_no_number(tmp_path: Path) -> None:
    """Python reads 1_2 as 12, but pandas reads it as a text."""
    path = table(tmp_path, "room,y\n1_2,0\n12,1\n3_1,0\n")
    with pytest.raises(UserError, match="'1_2' in column 'room' of line 2, which is not a number"):
        FromTable(path, "y", num_clients=1).setup()
    coded = FromTable(path, "y", encode="codes", num_clients=1)
    assert len({x for (x,) in x_of(coded)}) == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"encode": {"color": "codes"}}, "encode has 'color'.*Did you mean 'colour'"),
        ({"encode": {"sick": "codes"}}, "encode has 'sick', which is not among the columns of x"),
        ({"above": 1.0, "classes": ["a"]}, r"above=1 makes two classes .*classes=\['a'\]"),
        ({"above": 1.0, "regression": True}, "above=1 makes two classes .*regression=True"),
        ({"above": float("nan")}, "above=nan is not accepted"),
        ({"features": ["colour"], "encode": "one-hot", "drop_first": True}, "x is empty"),
        ({"features": ["size"], "missing": "drop", "missing_marks": ["7"]}, "'size' .3 rows"),
        ({"features": ["size"], "partition": ByValue(column="colour")}, "partition.column"),
    ],
)
def test_options_that_do_not_fit_the_table_are_refused(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = table(tmp_path, "colour,size,sick\nred,7,1\nred,7,0\nred,7,1\n")
    with pytest.raises(UserError, match=words):
        FromTable(path, "sick", num_clients=1, **given).setup()


def test_marks_of_missing_values_are_compared_by_value(tmp_path: Path) -> None:
    """As Parquet and frames have them, which hold numbers and no texts."""
    path = table(tmp_path, "size,y\n1,0\n-999.0,1\n3,1\n -999,0\n")
    data = FromTable(path, "y", missing="drop", missing_marks=["-999"], num_clients=1)
    assert x_of(data) == [[1], [3]]


def test_clients_of_one_row_are_told_if_each_is_scaled(tmp_path: Path) -> None:
    path = table(tmp_path, "who,size,y\na,1,0\nb,2,1\nb,4,0\n")
    with pytest.warns(UserWarning, match="1 of 2 clients have one training row"):
        assert x_of(FromTable(path, "y", client="who", scale="client"))[0] == [0]


def test_names_that_look_like_numbers_are_their_own_categories(tmp_path: Path) -> None:
    """Beside names, 1E2 and 100 are two codes, as pandas reads them."""
    path = table(tmp_path, "code,y\n1E2,0\n100,1\nA1,0\n01,1\n1,0\n")
    data = FromTable(path, "y", num_clients=1, encode="codes")
    assert x_of(data) == [[3], [2], [4], [0], [1]]
    tests = table(tmp_path, "code,y\n100,1\n1e2,0\n01 ,1\n", "test.csv")
    data = FromTable(path, "y", num_clients=1, encode="codes", test=tests)
    x_of(data)
    assert data.test_set.x.tolist() == [[2], [5], [0]]  # type: ignore[union-attr]


def test_classes_that_look_like_numbers_are_their_own_beside_names(tmp_path: Path) -> None:
    path = table(tmp_path, "x,y\n1,1E2\n2,A\n")
    data = FromTable(path, "y", num_clients=1, test=table(tmp_path, "x,y\n1,100\n", "test.csv"))
    with pytest.raises(UserError, match="has '100' in column 'y' of line 2, which is not in"):
        data.setup()


@pytest.mark.parametrize(("mark", "left"), [("0", 3), ("1", 4), ("FALSE", 2), ("true", 2)])
def test_a_number_that_marks_a_missing_value_is_no_truth_value(
    mark: str, left: int, tmp_path: Path
) -> None:
    path = table(tmp_path, "a,smokes,y\n5,True,u\n0,False,v\n7,True,u\n8,False,v\n")
    data = FromTable(path, "y", num_clients=1, missing="drop", missing_marks=[mark])
    assert len(x_of(data)) == left


@pytest.mark.parametrize(("odd", "shown"), [("-", "-"), ('"2,5"', "2,5")])
def test_a_column_of_numbers_with_a_text_is_told_to_be_categories(
    odd: str, shown: str, tmp_path: Path
) -> None:
    path = table(tmp_path, f"price,city,y\n1.5,A,0\n{odd},B,1\n2,A,1\n3,C,0\n")
    data = FromTable(path, "y", num_clients=1, encode="one-hot")
    said = f"has '{shown}' in column 'price' of line 3, which is not .* so its 4 values are cat"
    with pytest.warns(UserWarning, match=said) as told:
        data.setup()
    assert not [one for one in told if "'city'" in str(one.message)]


@pytest.mark.parametrize("mark", ["#N/A N/A", "1.#IND", "-1.#QNAN"])
def test_pandas_marks_of_missing_values_are_known(mark: str, tmp_path: Path) -> None:
    path = table(tmp_path, f"a,y\n1,0\n{mark},1\n3,1\n")
    assert x_of(FromTable(path, "y", num_clients=1, missing="drop")) == [[1], [3]]


def test_an_archive_is_refused_as_one(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "t.xlsx", "w") as file:
        file.writestr("t.csv", "a,y\n1,0\n")
    with pytest.raises(UserError, match="is a zip archive, as Excel's"):
        FromTable(tmp_path / "t.xlsx", "y", num_clients=1).setup()


def test_a_name_of_each_row_is_not_made_one_hot(tmp_path: Path) -> None:
    """Its columns would fill the memory."""
    lines = "\n".join(f"user-{i},{i % 2}" for i in range(1500))
    path = table(tmp_path, f"who,y\n{lines}\n")
    with pytest.raises(UserError, match="one-hot makes 1500 columns of 'who'"):
        FromTable(path, "y", num_clients=1, encode="one-hot").setup()
    assert len(x_of(FromTable(path, "y", num_clients=1, encode="codes"))) == 1500


def test_dates_are_no_categories_unless_the_column_is_named(tmp_path: Path) -> None:
    """A column of each date would be learnt by heart."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    days = [date(2020, 1, 1), date(2020, 1, 2)]
    path = tmp_path / "t.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table({"d": days, "y": [0, 1]}), path)
    with pytest.raises(UserError, match=r"has datetime.date\(2020, 1, 1\) in column 'd' of line 1"):
        FromTable(path, "y", num_clients=1, encode="one-hot").setup()
    assert x_of(FromTable(path, "y", num_clients=1, encode={"d": "codes"})) == [[0], [1]]


@pytest.mark.parametrize("column", ["who", "y"])
def test_two_forms_of_an_accented_letter_are_one_name(column: str, tmp_path: Path) -> None:
    """macOS writes é as two characters."""
    path = table(tmp_path, f"x,{column},z\n1,caf\u00e9,0\n2,cafe\u0301,1\n")
    target, client = ("z", "who") if column == "who" else ("y", None)
    data = FromTable(path, target, client, ["x"], num_clients=1)
    with pytest.raises(UserError, match=f"one name in two ways in column '{column}'"):
        data.setup()
    data = FromTable(path, "z", num_clients=1, encode="codes")
    assert x_of(data) == [[1, 0], [2, 0]]
