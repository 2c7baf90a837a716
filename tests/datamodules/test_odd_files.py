"""Odd files: what they hold is read as it is, or refused by file and place."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fl_lightning import UserError
from fl_lightning.datamodules import FromFolders, FromHDF5, FromLEAF, FromPFLlib


def leaf(path: Path, of: dict[str, Any], **more: Any) -> FromLEAF:
    (path / "train").mkdir(parents=True, exist_ok=True)
    content = {"users": list(of), "num_samples": [], "user_data": of, **more}
    (path / "train" / "a.json").write_text(json.dumps(content))
    return FromLEAF(path)


def user(y: Any = 0, x: Any = 0.5, count: int = 1) -> dict[str, Any]:
    return {"x": [[x, 2]] * count, "y": [y] * count}


def hdf5(path: Path, x: Any, y: Any, client: str = "examples/b") -> FromHDF5:
    h5py = pytest.importorskip("h5py", reason="h5py, of the extra hdf5, is not installed")
    with h5py.File(path / "train.h5", "w") as file:
        file["examples/a/x"], file["examples/a/y"] = np.zeros((1, 2)), np.zeros(1, np.int64)
        if x is None:
            file[client] = y
        else:
            file[f"{client}/x"], file[f"{client}/y"] = x, y
    return FromHDF5(path / "train.h5", x="x", y="y")


def pfllib(path: Path, x: Any, y: Any, name: str = "1") -> FromPFLlib:
    (path / "train").mkdir()
    for number, content in (("0", (np.zeros((1, 2)), np.zeros(1))), (name, (x, y))):
        with open(path / "train" / f"{number}.npz", "wb") as file:
            np.savez(file, data=dict(zip("xy", content, strict=True)))
    return FromPFLlib(path)


TWO = np.zeros((2, 2))
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "label beyond int64": (
        lambda p: leaf(p, {"a": user(10**20)}),
        r"a\.json': user 'a' .*not a class",
    ),
    "label that is no class": (lambda p: leaf(p, {"a": user(2**40)}), "client 'a' has the label 1"),
    "number too large": (lambda p: leaf(p, {"a": user(x=10**400)}), "not a finite number"),
    "users no list": (lambda p: leaf(p, {"a": user()}, users=5), "that are not lists"),
    "users of lists": (lambda p: leaf(p, {"a": user()}, users=[["a"]]), "lists the user \\['a'"),
    "infinite label": (lambda p: hdf5(p, TWO, np.array([0, np.inf])), "'examples/b': the labels"),
    "huge label": (lambda p: hdf5(p, TWO, np.array([0, 2**63 + 5], np.uint64)), "whole numbers"),
    "texts as labels": (lambda p: hdf5(p, TWO, [b"q", b"r"]), "whole numbers from 0"),
    "texts as x": (lambda p: hdf5(p, [b"q", b"r"], [0, 1], "examples/A"), "has to be numbers"),
    "no group": (lambda p: hdf5(p, None, 3, "examples/A"), "'examples/A' is not a group"),
    "fractions": (
        lambda p: pfllib(p, TWO, np.array([0, 1.5])),
        r"1\.npz' has y that are not "
        "whole",
    ),
    "NaN label": (lambda p: pfllib(p, TWO, np.array([0, np.nan])), "not whole numbers from 0"),
    "negative label": (lambda p: pfllib(p, TWO, np.array([0, -1])), "not whole numbers from 0"),
    "a label with a place": (
        lambda p: pfllib(p, TWO, np.array([0, -3])),
        r"1\.npz' has y .* such as -3 in sample 1",
    ),
    "a label with a row": (
        lambda p: hdf5(p, TWO, np.array([0, 2.5])),
        "'examples/b': the labels 'y' .* row 1 has 2.5",
    ),
    "labels of two dimensions": (
        lambda p: hdf5(p, TWO, np.zeros((2, 3))),
        r"the labels 'y' .*float64 \(2, 3\)",
    ),
    "an x that is not finite": (
        lambda p: pfllib(p, np.array([[0.0, 1], [2, np.nan]]), np.zeros(2)),
        r"1\.npz' has an x in sample 1 that is not finite",
    ),
    "a number far beyond the others": (
        lambda p: pfllib(p, TWO, np.zeros(2), "99999999999999"),
        r"has no file 1\.npz, and there are files up to 99999999999999\.npz",
    ),
    "a letter that LEAF does not have": (
        lambda p: leaf(p, {"a": {"x": ["b" * 80], "y": ["é"]}}),
        r"user 'a' .* sample 0 whose y is 'é'.*data\.unknown=true",
    ),
    "no samples at all": (lambda p: leaf(p, {"a": {"x": [], "y": []}}), "files have no samples"),
    "an x with its value": (
        lambda p: leaf(p, {"a": {"x": [[1.0, 2.0], [3.0, None]], "y": [0, 1]}}),
        "a sample 1 with an x that is not a finite number: None",
    ),
    "channels first": (
        lambda p: hdf5(p, np.zeros((2, 3, 8, 9), np.uint8), np.zeros(2), "examples/0"),
        r"bytes of the shape \(3, 8, 9\), .*store the channels last",
    ),
    "another type": (lambda p: pfllib(p, TWO.astype(int), np.zeros(2)), "and int64, and the"),
    "one number twice": (lambda p: pfllib(p, TWO, np.zeros(2), "00"), "have the same number"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_by_place(what: str, tmp_path: Path) -> None:
    (make, message) = REFUSED[what]
    with pytest.raises(UserError, match=message):
        make(tmp_path).setup()


def test_hdf5_without_clients(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="h5py, of the extra hdf5, is not installed")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_group("examples")
    with pytest.raises(UserError, match="has no clients in its group 'examples'"):
        FromHDF5(tmp_path / "a.h5").setup()


def test_names_of_any_alphabet_and_length(tmp_path: Path) -> None:
    names = ["9" * 5000, "10", "ä ö", "日本", "a/b", ""]
    data = leaf(tmp_path, {name: user(count=1 + i) for i, name in enumerate(names)})
    data.setup()
    assert list(data.client_names) == sorted(names)
    assert data.client_sizes().tolist() == [1 + names.index(name) for name in sorted(names)]


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_is_no_file_is_named(kind: str, tmp_path: Path) -> None:
    data = leaf(tmp_path, {"a": user()})
    odd = tmp_path / "train" / "b.json"
    if kind == "link":
        odd.symlink_to(tmp_path / "gone.json")
    else:
        odd.mkdir()
    with pytest.raises(UserError, match=r"b\.json' is not a file that can be read"):
        data.setup()


def test_a_folder_too_deep_is_told_which_one(tmp_path: Path) -> None:
    leaf(tmp_path, {"a": user()})
    with pytest.raises(UserError, match=f"Did you mean '{tmp_path}'"):
        FromLEAF(tmp_path / "train").setup()


def test_packed_files_are_named(tmp_path: Path) -> None:
    data = leaf(tmp_path, {"a": user()})
    file = tmp_path / "train" / "a.json"
    file.rename(file.with_suffix(".json.gz"))
    with pytest.raises(UserError, match="Its files are packed: unpack them"):
        data.setup()


def pictures(path: Path, mode: str = "RGB") -> Path:
    for name in ("cat", "dog"):
        (path / "art" / name).mkdir(parents=True)
        for i in range(2):
            Image.new(mode, (4, 4), 5).save(path / "art" / name / f"{i}.png")
    return path


def test_pictures_of_16_bits_and_links_to_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"0\.png': A picture of the mode 'I.*8 bits per channel"):
        FromFolders(pictures(tmp_path / "deep", "I;16"), mode="L").setup()
    linked = pictures(tmp_path / "linked")
    (linked / "art" / "cat" / "9.png").symlink_to(linked / "gone.png")
    with pytest.raises(UserError, match=r"cat/9\.png' cannot be read"):
        FromFolders(linked).setup()


def hash_of(path: Path, found: Any) -> None:
    found.put(FromLEAF(path).partition_hash)


def forked(path: Path) -> tuple[Any, Any]:
    """A process that reads the data, and the queue to which it sends their hash."""
    context = multiprocessing.get_context("fork")
    found: Any = context.Queue()
    process = context.Process(target=hash_of, args=(path, found))
    process.start()
    return process, found


def test_a_killed_start_and_two_at_once_leave_no_wrong_index(tmp_path: Path) -> None:
    many = {f"u{i}": user(i % 7, count=10) for i in range(2000)}
    path = leaf(tmp_path, many).path
    begun = time.perf_counter()
    expected = FromLEAF(path).partition_hash
    seconds = time.perf_counter() - begun
    folder = path / ".fl_lightning"
    for share in (0.05, 0.3, 0.6, 0.8, 0.9, 1.0, 1.1):
        for index in folder.glob("index-*"):
            index.unlink()
        process, _ = forked(path)
        time.sleep(share * seconds)
        process.kill()
        process.join()
        # Whatever lies there: the next start has the right clients.
        assert FromLEAF(path).partition_hash == expected
    for index in folder.glob("index-*"):
        index.unlink()
    pair = [forked(path) for _ in range(2)]
    assert [found.get(timeout=60) for _, found in pair] == [expected] * 2
    for process, _ in pair:
        process.join()
    assert len(list(folder.glob("index-*"))) == 1 and FromLEAF(path).partition_hash == expected


def test_data_that_change_after_their_index_are_read_anew(tmp_path: Path) -> None:
    data = leaf(tmp_path, {"a": user(1, count=2)})
    data.setup()
    file = tmp_path / "train" / "a.json"
    changed = file.read_text().replace("[1, 1]", "[3, 3]")
    assert len(changed) == file.stat().st_size
    file.write_text(changed)
    later = file.stat().st_mtime_ns + 1
    os.utime(file, ns=(later, later))
    again: Any = FromLEAF(tmp_path).client_dataset(0)
    assert [y for _, y in again] == [3, 3]


def test_clients_without_samples_are_left_out(tmp_path: Path) -> None:
    for data in (
        pfllib(tmp_path, np.zeros((0, 2)), np.zeros(0)),
        hdf5(tmp_path, np.zeros((0, 2)), np.zeros(0, np.int64)),
    ):
        assert data.client_sizes().tolist() == [1]
