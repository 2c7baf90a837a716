"""Conversions of a table's columns: categories, scales, centres as in FLamby, and digits that
stay until x and y are rounded to float32.
"""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.model_selection import train_test_split

from fl_lightning import UserError
from fl_lightning.datamodules import ByValue, FromTable

pytest.importorskip("pandas", reason="pandas, of the extra tables, is not installed")
arrow = pytest.importorskip("pyarrow", reason="pyarrow, of the extra tables, is not installed")

ROWS = """colour,size,city,sick
red,1,A,no
blue,2,A,yes
red,3,B,no
green,4,B,yes
blue,?,B,yes
"""
DAYS = np.arange(20240101, 20240132)


def table(tmp_path: Path, text: str = ROWS, name: str = "t.csv") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def written(path: Path, columns: dict[str, Any], rows: slice = slice(None)) -> Path:
    """Return a CSV of these rows of the columns; a single value fills its column."""
    whole = np.broadcast_arrays(*(np.asarray(one, object) for one in columns.values()))
    lines = [",".join(map(str, row)) for row in zip(*(one[rows] for one in whole), strict=True)]
    return table(path.parent, "\n".join([",".join(columns), *lines]) + "\n", path.name)


def ready(*arguments: Any, **options: Any) -> Any:
    data = FromTable(*arguments, **options)
    data.setup()
    return data


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
    test = table(tmp_path, "colour,size,city,sick\npink,1,A,no\n", "u.csv")
    options = {"client": "city", "missing": "drop", **options}
    with pytest.warns(UserWarning, match="1 values of 'colour' occur in no training row"):
        data = ready(table(tmp_path), "sick", test=test, **options)
    assert list(data.column_names) == names and data.train_set.x.tolist() == x
    assert data.test_set.x.tolist() == [held]
    arguments = {"path": tmp_path / "t.csv", "target": "sick", **options}
    assert FromTable.shape_of_samples(**arguments) == (len(names),)


def test_categories_of_numbers_are_compared_by_value(tmp_path: Path) -> None:
    """A whole number beside gaps is written 1.0, and without gaps 1."""
    train = table(tmp_path, "grade,y\n1.0,0\n2.0,1\n1.0,0\n?,1\n")
    test = table(tmp_path, "grade,y\n1,0\n2,1\n02.0,1\n", "u.csv")
    options = {"encode": {"grade": "one-hot"}, "missing": "drop", "num_clients": 1}
    data = ready(train, "y", test=test, **options)
    assert list(data.column_names) == ["grade=1.0", "grade=2.0"]
    assert data.train_set.x.tolist() == [[1, 0], [0, 1], [1, 0]]
    assert data.test_set.x.tolist() == [[1, 0], [0, 1], [0, 1]]


def test_names_that_look_like_numbers_are_their_own_categories(tmp_path: Path) -> None:
    """Beside names, 1E2 and 100 are two codes, as pandas reads them; also in a test file without
    names.
    """
    path = table(tmp_path, "code,y\n1E2,0\n100,1\nA1,0\n01,1\n1,0\n")
    tests = table(tmp_path, "code,y\n100,1\n1e2,0\n01 ,1\n", "test.csv")
    data = ready(path, "y", num_clients=1, encode="codes", test=tests)
    assert data.train_set.x.tolist() == [[3], [2], [4], [0], [1]]
    assert data.test_set.x.tolist() == [[2], [5], [0]]
    classes = table(tmp_path, "x,y\n1,1E2\n2,A\n")
    with pytest.raises(UserError, match="has '100' in column 'y' of line 2, which is not in"):
        ready(classes, "y", num_clients=1, test=table(tmp_path, "x,y\n1,100\n", "test.csv"))


@pytest.mark.parametrize(("odd", "shown"), [("-", "-"), ('"2,5"', "2,5")])
def test_a_column_of_numbers_with_a_text_is_told_to_be_categories(
    odd: str, shown: str, tmp_path: Path
) -> None:
    path = table(tmp_path, f"price,city,y\n1.5,A,0\n{odd},B,1\n2,A,1\n3,C,0\n")
    said = f"has '{shown}' in column 'price' of line 3, which is not .* so its 4 values are cat"
    with pytest.warns(UserWarning, match=said) as told:
        ready(path, "y", num_clients=1, encode="one-hot")
    assert not [one for one in told if "'city'" in str(one.message)]


