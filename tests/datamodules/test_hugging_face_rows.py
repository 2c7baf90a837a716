"""Rows of Hugging Face's library that would give wrong numbers, or fail in a later round."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import UserError
from fl_lightning.datamodules import IID, ByValue, FromHuggingFace

datasets = pytest.importorskip(
    "datasets", reason="datasets, of the extra huggingface, is not installed"
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the library makes of Parquet files in the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def samples(data: FromHuggingFace) -> list[tuple[Any, Any]]:
    data.setup()
    found: Any = data.client_dataset(0)
    return [found[i] for i in range(len(found))]


def written(path: Path, columns: dict[str, Any]) -> Path:
    """Return a Parquet file of these columns."""
    import pyarrow as pa
    import pyarrow.parquet

    pa.parquet.write_table(pa.table(columns), path)
    return path


def table(count: int = 40) -> Any:
    labels = [i % 4 for i in range(count)]
    return datasets.Dataset.from_dict({"x": [[i, 0.5] for i in range(count)], "y": labels})


def test_a_transform_that_changes_labels_is_refused() -> None:
    def coarse(batch: Any) -> Any:
        return {**batch, "y": [y % 2 for y in batch["y"]]}

    with pytest.raises(UserError, match=r"changes the column 'y': row 2 has 2.*makes 0.*by map"):
        FromHuggingFace(table().with_transform(coarse), "x", "y", num_clients=1).setup()
    stored = table().map(coarse, batched=True)
    assert FromHuggingFace(stored, "x", "y", num_clients=1).num_classes == 2


def test_a_transform_gets_the_whole_row() -> None:
    def by_label(batch: Any) -> Any:
        pairs = zip(batch["x"], batch["y"], strict=True)
        return {"x": [torch.tensor(x) * (y + 1) for x, y in pairs], "y": batch["y"]}

    data = FromHuggingFace(table().with_transform(by_label), "x", "y", num_clients=1)
    for x, y in samples(data):
        assert x[1] == 0.5 * (y + 1)


def test_a_transform_that_fails_is_told_from_a_row_that_does() -> None:
    def fails(batch: Any) -> Any:
        raise KeyError("pixels")

    with pytest.raises(UserError, match=r"The transform of the split 'train' .*row 0 .KeyError"):
        FromHuggingFace(table().with_transform(fails), "x", "y", num_clients=1).setup()

    def other(batch: Any) -> Any:
        return {"pixels": batch["x"]}

    data = FromHuggingFace(table().with_transform(other), "x", "y", num_clients=1)
    data.setup()
    with pytest.raises(UserError, match=r"makes no column 'x' of row .*it makes pixels"):
        samples(data)


@pytest.mark.parametrize("form", ["torch", "numpy", "columns"])
def test_the_format_of_a_data_set_changes_nothing(form: str) -> None:
    rows = table()
    expected = samples(FromHuggingFace(rows, "x", "y", num_clients=1))
    other = rows.with_format(columns=["y"]) if form == "columns" else rows.with_format(form)
    for (x, y), (z, label) in zip(
        samples(FromHuggingFace(other, "x", "y", num_clients=1)), expected, strict=True
    ):
        assert torch.equal(x, z) and x.dtype == z.dtype and y == label


ODD: dict[str, tuple[Any, str]] = {
    "nan": ([1.0, float("nan"), 3.0], "Row 1 .*nan"),
    "infinity": ([1.0, 2.0, float("-inf")], "Row 2 .*-inf"),
    "too large": ([1.0, 2.0, 1e300], r"Row 2 .*1e\+300"),
    "nan in a list": ([[1.0, 2.0], [3.0, 4.0], [5.0, float("nan")]], "Row 2 .*nan"),
    "gap": ([1, None, 3], "Row 1 .* no value"),
    "gap in a list": ([[1, 2], [3, None], [4, 5]], "Row 1 .* no value"),
    "lengths": ([[1, 2], [3, 4], [5]], "Row 2 .* 1 values .*the first row has 2"),
    "inner lengths": ([[[1, 2], [3, 4]], [[5, 6], [7]], [[1, 2], [3, 4]]], "Row 1 .* 1 values"),
    "text": (["a", None, "c"], "Row 1 .* no value"),
    "beyond int64": ([*np.array([[1], [2**63 + 1], [2]], np.uint64)], "Row 1 .*64 bits"),
    "texts in lists": ([["a"], ["b"], ["c"]], "holds list.*has to be numbers"),
    "bytes": ([b"a", b"b", b"c"], "holds binary.*has to be numbers"),
    "parts": ([{"a": 1}, {"a": 2}, {"a": 3}], "holds struct.*has to be numbers"),
    "dates": (np.array(["2020-01-01"] * 3, "datetime64[s]"), "holds timestamp.*has to be numbers"),
    "decimals": ([Decimal("1.5")] * 3, "holds decimal"),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("form", ["file", "memory"])
def test_odd_x_are_refused_before_the_run(name: str, form: str, tmp_path: Path) -> None:
    (values, what) = ODD[name]
    path: Any = written(tmp_path / "a.parquet", {"x": values, "y": [0, 1, 1]})
    if form == "memory":
        path = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path))
    with pytest.raises(UserError, match=what):
        FromHuggingFace(path, "x", "y", num_clients=1).setup()


def test_files_are_looked_through_once(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", {"x": [[1.0], [2.0]], "y": [0, 1]})
    FromHuggingFace(path, "x", "y", num_clients=1).setup()
    index = {file: file.stat().st_mtime_ns for file in (tmp_path / ".fl_lightning").iterdir()}
    FromHuggingFace(path, "x", "y", num_clients=1).setup()
    assert index == {one: one.stat().st_mtime_ns for one in (tmp_path / ".fl_lightning").iterdir()}
    written(path, {"x": [[1.0], [float("nan")]], "y": [0, 1]})
    with pytest.raises(UserError, match=r"Row 1 .*nan"):
        FromHuggingFace(path, "x", "y", num_clients=1).setup()


@pytest.mark.parametrize("name", ["TRAIN.PARQUET", "rows.pq"])
def test_endings_of_parquet_files(name: str, tmp_path: Path) -> None:
    written(tmp_path / name, {"x": [1.0, 2.0], "y": [0, 1]})
    for path in (tmp_path, tmp_path / name):
        assert len(samples(FromHuggingFace(path, "x", "y", num_clients=1))) == 2


def test_a_split_is_known_by_its_name_in_capitals(tmp_path: Path) -> None:
    for name, labels in (("Train.parquet", [0, 1]), ("TEST.PARQUET", [1])):
        written(tmp_path / name, {"x": [1.0] * len(labels), "y": labels})
    data = FromHuggingFace(tmp_path, "x", "y", test="test", num_clients=1)
    assert len(samples(data)) == 2 and len(data.test_set or ()) == 1


def test_test_rows_lie_client_by_client() -> None:
    """In each client they have the order of the data."""
    train = datasets.Dataset.from_dict({"x": [0.0, 1.0], "y": [0, 1], "who": ["a", "b"]})
    rows = {"x": [5.0, 6.0, 7.0, 8.0], "y": [1, 0, 1, 0], "who": ["b", "a", "b", "a"]}
    both = datasets.DatasetDict(train=train, test=datasets.Dataset.from_dict(rows))
    data = FromHuggingFace(both, "x", "y", client="who", test="test")
    data.setup()
    held: Any = data.test_set
    found = [held.read.dataset[i] for i in range(4)]
    assert [(x.item(), y) for x, y in found] == [(6, 0), (8, 0), (5, 1), (7, 1)]
    assert held.labels.tolist() == [0, 0, 1, 1]
    assert [data.client_test_indices(i).tolist() for i in (0, 1)] == [[2, 3], [4, 5]]


COLUMNS: dict[str, Any] = {
    "a": [1.0, 2.0],
    "y": [0, 1],
    "who": ["p", "p "],
    "blank": ["p", ""],
    "form": ["caf\u00e9", "cafe\u0301"],
    "kind": ["dog", "cat"],
    "vector": [[1.0], [2.0]],
    "infinite": [0.5, float("inf")],
    "beyond": np.array([0, 2**63 + 1], np.uint64),
    "far": [0, 2**40],
    "decimal": [Decimal(1), Decimal(2)],
}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": "c"}, "no column 'c' in the split 'train'; it has a, y"),
        ({"x": ["a", "y"]}, r"data\.x has 'y', which is data\.y='y'"),
        ({"x": "who", "client": "who"}, r"data\.x has 'who', which is data\.client"),
        ({"x": ["a", "a"]}, r"data\.x names 'a' twice"),
        ({"x": []}, r"data\.x is empty"),
        ({"x": ["a", "vector"]}, "the column 'vector' .*leave it out"),
        ({"x": ["a", "kind"]}, "the column 'kind' .*leave it out"),
        ({"length": 0}, "length=0"),
        ({"y": "kinds"}, "no column 'kinds' .*Did you mean 'kind'"),
        ({"y": "who"}, r"Column 'who' .* has one name in two ways: 'p' and 'p '"),
        ({"y": "form"}, "Column 'form' .* has one name in two ways"),
        ({"y": "vector"}, "holds list.*: one whole number, float or text per row is needed"),
        ({"y": "decimal"}, "holds decimal.*to which cast_column converts it"),
        ({"y": "beyond"}, "which is beyond 64 bits with a sign"),
        ({"y": "far"}, "has the label 1099511627776, and classes are numbered from 0"),
        ({"y": "infinite"}, "Row 1 .*inf in the column 'infinite'"),
        ({"y": "kind", "classes": ["cat"]}, "has 'dog' in row 0, which is not one of the cl"),
        ({"client": "nobody"}, "no column 'nobody'"),
        ({"client": "who"}, r"Column 'who' .* has one name in two ways: 'p' and 'p '"),
        ({"client": "form"}, "Column 'form' .* has one name in two ways"),
        ({"client": "blank"}, "Column 'blank' .* has a name without letters"),
        ({"client": "y", "partition": IID()}, "give one of the two"),
        ({"partition": ByValue(column="who")}, "Column 'who' .*'p', which is not a number"),
        ({"test": "tests"}, r"data\.test is 'tests', and the data have the splits train"),
        ({"data": "gone"}, r"data\.data is 'gone', and there is no such file"),
        ({"data": 7}, "is of type int"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "a.parquet", COLUMNS)
    arguments: dict[str, Any] = {"data": path, "x": "a", "y": "y", "num_clients": 1, **given}
    with pytest.raises(UserError, match=words):
        FromHuggingFace(**arguments).setup()


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ({"x": [[1.0]], "y": [1]}, "Row 0 of the split 'test' has 1 values .*first row has 2"),
        (
            {"x": [[1.0, 2.0]], "y": [0.5]},
            r"'y' has whole numbers in .* fractions in the split 'test'",
        ),
    ],
)
def test_test_rows_of_another_kind_are_refused(
    test: dict[str, Any], words: str, tmp_path: Path
) -> None:
    written(tmp_path / "train.parquet", {"x": [[1.0, 2.0]] * 2, "y": [0, 1]})
    written(tmp_path / "test.parquet", test)
    with pytest.raises(UserError, match=words):
        FromHuggingFace(tmp_path, "x", "y", test="test", num_clients=1).setup()


def labelled(names: list[str], codes: list[int], client: bool = True) -> Any:
    """Return rows whose clients are stored as numbers of names."""
    whose = datasets.ClassLabel(names=names)
    features = {"x": datasets.Value("float32"), "y": datasets.Value("int64"), "who": whose}
    columns = {"x": [float(i) for i in range(len(codes))], "y": [0] * len(codes), "who": codes}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def test_clients_that_are_stored_as_numbers_of_names_have_these_names() -> None:
    """A test set numbers the same names in another order."""
    train = labelled(["zoe", "anna"], [0, 1, 0])
    data = FromHuggingFace(
        train, "x", "y", "who", test=labelled(["anna", "zoe"], [0, 1]), tests="own"
    )
    data.setup()
    assert list(data.client_names) == ["anna", "zoe"]
    assert data.client_sizes().tolist() == [1, 2]
    x = [float(data.test_set.read.dataset[i][0]) for i in range(2)]  # type: ignore[union-attr]
    assert x == [0, 1] and data.client_test_indices(0).tolist() == [3]


def test_a_client_without_a_name_is_refused() -> None:
    with pytest.raises(UserError, match=r"'who' of the split 'train' has the label -1 in row 1"):
        FromHuggingFace(labelled(["a", "b"], [0, -1, 1]), "x", "y", "who").setup()


@pytest.mark.parametrize(("train", "test"), [(["1", "2"], [1, 1]), ([1, 2], ["1", "1"])])
def test_labels_that_are_texts_on_one_side_are_refused(train: Any, test: Any) -> None:
    """The text 1 is the first class here, and the number 1 the second."""
    sides = [datasets.Dataset.from_dict({"x": [0.0, 1.0], "y": y}) for y in (train, test)]
    data = FromHuggingFace(sides[0], "x", "y", test=sides[1], num_clients=1)
    with pytest.raises(UserError, match=r"'y' has (texts|whole numbers) in the training rows and "):
        data.setup()
