"""Data sets of Hugging Face's library, from memory and from disk, and rows that do not fit."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning import UserError
from fl_lightning.datamodules import IID, ByValue, DirichletByClass, FromHuggingFace

datasets = pytest.importorskip(
    "datasets", reason="datasets, of the extra huggingface, is not installed"
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the library makes of Parquet files in the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


WRITERS = ["w10", "w2", "w10", "w2", "w2", "a"]


def table(count: int = 6) -> Any:
    rows = {
        "a": [float(i) for i in range(count)],
        "b": [float(-i) for i in range(count)],
        "vector": [[i, i + 1, i + 2] for i in range(count)],
        "text": [f"text {i}" for i in range(count)],
        "writer": WRITERS[:count],
        "kind": [("dog", "cat")[i % 2] for i in range(count)],
        "amount": [i / 2 for i in range(count)],
    }
    return datasets.Dataset.from_dict(rows)


def read(data: FromHuggingFace, client: int) -> list[tuple[Any, Any]]:
    found: Any = data.client_dataset(client)
    return [found[i] for i in range(len(found))]


def test_a_column_names_the_clients() -> None:
    data = FromHuggingFace(table(), ["a", "b"], "kind", client="writer")
    assert data.num_clients == 3 and list(data.client_names) == ["a", "w10", "w2"]
    assert list(data.class_names) == ["cat", "dog"]
    own = read(data, 2)
    assert [x.tolist() for x, _ in own] == [[1, -1], [3, -3], [4, -4]]
    assert [y for _, y in own] == [0, 0, 1]


def test_kinds_of_x_and_y() -> None:
    vector = FromHuggingFace(table(), "vector", "kind", num_clients=1)
    (x, _) = read(vector, 0)[0]
    assert x.dtype == torch.int64 and x.shape == (3,)
    text = FromHuggingFace(table(), "text", "amount", num_clients=2, length=8)
    (x, y) = read(text, 0)[0]
    assert x.shape == (8,) and x[0] == ord("t") + 3 and y.dtype == torch.float32
    named = FromHuggingFace(table(), "a", "kind", num_clients=1, classes=["dog", "cat", "bird"])
    assert sorted(y for _, y in read(named, 0)) == [0, 0, 0, 1, 1, 1] and named.num_classes == 3
    partition = DirichletByClass(9.0, min_samples=1)
    split = FromHuggingFace(table(), "a", "kind", num_clients=2, partition=partition)
    assert split.client_sizes().sum() == 6
    values = FromHuggingFace(table(), "a", "kind", num_clients=2, partition=ByValue(column="b"))
    assert sorted(values.client_indices(0).tolist()) == [3, 4, 5]


def pictures(path: Path, form: str) -> Any:
    """Pictures with class labels, saved in a form."""
    draw = np.random.default_rng(0)
    images = [Image.fromarray(draw.integers(0, 255, (4, 5)).astype(np.uint8)) for _ in range(4)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = {"image": images, "label": [0, 1, 1, 0]}
    made = datasets.Dataset.from_dict(rows, features=features)
    both = datasets.DatasetDict({"train": made, "test": made.select([0, 1])})
    if form == "memory":
        return both, images
    if form == "saved":
        both.save_to_disk(path / "data")
        return path / "data", images
    (path / "data").mkdir()
    for split, rows_of in both.items():
        rows_of.to_parquet(path / "data" / f"{split}-00000.parquet")
    return path / "data", images


@pytest.mark.parametrize("form", ["memory", "saved", "parquet"])
def test_pictures_from_memory_and_disk(form: str, tmp_path: Path) -> None:
    (given, images) = pictures(tmp_path, form)
    data = FromHuggingFace(given, "image", "label", test="test", num_clients=1)
    own: Any = data.client_dataset(0)
    assert list(data.class_names) == ["no", "yes"] and len(data.test_set or ()) == 2
    for place, position in enumerate(data.client_indices(0)):
        expected = torch.from_numpy(np.array(images[position])).float() / 255
        assert torch.equal(own[place][0], expected[None])
    colour = FromHuggingFace(given, "image", "label", num_clients=1, mode="RGB", image_size=8)
    assert read(colour, 0)[0][0].shape == (3, 8, 8)


def test_shape_and_classes_are_known_before_a_run(tmp_path: Path) -> None:
    """So that a network gets its sizes; a column that is missing is named before any guess."""
    path = str(pictures(tmp_path, "saved")[0])
    given = {"data": path, "x": "image", "y": "label"}
    assert FromHuggingFace.shape_of_samples(**given) == (1, 4, 5)
    assert FromHuggingFace.shape_of_samples(**given, mode="RGB", image_size=8) == (3, 8, 8)
    assert FromHuggingFace.classes_of_samples(**given) == 2
    with pytest.raises(UserError, match="nowhere"):
        FromHuggingFace.shape_of_samples(**{**given, "y": "nowhere"})
    table().to_parquet(tmp_path / "rows.parquet")
    rows = {"data": str(tmp_path / "rows.parquet"), "x": ["a", "b"], "y": "kind"}
    assert FromHuggingFace.shape_of_samples(**rows) == (2,)
    assert FromHuggingFace.classes_of_samples(**rows) == len(set(table()["kind"]))


@pytest.mark.parametrize("name", ["TEST.parquet", "test_0.PARQUET", "test00.pq", "test-0.parquet"])
def test_files_named_by_their_split_are_no_training_rows(name: str, tmp_path: Path) -> None:
    for file, rows in (("train.parquet", [0, 1, 2]), (name, [3])):
        table().select(rows).to_parquet(tmp_path / file)
    data = FromHuggingFace(tmp_path, "a", "kind", test="test", num_clients=1)
    assert data.client_sizes().tolist() == [3] and len(data.test_set or ()) == 1


@pytest.mark.parametrize("form", ["rows", "splits", "folder", "file"])
def test_other_data_are_the_test_rows(form: str, tmp_path: Path) -> None:
    other = table().select([3])
    other.save_to_disk(tmp_path / "other")
    other.to_parquet(tmp_path / "other.parquet")
    test = {
        "rows": other,
        "splits": datasets.DatasetDict(test=other, train=table()),
        "folder": str(tmp_path / "other"),
        "file": tmp_path / "other.parquet",
    }[form]
    data = FromHuggingFace(table(), "a", "kind", test=test, num_clients=1)
    assert data.client_sizes().tolist() == [6] and len(data.test_set or ()) == 1
    (batch,) = data.test_dataloader()
    assert float(batch[0][0]) == other[0]["a"]


def test_damaged_rows_are_refused_by_row(tmp_path: Path) -> None:
    rows = {"a": [1.0, 2.0], "kind": ["x", None]}
    made = datasets.Dataset.from_dict(rows)
    with pytest.raises(UserError, match="'split train' has no value in column 'kind' of row 1"):
        FromHuggingFace(made, "a", "kind", num_clients=1).setup()
    test = datasets.Dataset.from_dict({"a": [1.0], "kind": ["z"]})
    both = {"train": table(), "test": test}
    with pytest.raises(UserError, match="'split test' has 'z' in column 'kind' of row 0"):
        FromHuggingFace(both, "a", "kind", test="test", num_clients=1).setup()
    (path, _) = pictures(tmp_path, "parquet")
    file = path / "train-00000.parquet"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(UserError, match="cannot be read"):
        FromHuggingFace(path, "image", "label", num_clients=1).setup()


@pytest.mark.parametrize(
    ("train", "test", "classes"),
    [([0, 1], [0, 2], 3), ([0, 10**12], [0], None), ([-1, -1], [0], None)],
)
def test_classes_are_counted_as_the_run_counts_them(
    train: list[int], test: list[int], classes: int | None, tmp_path: Path
) -> None:
    """With the test labels; labels that the run refuses give no size to a network."""
    for name, labels in (("train", train), ("test", test)):
        rows = {"x": [[0.5, 1.0]] * len(labels), "y": labels}
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / f"{name}-0.parquet")
    given = {"data": str(tmp_path), "x": "x", "y": "y", "test": "test"}
    assert FromHuggingFace.classes_of_samples(**given) == classes
    assert FromHuggingFace.shape_of_samples(**given) == (2,)


def test_palette_pictures_become_colours(tmp_path: Path) -> None:
    red = Image.new("RGB", (4, 4), (255, 0, 0)).quantize(2)
    bits = Image.new("1", (4, 4), 1)
    assert (red.mode, bits.mode) == ("P", "1")
    for name, picture, expected in (("red.png", red, [1, 0, 0]), ("bits.png", bits, [1])):
        picture.save(tmp_path / name)
        features = datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])}
        )
        rows = {"image": [str(tmp_path / name)] * 2, "label": [0, 1]}
        made = datasets.Dataset.from_dict(rows, features=features)
        (x, _) = read(FromHuggingFace(made, "image", "label", num_clients=1), 0)[0]
        assert x.shape == (len(expected), 4, 4) and x[:, 1, 2].tolist() == expected


def samples(data: FromHuggingFace) -> list[tuple[Any, Any]]:
    data.setup()
    found: Any = data.client_dataset(0)
    return [found[i] for i in range(len(found))]


def numbers(count: int = 40) -> Any:
    labels = [i % 4 for i in range(count)]
    return datasets.Dataset.from_dict({"x": [[i, 0.5] for i in range(count)], "y": labels})


def written(path: Path, columns: dict[str, Any]) -> Path:
    """Return a Parquet file of these columns."""
    import pyarrow as pa
    import pyarrow.parquet

    pa.parquet.write_table(pa.table(columns), path)
    return path


def test_a_transform_that_changes_labels_is_refused() -> None:
    def coarse(batch: Any) -> Any:
        return {**batch, "y": [y % 2 for y in batch["y"]]}

    with pytest.raises(UserError, match=r"changes the column 'y': row 2 has 2.*makes 0.*by map"):
        FromHuggingFace(numbers().with_transform(coarse), "x", "y", num_clients=1).setup()
    stored = numbers().map(coarse, batched=True)
    assert FromHuggingFace(stored, "x", "y", num_clients=1).num_classes == 2


def test_a_transform_gets_the_whole_row() -> None:
    def by_label(batch: Any) -> Any:
        pairs = zip(batch["x"], batch["y"], strict=True)
        return {"x": [torch.tensor(x) * (y + 1) for x, y in pairs], "y": batch["y"]}

    data = FromHuggingFace(numbers().with_transform(by_label), "x", "y", num_clients=1)
    for x, y in samples(data):
        assert x[1] == 0.5 * (y + 1)


@pytest.mark.parametrize("form", ["torch", "numpy", "columns"])
def test_the_format_of_a_data_set_changes_nothing(form: str) -> None:
    rows = numbers()
    expected = samples(FromHuggingFace(rows, "x", "y", num_clients=1))
    other = rows.with_format(columns=["y"]) if form == "columns" else rows.with_format(form)
    for (x, y), (z, label) in zip(
        samples(FromHuggingFace(other, "x", "y", num_clients=1)), expected, strict=True
    ):
        assert torch.equal(x, z) and x.dtype == z.dtype and y == label


ODD: dict[str, tuple[Any, str]] = {
    "nan": ([1.0, float("nan"), 3.0], "Row 1 .*nan"),
    "too large": ([1.0, 2.0, 1e300], "Row 2 .*inf"),
    "nan in a list": ([[1.0, 2.0], [3.0, 4.0], [5.0, float("nan")]], "Row 2 .*nan"),
    "gap": ([1, None, 3], "Row 1 .* is missing"),
    "gap in a list": ([[1, 2], [3, None], [4, 5]], "Row 1 .* is missing"),
    "lengths": ([[1, 2], [3, 4], [5]], r"Row 2 .* another shape than the first row's \(2,\)"),
    "inner lengths": ([[[1, 2], [3, 4]], [[5, 6], [7]], [[1, 2], [3, 4]]], "Row 1 .* another sha"),
    "text": (["a", None, "c"], "Row 1 .* is missing"),
    "texts in lists": ([["a"], ["b"], ["c"]], "holds list.*has to be a column of numbers"),
    "bytes": ([b"a", b"b", b"c"], "holds binary.*has to be"),
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


COLUMNS: dict[str, Any] = {
    "a": [1.0, 2.0],
    "y": [0, 1],
    "kind": ["dog", "cat"],
    "vector": [[1.0], [2.0]],
    "infinite": [0.5, float("inf")],
}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": "c"}, r"data\.x='c': the split 'train' has no column 'c'; it has a, y"),
        ({"x": ["a", "y"]}, r"data\.x has 'y', which is data\.y='y'"),
        ({"x": "kind", "client": "kind"}, r"data\.x has 'kind', which is data\.client"),
        ({"x": ["a", "vector"]}, "Column 'vector' .*several columns with one number"),
        ({"x": ["a", "kind"]}, "Column 'kind' .*several columns"),
        ({"length": 0}, "length=0"),
        ({"y": "kinds"}, "no column 'kinds'.*Did you mean 'kind'"),
        ({"y": "infinite"}, "inf in column 'infinite' of row 1"),
        (
            {"y": "kind", "classes": ["cat"]},
            "has 'dog' in column 'kind' of row 0, which is not in the cl",
        ),
        ({"client": "nobody"}, "no column 'nobody'"),
        ({"client": "y", "partition": IID()}, "client='y' and data.partition=.* give one of"),
        ({"partition": ByValue(column="kind")}, "ByValue's values are not numbers"),
        ({"test": "tests"}, r"data\.test is 'tests', and the data have the splits train"),
        ({"data": "gone"}, r"data\.data is 'gone', and there is no such file"),
        ({"data": 7}, "is of type int"),
        ({"data": Path(__file__).parent}, "was not written by save_to_disk and has no Parquet"),
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
        ({"x": [[1.0]], "y": [1]}, r"Row 0 .* another shape .*first row's \(2,\)"),
        (
            {"x": [[1.0, 2.0]], "y": [0.5]},
            r"'y' has whole numbers in .* fractions in 'split test'",
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
    test = labelled(["anna", "zoe"], [0, 1])
    data = FromHuggingFace(train, "x", "y", "who", test=test, tests="own")
    data.setup()
    assert list(data.client_names) == ["anna", "zoe"]
    assert data.client_sizes().tolist() == [1, 2]
    x = [float(data.test_set.read.dataset[i][0]) for i in range(2)]  # type: ignore[union-attr]
    assert x == [0, 1] and data.client_test_indices(0).tolist() == [3]


def test_a_client_without_a_name_is_refused() -> None:
    with pytest.raises(UserError, match="no value in column 'who' of row 1"):
        FromHuggingFace(labelled(["a", "b"], [0, -1, 1]), "x", "y", "who").setup()


@pytest.mark.parametrize(("train", "test"), [(["1", "2"], [1, 1]), ([1, 2], ["1", "1"])])
def test_labels_that_are_texts_on_one_side_are_refused(train: Any, test: Any) -> None:
    """The text 1 is the first class here, and the number 1 the second."""
    sides = [datasets.Dataset.from_dict({"x": [0.0, 1.0], "y": y}) for y in (train, test)]
    stars = datasets.Features(x=datasets.Value("float64"), y=datasets.ClassLabel(names=["1", "2"]))
    sides.append(datasets.Dataset.from_dict({"x": [0.0, 1.0], "y": [0, 1]}, features=stars))
    with pytest.raises(UserError, match=r"'y' has (names|whole numbers) in the training rows and "):
        FromHuggingFace(sides[0], "x", "y", test=sides[1], num_clients=1).setup()
    numbers = sides[0] if isinstance(train[0], int) else sides[1]
    for pair in ((numbers, sides[2]), (sides[2], numbers)):
        with pytest.raises(UserError, match=r"'y' has .* in the training rows and "):
            FromHuggingFace(pair[0], "x", "y", test=pair[1], num_clients=1).setup()


def test_a_column_of_kinds_splits_by_its_numbers_and_lists_are_no_classes() -> None:
    made = labelled(["5", "3", "4"], [0, 1, 2, 0, 1, 2])
    data = FromHuggingFace(made, "x", "who", partition=ByValue(column="who"), num_clients=3)
    data.setup()
    assert [sorted(data.client_indices(i).tolist()) for i in range(3)] == [[0, 3], [1, 4], [2, 5]]
    lists = datasets.Dataset.from_dict({"x": [0.0, 1.0], "y": [[0, 1], [1, 1]]})
    with pytest.raises(UserError, match=r"Column 'y' holds .* one value per row"):
        FromHuggingFace(lists, "x", "y", num_clients=1).setup()


def test_pairs_of_texts_and_labels_in_lists_of_one() -> None:
    rows: dict[str, Any] = {"premise": ["ab", "abcdef"], "hypothesis": ["c", "xyz"]}
    rows |= {"label": [[1], [0]], "n": [1.0, 2.0]}
    made, pair = datasets.Dataset.from_dict(rows), ["premise", "hypothesis"]
    data = FromHuggingFace(made, pair, "label", num_clients=1, length=6)
    expected = [([100, 101, 1, 102, 1, -1], 1), ([100, 101, 1, 123, 124, 1], 0)]
    assert [(x.tolist(), y) for x, y in read(data, 0)] == expected
    assert data.num_classes == 2
    with pytest.raises(UserError, match=r"Column 'n' .*two columns of texts"):
        FromHuggingFace(made, ["premise", "n"], "label", num_clients=1).setup()
