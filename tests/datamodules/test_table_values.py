"""Large integers, columns of one name, and truth values in tables of either kind."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning.datamodules import FromTable

BIG = 2**53


def table(path: Path, columns: dict[str, list[Any]]) -> Path:
    """A CSV or a Parquet file of these columns, by the ending of ``path``."""
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path)
        return path
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_integers_beyond_the_reach_of_floats_are_told_apart(ending: str, tmp_path: Path) -> None:
    columns = {"who": [BIG + 1, BIG, BIG, BIG + 1], "x": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 1, 0]}
    data = FromTable(table(tmp_path / f"t.{ending}", columns), target="y", client="who")
    data.setup()
    assert list(data.client_names) == [str(BIG), str(BIG + 1)]
    assert data.client_indices(0).tolist() == [1, 2]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_truth_values_are_numbers(ending: str, tmp_path: Path) -> None:
    columns = {"smokes": [True, False, True, False], "x": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 1, 0]}
    data = FromTable(table(tmp_path / f"t.{ending}", columns), target="y", num_clients=2)
    data.setup()
    assert data.train_set is not None
    x: Any = data.train_set
    assert x.x[:, 0].tolist() == [1, 0, 1, 0]


def test_two_columns_of_one_name_in_parquet_are_told_as_in_csv(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    columns = [arrow.array([1.0, 2.0])] * 2 + [arrow.array([0, 1])]
    twice = arrow.Table.from_arrays(columns, names=["x", "x", "y"])
    pytest.importorskip("pyarrow.parquet").write_table(twice, path)
    with pytest.raises(UserError, match="has two columns 'x': name each once"):
        FromTable(path, target="y", num_clients=2).setup()


class Column:
    """As much of a column of polars as is asked for; of pandas, with ``isna``."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def to_numpy(self) -> Any:
        return np.asarray(self.values)

    def to_list(self) -> list[Any]:
        return self.values


class Frame:
    """As much of a frame of polars as is asked for."""

    def __init__(self, values: dict[str, list[Any]]) -> None:
        self.values = values
        self.columns = list(values)

    def to_numpy(self) -> Any:
        return np.array(list(zip(*self.values.values(), strict=True)))

    def __getitem__(self, name: str) -> Column:
        return Column(self.values[name])


def patients() -> dict[str, list[Any]]:
    return {
        "who": ["b", "a", "b", "a", "a", "c"],
        "age": [31.5, 4.25, 0.1, 77.0, 5.0, 6.0],
        "smokes": [True, False, True, True, False, False],
        "sick": ["no", "yes", "no", "no", "yes", "no"],
    }


def frames() -> list[Any]:
    """Stand-ins, and true ones where the packages are there."""
    found: list[Any] = [Frame(patients())]
    for package in ("pandas", "polars"):
        if find_spec(package) is not None:
            found.append(import_module(package).DataFrame(patients()))
    return found


@pytest.mark.parametrize("frame", frames(), ids=lambda frame: type(frame).__module__)
def test_a_frame_is_read_as_its_file(frame: Any, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"target": "sick", "client": "who", "batch_size": 2}
    path = tmp_path / "t.csv"
    rows = zip(*patients().values(), strict=True)
    path.write_text("\n".join(",".join(map(str, row)) for row in [tuple(patients()), *rows]))
    read = FromTable(path, test=0.34, **asked)
    given = FromTable(frame, test=0.34, **asked)
    read.setup()
    given.setup()
    for name in ("client_names", "column_names", "class_names", "num_classes", "groups"):
        assert np.array_equal(getattr(given, name), getattr(read, name)), name
    for ours, its in ((given.train_set, read.train_set), (given.test_set, read.test_set)):
        assert torch.equal(ours.x, its.x) and torch.equal(ours.y, its.y)
    # A frame to test on, too.
    both = FromTable(frame, test=frame, **asked)
    both.setup()
    assert len(both.test_set) == 6
    with pytest.raises(UserError, match=r"data.target='ill': the table '<\w+>' has no column"):
        FromTable(frame, target="ill", num_clients=2).setup()