def test_a_name_of_each_row_is_not_made_one_hot(tmp_path: Path) -> None:
    """Its columns would fill the memory."""
    lines = "\n".join(f"user-{i},{i % 2}" for i in range(1500))
    path = table(tmp_path, f"who,y\n{lines}\n")
    with pytest.raises(UserError, match="one-hot makes 1500 columns of 'who'"):
        x_of(path, "y", encode="one-hot")
    assert len(x_of(path, "y", encode="codes")) == 1500


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_dates_are_no_categories_unless_the_column_is_named(ending: str, tmp_path: Path) -> None:
    """A column of each date would be learnt by heart."""
    columns = {"d": [date(2020, 1, 1), date(2020, 1, 2)], "y": [0, 1]}
    path = tmp_path / f"t.{ending}"
    if ending == "csv":
        written(path, columns)
    else:
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path)
    with pytest.raises(UserError, match=r"has datetime.date\(2020, 1, 1\) in column 'd' of line"):
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
    data = FromTable(table(tmp_path), "sick", partition=ByValue(column=column), **options)
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
    data = ready(
        files,
        "num",
        root=tmp_path,
        columns=HEART,
        missing="drop",
        above=0,
        scale="client",
        test={"share": share, "rule": "sklearn", "seed": 43},
    )
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


def standard(x: Any, by: Any) -> Any:
    return (x - by.mean()) / (by.std(ddof=1) + 1e-9)


@pytest.mark.parametrize("start", [20240101, 1_700_000_000_000], ids=["days", "milliseconds"])
@pytest.mark.parametrize("scale", ["client", "all"])
def test_large_numbers_are_scaled_before_they_are_rounded(
    start: int, scale: str, tmp_path: Path
) -> None:
    when = start + np.arange(40) % 31
    who = np.arange(40) % 2
    columns = {"when": when, "who": who, "y": np.arange(40) % 3 % 2}
    train = written(tmp_path / "t.csv", columns, slice(30))
    tests = written(tmp_path / "u.csv", columns, slice(30, None))
    data = ready(train, target="y", client="who", scale=scale, test=tests)
    groups = who if scale == "client" else np.zeros(40)
    found = np.concatenate([data.train_set.x, data.test_set.x])[:, 0]
    for group in np.unique(groups):
        own = groups == group
        expected = standard(when[own], when[:30][own[:30]])
        np.testing.assert_allclose(found[own], expected, rtol=0, atol=3e-7)


def test_a_target_is_compared_with_above_before_it_is_rounded(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", {"x": np.arange(31), "day": DAYS})
    data = ready(path, target="day", above=20240115, num_clients=1)
    assert data.train_set.y.tolist() == (DAYS > 20240115).astype(int).tolist()


@pytest.mark.parametrize("of", ["column", "values"])
@pytest.mark.parametrize("size", [1, 1e-14])
def test_clients_by_value_do_not_overlap(of: str, size: float, tmp_path: Path) -> None:
    """Neither in large numbers nor in small ones, of which float32 would lose the order."""
    seconds = (1_700_000_000 + np.random.default_rng(0).permutation(200)) * size
    columns = {"x": np.arange(200), "y": np.arange(200) % 2, "when": seconds}
    path = written(tmp_path / "t.csv", columns)
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
    train = written(tmp_path / "t.csv", columns)
    tests = written(tmp_path / "u.csv", {"pulse": [62, 60], "who": ["a", "a"], "y": [0, 1]})
    data = ready(train, target="y", client="who", scale=scale, test=tests)
    spread = 1 if scale == "client" else np.std([60, 60, 71, 74], ddof=1)
    expected = (np.array([62, 60]) - centre) / spread
    assert np.allclose(data.test_set.x[:, 0], expected, atol=1e-6)


def test_clients_of_one_row_are_told_if_each_is_scaled(tmp_path: Path) -> None:
    path = table(tmp_path, "who,size,y\na,1,0\nb,2,1\nb,4,0\n")
    with pytest.warns(UserWarning, match="1 of 2 clients have one training row"):
        data = ready(path, "y", client="who", scale="client")
    assert data.train_set.x[0].tolist() == [0]
    with pytest.raises(UserError, match=r"data\.scale is 'client', and data\.client names no"):
        ready(path, "y", features=["size"], scale="client", num_clients=2)


def test_whole_numbers_that_float32_does_not_hold_are_told(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", {"day": DAYS, "x": 0.1, "y": np.arange(31) % 2})
    with pytest.warns(UserWarning, match=r"'day'.* 20240101") as told:
        ready(path, target="y", num_clients=1)
    assert not [one for one in told if "'x'" in str(one.message)]
