"""LEAF's files read back sample by sample, lazily; damaged ones refused by file and place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning import UserError
from fl_lightning.datamodules import FromLEAF
from fl_lightning.datamodules.sources.leaf import ALPHABET

DRAW = np.random.default_rng(0)


def written(path: Path, users: dict[str, Any], **more: Any) -> Path:
    """A file as LEAF's scripts write it."""
    content = {
        "users": list(users),
        "num_samples": [len(own["x"]) for own in users.values()],
        "user_data": users,
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False), "utf-8")
    return path


def numbers(count: int, size: int = 3, classes: int = 2) -> dict[str, Any]:
    x = DRAW.normal(size=(count, size)).round(3).tolist()
    return {"x": x, "y": DRAW.integers(0, classes, count).tolist()}


def read(data: FromLEAF, client: int) -> list[tuple[Any, int]]:
    found: Any = data.client_dataset(client)
    return [found[i] for i in range(len(found))]


@pytest.fixture
def plain(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Users in two files, out of order, with names that are numbers, and one that is not ASCII."""
    users = {"10": numbers(4), "9": numbers(2), "2": numbers(3), "11": numbers(1)}
    first = {"10": users["10"], "9": users["9"]}
    written(tmp_path / "train" / "a.json", first, hierarchies=["ä", "ö"])
    written(tmp_path / "train" / "b.json", {"2": users["2"], "11": users["11"]})
    return tmp_path, users


def test_samples_are_read_back_one_by_one(plain: tuple[Path, dict[str, Any]]) -> None:
    (path, users) = plain
    data = FromLEAF(path)
    assert list(data.client_names) == [] and data.num_clients == 4
    assert list(data.client_names) == ["2", "9", "10", "11"]
    for client, name in enumerate(data.client_names):
        samples = read(data, client)
        assert torch.stack([x for x, _ in samples]).numpy() == pytest.approx(
            np.array(users[name]["x"], np.float32)
        )
        assert [y for _, y in samples] == users[name]["y"]
    assert data.card()["data files"].startswith("2, ") and len(data.card()["files hash"]) == 16


def test_the_index_is_kept_made_again_and_gives_the_same_bits(
    plain: tuple[Path, dict[str, Any]],
) -> None:
    (path, _) = plain
    first = FromLEAF(path)
    first.setup()
    (index,) = (path / ".fl_lightning").iterdir()
    whole = index.read_bytes()
    for damaged in (whole, whole[:100], whole[:-40], b""):
        index.write_bytes(damaged)
        again = FromLEAF(path)
        assert again.partition_hash == first.partition_hash
        batches = [next(iter(one.client_batches(2, 0, 1)))[0] for one in (first, again)]
        assert torch.equal(*batches)
        assert index.read_bytes()[:4] == b"PK\x03\x04"
    # A changed file has another index.
    written(path / "train" / "b.json", {"2": numbers(5)})
    assert FromLEAF(path).num_clients == 3
    assert len(list((path / ".fl_lightning").iterdir())) == 2


def test_a_later_start_reads_only_what_it_needs(plain: tuple[Path, dict[str, Any]]) -> None:
    (path, _) = plain
    FromLEAF(path).setup()
    file = path / "train" / "b.json"
    stat = file.stat()
    text = file.read_bytes()
    file.write_bytes(b"x" * len(text))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    data = FromLEAF(path)
    assert len(read(data, 1)) == 2  # user 9 lies in the other file
    with pytest.raises(ValueError):
        read(data, 0)


def test_femnist_and_its_classes(tmp_path: Path) -> None:
    users = {"f0": {"x": DRAW.random((3, 784)).tolist(), "y": [0, 61, 35]}}
    written(tmp_path / "train" / "a.json", users)
    data = FromLEAF(tmp_path)
    (x, y) = read(data, 0)[1]
    assert x.shape == (1, 28, 28) and x.dtype == torch.float32 and y == 61
    assert float(x[0, 1, 2]) == pytest.approx(users["f0"]["x"][1][30])
    assert data.num_classes == 62 and data.class_names[35] == "Z" and data.class_names[61] == "z"


def test_shakespeare_has_leafs_alphabet(tmp_path: Path) -> None:
    texts = ["A" * 79 + "}", "é" + "b" * 79]
    written(tmp_path / "train" / "a.json", {"König": {"x": texts, "y": ["\n", "a"]}})
    data = FromLEAF(tmp_path)
    samples = read(data, 0)
    assert list(data.client_names) == ["König"] and data.num_classes == 80 == len(ALPHABET)
    assert samples[0][0].tolist() == [ALPHABET.index("A")] * 79 + [79]
    assert samples[1][0].tolist()[:2] == [80, ALPHABET.index("b")]
    assert [y for _, y in samples] == [0, ALPHABET.index("a")]
    written(tmp_path / "train" / "b.json", {"x": {"x": texts, "y": ["é", "a"]}})
    with pytest.raises(UserError, match=r"b\.json.*user 'x' .*sample 0 whose y is 'é'"):
        FromLEAF(tmp_path).setup()
    unknown = FromLEAF(tmp_path, unknown=True)
    assert unknown.num_classes == 81 and [y for _, y in read(unknown, 1)] == [
        80,
        ALPHABET.index("a"),
    ]


def test_sent140_by_bytes_and_by_words(tmp_path: Path) -> None:
    row = ["1", "date", "query", "user", "I'm so happy!"]
    written(tmp_path / "train" / "a.json", {"u": {"x": [row], "y": [1]}})
    (x, y) = read(FromLEAF(tmp_path, length=16), 0)[0]
    assert x.shape == (16,) and x[0] == ord("I") + 3 and x[-1] == -1 and y == 1
    (tmp_path / "words.json").write_text(json.dumps({"vocab": ["so", "I'm", "!"]}))
    words = FromLEAF(tmp_path, vocabulary=tmp_path / "words.json", words=6)
    assert read(words, 0)[0][0].tolist() == [1, 0, 3, 2, 3, 3]


def test_celeba_reads_pictures(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (20, 30), (10, 20, 30)).save(tmp_path / "images" / "1.png")
    written(tmp_path / "train" / "a.json", {"5": {"x": ["1.png"], "y": [1.0]}})
    with pytest.raises(UserError, match=r"give data\.images"):
        FromLEAF(tmp_path).setup()
    (x, y) = read(FromLEAF(tmp_path, images=tmp_path / "images"), 0)[0]
    assert x.shape == (3, 84, 84) and y == 1
    assert x[:, 0, 0].tolist() == pytest.approx([10 / 255, 20 / 255, 30 / 255])
    for name in ("../a.png", "2.png"):
        written(tmp_path / "train" / "a.json", {"5": {"x": [name], "y": [1]}})
        with pytest.raises(UserError, match=r"is not in data\.images"):
            read(FromLEAF(tmp_path, images=tmp_path / "images"), 0)


def test_tests_go_to_the_clients_of_their_names(tmp_path: Path) -> None:
    train = {"a": numbers(4), "b": numbers(3)}
    written(tmp_path / "train" / "a.json", train)
    written(tmp_path / "test" / "a.json", {"b": numbers(2), "a": numbers(1)})
    data = FromLEAF(tmp_path)
    assert data.client_test_indices(0).tolist() == [7]
    assert data.client_test_indices(1).tolist() == [8, 9]
    common = FromLEAF(tmp_path, tests="common")
    common.setup()
    assert not common.tests_clients and len(common.test_set or ()) == 3
    written(tmp_path / "test" / "a.json", {"b": numbers(2), "c": numbers(1, classes=9)})
    others = FromLEAF(tmp_path)
    others.setup()
    assert not others.tests_clients
    own = FromLEAF(tmp_path, tests="own")
    assert [len(own.client_test_indices(i)) for i in range(2)] == [0, 2]


def test_users_without_samples_have_no_number(tmp_path: Path) -> None:
    written(tmp_path / "train" / "a.json", {"a": numbers(0), "b": numbers(3)})
    data = FromLEAF(tmp_path)
    assert data.num_clients == 1 and list(data.client_names) == ["b"]


def damaged(kind: str, path: Path) -> None:
    """LEAF's file with one fault."""
    file = path / "train" / "a.json"
    users = {"a": numbers(2), "b": numbers(2)}
    written(file, users)
    text = file.read_text()
    changes: dict[str, Any] = {
        "cut off": lambda: file.write_text(text[: len(text) // 2]),
        "no JSON": lambda: file.write_text("users: a"),
        "more after it": lambda: file.write_text(text + "{}"),
        "not UTF-8": lambda: file.write_bytes(text.encode()[:30] + b"\xff" + text.encode()[30:]),
        "no data": lambda: file.write_text('{"users": []}'),
        "listed": lambda: file.write_text(text.replace('["a", "b"]', '["a", "b", "c"]')),
        "twice": lambda: written(path / "train" / "b.json", {"b": numbers(1)}),
        "lengths": lambda: written(file, {"a": {"x": [[1.0], [2.0]], "y": [1]}}),
        "NaN": lambda: written(file, {"a": {"x": [[1.0], [float("nan")]], "y": [1, 0]}}),
        "shape": lambda: written(file, {"a": {"x": [[1.0], [2.0, 3.0]], "y": [1, 0]}}),
        "kind": lambda: written(file, {"a": {"x": [[1.0], "text"], "y": [1, 0]}}),
        "texts": lambda: (
            written(file, {"a": {"x": [[1.0], [2.0]], "y": [1, 0]}})
            and file.write_text(file.read_text().replace("2.0", '"2.0"'))
        ),
        "negative": lambda: written(file, {"a": {"x": [[1.0]], "y": [-1]}}),
        "fraction": lambda: written(file, {"a": {"x": [[1.0]], "y": [0.5]}}),
        "no class": lambda: written(file, {"a": {"x": [[0.5] * 784], "y": [62]}}),
        "no x": lambda: (
            written(file, {"a": {"x": [], "y": []}})
            and file.write_text('{"user_data": {"a": {"y": [1]}}}')
        ),
        "nothing": lambda: file.unlink(),
    }
    changes[kind]()


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("cut off", r"a\.json' is broken at byte \d+"),
        ("no JSON", "has no key user_data"),
        ("more after it", r"broken at byte \d+: nothing is expected here"),
        ("not UTF-8", "not UTF-8 text: byte 30"),
        ("no data", "has no key user_data"),
        ("listed", "lists the user 'c'"),
        ("twice", r"b\.json.*user 'b' .*occurs in .*a\.json"),
        ("lengths", "user 'a' .*has 2 x and 1 y"),
        ("NaN", "user 'a' .*sample 1 with an x that is not a finite number"),
        ("texts", "user 'a' .*sample 1 with an x that is not a finite number"),
        ("shape", "user 'a' .*sample 1 whose x is of another kind or length"),
        ("kind", "user 'a' .*sample 1 whose x is of another kind"),
        ("negative", "sample 0 whose y is -1"),
        ("fraction", "sample 0 whose y is 0.5"),
        (
            "no class",
            r"'a' \(byte .*y is 62, which is not a class \(femnist has the classes 0 to 61",
        ),
        ("no x", r"user 'a' \(byte \d+\) needs the lists x and y"),
        ("nothing", "there are no files train/"),
    ],
)
def test_damaged_files_are_refused_by_file_and_place(kind: str, what: str, tmp_path: Path) -> None:
    damaged(kind, tmp_path)
    with pytest.raises(UserError, match=what):
        FromLEAF(tmp_path).setup()


def test_wrong_numbers_of_samples_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "train" / "a.json", {"a": numbers(2)}, num_samples=[81])
    data = FromLEAF(tmp_path)
    with pytest.warns(UserWarning) as told:
        assert data.client_sizes().tolist() == [2]
    assert any("num_samples differs" in str(one.message) for one in told)


def test_users_with_data_that_are_not_listed_are_told(tmp_path: Path) -> None:
    file = tmp_path / "train" / "a.json"
    written(file, {"a": numbers(2), "b": numbers(1), "c": numbers(1)})
    file.write_text(file.read_text().replace('["a", "b", "c"]', '["a", "c"]'))
    data = FromLEAF(tmp_path)
    with pytest.warns(UserWarning) as told:
        assert data.client_sizes().tolist() == [2, 1, 1]
    assert any("1 users have data and are not listed in users (b)" in str(o.message) for o in told)
