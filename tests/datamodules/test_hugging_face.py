"""Data sets of Hugging Face's library, from memory and from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning import UserError
from fl_lightning.datamodules import ByValue, DirichletByClass, FromHuggingFace

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
    split = FromHuggingFace(
        table(), "a", "kind", num_clients=2, partition=DirichletByClass(9.0, min_samples=1)
    )
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
    # the run's own check of its arguments names it
    assert FromHuggingFace.shape_of_samples(**{**given, "data": str(tmp_path / "nothing")}) is None
    table().to_parquet(tmp_path / "rows.parquet")
    rows = {"data": str(tmp_path / "rows.parquet"), "x": ["a", "b"], "y": "kind"}
    assert FromHuggingFace.shape_of_samples(**rows) == (2,)
    assert FromHuggingFace.classes_of_samples(**rows) == len(set(table()["kind"]))


def test_rows_that_were_selected_keep_their_labels() -> None:
    data = FromHuggingFace(table().select([5, 0]), "a", "kind", client="writer")
    assert data.num_clients == 2 and list(data.client_names) == ["a", "w10"]
    assert [read(data, i)[0][0].item() for i in (0, 1)] == [5, 0]


def test_rows_without_a_label_are_refused() -> None:
    features = datasets.Features(
        {"a": datasets.Value("float32"), "y": datasets.ClassLabel(names=["no", "yes"])}
    )
    made = datasets.Dataset.from_dict({"a": [1.0, 2.0], "y": [1, -1]}, features=features)
    with pytest.raises(UserError, match="has the label -1 in row 1, which the library datasets"):
        FromHuggingFace(made, "a", "y", num_clients=1).setup()


@pytest.mark.parametrize(
    "name", ["test.parquet", "test_0.parquet", "test00.parquet", "test-0.arrow"]
)
def test_files_named_by_their_split_are_no_training_rows(name: str, tmp_path: Path) -> None:
    for file, rows in (("train.parquet", [0, 1, 2]), (name, [3])):
        part = table().select(rows)
        if file.endswith("arrow"):
            part.save_to_disk(tmp_path / "saved")
            next((tmp_path / "saved").glob("*.arrow")).rename(tmp_path / file)
            continue
        part.to_parquet(tmp_path / file)
    data = FromHuggingFace(tmp_path, "a", "kind", test="test", num_clients=1)
    assert data.client_sizes().tolist() == [3] and len(data.test_set or ()) == 1


def test_a_folder_without_files_of_rows_is_named(tmp_path: Path) -> None:
    table().save_to_disk(tmp_path / "one")
    with pytest.raises(UserError, match="has no Parquet or Arrow files; its folders are one"):
        FromHuggingFace(tmp_path, "a", "kind", num_clients=1).setup()


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
    batch = next(iter((data.test_set or []).batches(np.array([0]), 1)))  # type: ignore[union-attr]
    assert float(batch[0][0]) == other[0]["a"]


def test_columns_that_a_file_lacks_have_no_value(tmp_path: Path) -> None:
    table().to_parquet(tmp_path / "a.parquet")
    table().remove_columns("b").to_parquet(tmp_path / "b.parquet")
    assert len(read(FromHuggingFace(tmp_path, "a", "kind", num_clients=1), 0)) == 12
    with pytest.raises(
        UserError, match="Row 6 of the split 'train' has no value in the column 'b'"
    ):
        FromHuggingFace(tmp_path, "b", "kind", num_clients=1).setup()


def test_damaged_rows_are_refused_by_row(tmp_path: Path) -> None:
    rows = {"a": [1.0, None], "kind": ["x", None], "who": ["p", "q"]}
    made = datasets.Dataset.from_dict(rows)
    with pytest.raises(UserError, match="Column 'kind' of the split 'train' has no value in row 1"):
        FromHuggingFace(made, "a", "kind", num_clients=1).setup()
    with pytest.raises(UserError, match="Row 1 of the split 'train' has no value"):
        FromHuggingFace(made, "a", "who", num_clients=1).setup()
    test = datasets.Dataset.from_dict({"a": [1.0], "kind": ["z"]})
    both = {"train": table(), "test": test}
    with pytest.raises(UserError, match="of the split 'test' has 'z' in row 0"):
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


@pytest.mark.parametrize("arguments", [{"length": "long"}, {"mode": "XYZ"}, {"classes": 3}])
def test_wrong_arguments_are_left_to_the_run(arguments: dict[str, Any], tmp_path: Path) -> None:
    """The command line asks for shape and classes before it has checked the arguments."""
    datasets.Dataset.from_dict({"x": ["a", "b"], "y": ["p", "q"]}).to_parquet(
        tmp_path / "a.parquet"
    )
    given = {"data": str(tmp_path / "a.parquet"), "x": "x", "y": "y", **arguments}
    assert FromHuggingFace.shape_of_samples(**given) is None
    assert FromHuggingFace.classes_of_samples(**given) in (None, 2)


@pytest.mark.parametrize("arguments", [{"x": 5}, {"train": ["a"]}])
def test_what_the_files_lack_is_said_first(arguments: dict[str, Any], tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"x": ["a", "b"], "y": ["p", "q"]}).to_parquet(
        tmp_path / "a.parquet"
    )
    given = {"data": str(tmp_path / "a.parquet"), "x": "x", "y": "y", **arguments}
    with pytest.raises(UserError, match=r"no column 5|data\.train is of type list"):
        FromHuggingFace.shape_of_samples(**given)


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