def test_missing_values_and_what_is_no_frame_are_told() -> None:
    lost = Frame({"x": [1.0, None], "y": [0, 1]})
    with pytest.raises(UserError, match="'<Frame>' has no value in column 'x' of line 2"):
        FromTable(lost, target="y", num_clients=2).setup()
    with pytest.raises(UserError, match=r"data.path is of type ndarray: .*InMemoryDataModule\(\(x"):
        FromTable(np.zeros(3), target="y")
    with pytest.raises(UserError, match=r"data\.test is of type dict"):
        FromTable(lost, target="y", test={})


def test_missing_values_of_pandas_are_told() -> None:
    pandas = pytest.importorskip("pandas")
    for gone in (pandas.NA, float("nan"), pandas.NaT, None):
        frame = pandas.DataFrame({"x": pandas.Series([1.0, gone], dtype=object), "y": [0, 1]})
        with pytest.raises(UserError, match="no value in column 'x' of line 2"):
            FromTable(frame, target="y", num_clients=2).setup()
    twice = pandas.DataFrame([[1, 2, 3]], columns=["x", "x", "y"])
    with pytest.raises(UserError, match="two columns 'x'"):
        FromTable(twice, target="y", num_clients=1).setup()


def test_frames_are_taken_in_memory_as_numbers_that_a_network_takes() -> None:
    x = Frame({"a": [1.0, 3.0], "b": [2.5, 4.0]})
    data = InMemoryDataModule((x, Column([0, 1])), num_clients=2)
    data.setup()
    assert data.client_sizes().tolist() == [1, 1] and data.num_classes == 2
    assert data.train_set.x.dtype == torch.float32
    # Numbers and truth values together are objects to NumPy.
    mixed = Frame({"a": [1.5, 3.0], "b": [True, False]})
    objects = np.array([[1.5, True], [3.0, False]], object)
    mixed.to_numpy = lambda: objects  # type: ignore[method-assign]
    data = InMemoryDataModule((mixed, Column([0, 1])), num_clients=2)
    data.setup()
    assert data.train_set.x.tolist() == [[1.5, 1.0], [3.0, 0.0]]
    named = InMemoryDataModule((x, Column(["no", "yes"])), num_clients=2)
    with pytest.raises(UserError, match=r"y is a Column with .*'no'.*FromTable\(df, target"):
        named.setup()


@pytest.mark.parametrize("name", ["T.PARQUET", "t.pq", "t.data"])
def test_a_parquet_file_is_known_whatever_its_ending(name: str, tmp_path: Path) -> None:
    columns = {"x": [1.0, 2.0], "y": [0, 1]}
    table(tmp_path / "t.parquet", columns).rename(tmp_path / name)
    data = FromTable(tmp_path / name, target="y", num_clients=1)
    data.setup()
    assert data.num_classes == 2
    assert FromTable.shape_of_samples(path=tmp_path / name, target="y") == (1,)


@pytest.mark.parametrize("role", ["target", "client", "features", "encode"])
def test_cells_of_several_values_are_refused_by_place(role: str, tmp_path: Path) -> None:
    columns = {"x": [1.0, 2.0], "y": [0, 1], "tags": [[1, 2], []]}
    path = table(tmp_path / "t.parquet", columns)
    given: dict[str, Any] = {"target": "y", "features": ["x"], "num_clients": 1}
    given |= {
        "target": {"target": "tags"},
        "client": {"client": "tags"},
        "features": {"features": ["x", "tags"]},
        "encode": {"features": ["x", "tags"], "encode": "one-hot"},
    }[role]
    with pytest.raises(UserError, match=r"has \[1, 2\] in column 'tags' of line 1, but a table"):
        FromTable(path, **given).setup()


def test_columns_of_a_frame_may_have_numbers_as_names() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([[1.0, 0, 5], [2.0, 1, 6]])
    data = FromTable(frame, target=1, features=[2, 0], num_clients=1)  # type: ignore[arg-type]
    data.setup()
    x: Any = data.train_set
    assert x.x.tolist() == [[5, 1], [6, 2]] and data.num_classes == 2


def test_marks_of_missing_values_hold_in_a_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": [1, -999, 3], "y": [0, 1, 1]})
    data = FromTable(frame, "y", missing="drop", missing_marks=["-999"], num_clients=1)
    data.setup()
    x: Any = data.train_set
    assert x.x.tolist() == [[1], [3]]
