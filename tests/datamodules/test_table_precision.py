"""Numbers of tables keep their digits until x and y are rounded to float32, as the last step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning.datamodules import ByValue, FromTable

DAYS = np.arange(20240101, 20240132)


def written(path: Path, columns: dict[str, Any], rows: slice = slice(None)) -> Path:
    """Return a CSV of these rows of the columns; a single value fills its column."""
    whole = np.broadcast_arrays(*(np.asarray(one, object) for one in columns.values()))
    lines = [",".join(map(str, row)) for row in zip(*(one[rows] for one in whole), strict=True)]
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")
    return path


def x_of(samples: Any) -> Any:
    return samples.x.double().numpy()


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
    data = FromTable(train, target="y", client="who", scale=scale, test=tests)
    data.setup()
    groups = who if scale == "client" else np.zeros(40)
    for group in np.unique(groups):
        own = groups == group
        by = when[:30][own[:30]]
        np.testing.assert_allclose(
            x_of(data.train_set)[own[:30], 0], standard(by, by), rtol=0, atol=3e-7
        )
        np.testing.assert_allclose(
            x_of(data.test_set)[own[30:], 0], standard(when[30:][own[30:]], by), rtol=0, atol=3e-7
        )


def test_a_target_is_compared_with_above_by_all_its_digits(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", {"x": np.arange(31), "day": DAYS})
    data = FromTable(path, target="day", above=20240115, num_clients=1)
    data.setup()
    samples: Any = data.train_set
    assert samples.y.tolist() == (DAYS > 20240115).astype(int).tolist()
    path = written(tmp_path / "u.csv", {"x": np.arange(3), "id": 2**60 + np.arange(3)})
    data = FromTable(path, target="id", above=2**60, num_clients=1)
    data.setup()
    assert data.train_set.y.tolist() == [0, 1, 1]  # type: ignore[union-attr]


@pytest.mark.parametrize("of", ["column", "values"])
def test_clients_by_value_do_not_overlap_in_large_numbers(of: str, tmp_path: Path) -> None:
    seconds = 1_700_000_000 + np.random.default_rng(0).permutation(200)
    columns = {"x": np.arange(200), "y": np.arange(200) % 2, "when": seconds}
    path = written(tmp_path / "t.csv", columns)
    partition = ByValue(column="when") if of == "column" else ByValue(values=seconds.tolist())
    data = FromTable(path, target="y", features=["x"], partition=partition, num_clients=4)
    data.setup()
    spans = sorted(
        (own.min(), own.max()) for own in (seconds[data.client_indices(i)] for i in range(4))
    )
    assert all(before[1] < after[0] for before, after in pairwise(spans)), spans


def test_values_that_differ_little_have_an_order(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", {"x": 1e-8 * np.arange(6), "y": [0, 1, 0, 1, 0, 1]})
    data = FromTable(path, target="y", partition=ByValue(column="x"), num_clients=2)
    data.setup()
    assert sorted(sorted(data.client_indices(i).tolist()) for i in range(2)) == [
        [0, 1, 2],
        [3, 4, 5],
    ]


@pytest.mark.parametrize("scale", ["client", "all"])
def test_a_column_without_spread_is_told_if_test_rows_have_other_values(
    scale: str, tmp_path: Path
) -> None:
    pulse = [60.0, 60, 60, 60, 71, 72, 73, 74] if scale == "client" else 60.0
    columns = {"pulse": pulse, "age": range(8), "who": list("aaaabbbb"), "y": [0, 1] * 4}
    train = written(tmp_path / "t.csv", columns)
    columns = {"pulse": [62.0, 60], "age": [1, 2], "who": ["a", "a"], "y": [0, 1]}
    tests = written(tmp_path / "u.csv", columns)
    data = FromTable(train, target="y", client="who", scale=scale, test=tests)
    with pytest.warns(UserWarning, match="'pulse'.* 60") as told:
        data.setup()
    text = next(str(one.message) for one in told if "pulse" in str(one.message))
    assert ("client 'a'" in text) == (scale == "client") and "1 test row" in text
    assert x_of(data.test_set)[1, 0] == 0, "the same value as in training"


def test_a_column_without_spread_in_all_rows_is_not_told(recwarn: Any, tmp_path: Path) -> None:
    columns = {"one": 1.0, "age": range(4), "who": list("aabb"), "y": [0, 1, 0, 1]}
    path = written(tmp_path / "t.csv", columns)
    data = FromTable(path, target="y", client="who", scale="client", test=path)
    data.setup()
    assert not [one for one in recwarn if "'one'" in str(one.message)]
    assert not x_of(data.train_set)[:, 0].any()


def test_whole_numbers_that_float32_does_not_hold_are_told(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", {"day": DAYS, "x": 0.1, "y": np.arange(31) % 2})
    with pytest.warns(UserWarning, match="'day'.* 20240101") as told:
        FromTable(path, target="y", num_clients=1).setup()
    assert not [one for one in told if "'x'" in str(one.message)]
