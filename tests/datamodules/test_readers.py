"""Files of LEAF, TFF, pfl and PFLlib: read back, indexed, fitted on, and refused by their place."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fl_lightning import FederatedModule, UserError
from fl_lightning.datamodules import FromHDF5, FromHuggingFace, FromLEAF, FromPFLlib
from fl_lightning.datamodules.sources.hdf5 import CHARACTERS
from fl_lightning.datamodules.sources.leaf import ALPHABET
from fl_lightning.models import Classifier
from tests.helpers.learners import trainer

Clients = dict[str, tuple[Any, Any]]
DRAW = np.random.default_rng(0)
# Not in the order of their numbers, which is the clients' order.
CLIENTS: Clients = {
    str(i): (DRAW.random((5 + i % 4, 4)).astype(np.float32), np.arange(5 + i % 4) % 3)
    for i in (10, 9, *range(9))
}
NAMES = [str(i) for i in range(11)]


def leaf_file(file: Path, users: Any, **more: Any) -> None:
    """A file as LEAF's scripts write it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lists = {
        name: {"x": np.asarray(x, object).tolist(), "y": np.asarray(y, object).tolist()}
        for name, (x, y) in users.items()
    }
    content = {"users": list(users), **more, "user_data": lists}
    file.write_text(json.dumps(content, default=float, ensure_ascii=False), "utf-8")


def leaf(path: Path, clients: Clients = CLIENTS, test: bool = True, **options: Any) -> FromLEAF:
    """Users in two files, with names that are not ASCII in other fields."""
    names = list(clients)
    for side in ("train", "test")[: 1 + test]:
        for file, own in (("a", names[:-1]), ("b", names[-1:])):
            if not (path / side / f"{file}.json").exists():
                users = {name: clients[name] for name in own}
                leaf_file(path / side / f"{file}.json", users, hierarchies=["ä", "ö"])
    return FromLEAF(path, batch_size=4, **options)


def hdf5(path: Path, clients: Clients = CLIENTS, test: bool = True, **options: Any) -> FromHDF5:
    h5py = pytest.importorskip("h5py", reason="h5py, of the extra hdf5, is not installed")
    file = path / "train.h5"
    if not file.exists():
        with h5py.File(file, "w") as opened:
            for name, (x, y) in clients.items():
                opened[f"examples/{name}/x"] = x
                opened[f"examples/{name}/y"] = y
    return FromHDF5(file, file if test else None, x="x", y="y", batch_size=4, **options)


def pfllib(path: Path, clients: Clients = CLIENTS, test: bool = True) -> FromPFLlib:
    for side in ("train", "test")[: 1 + test]:
        (path / side).mkdir(exist_ok=True)
        for name, (x, y) in clients.items():
            if not (path / side / f"{name}.npz").exists():
                np.savez(path / side / f"{name}.npz", data={"x": x, "y": y})
    return FromPFLlib(path, batch_size=4)


def parquet(path: Path, clients: Clients = CLIENTS) -> FromHuggingFace:
    pytest.importorskip("datasets", reason="datasets, of the extra huggingface, is not installed")
    import pyarrow as pa
    import pyarrow.parquet

    file = path / "train.parquet"
    if not file.exists():
        x = np.concatenate([x for x, _ in clients.values()])
        y = np.concatenate([y for _, y in clients.values()])
        who = np.repeat(list(clients), [len(y) for _, y in clients.values()])
        table = pa.table({"x": list(x), "y": y, "who": who})
        pa.parquet.write_table(table, file, row_group_size=3)
    return FromHuggingFace(file, "x", "y", client="who", test=str(file), batch_size=4)


READERS: dict[str, Callable[[Path], Any]] = {
    "leaf": leaf,
    "hdf5": hdf5,
    "pfllib": pfllib,
    "parquet": parquet,
}


def read(data: Any, client: int) -> list[tuple[Any, int]]:
    found = data.client_dataset(client)
    return [found[i] for i in range(len(found))]


@pytest.mark.parametrize("reader", READERS)
def test_samples_are_read_back_by_client(reader: str, tmp_path: Path) -> None:
    data = READERS[reader](tmp_path)
    data.setup()
    assert list(data.client_names) == NAMES and data.num_classes == 3
    for client, name in enumerate(NAMES):
        samples = read(data, client)
        assert torch.equal(torch.stack([x for x, _ in samples]), torch.tensor(CLIENTS[name][0]))
        assert [y for _, y in samples] == CLIENTS[name][1].tolist()
        assert len(data.client_test_indices(client)) == len(CLIENTS[name][1])
    assert len(data.card()["files hash"]) == 16 and data.card()["data files"]


def fitted(data: Any, **arguments: Any) -> torch.Tensor:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    learner = Classifier(network, num_classes=3, lr=0.1)
    module = FederatedModule(learner, participation=0.4, local_epochs=2, seed=1, **arguments)
    trainer(2).fit(module, data)
    return module.global_vector


@pytest.mark.parametrize("reader", READERS)
def test_the_index_and_worker_processes_change_no_bit(reader: str, tmp_path: Path) -> None:
    made = READERS[reader]
    first = fitted(made(tmp_path), engine="sequential")
    assert (tmp_path / ".fl_lightning").is_dir() == (reader != "pfllib")
    assert torch.equal(fitted(made(tmp_path), engine="sequential"), first)
    shutil.rmtree(tmp_path / ".fl_lightning", ignore_errors=True)
    for workers in (1, 4):
        assert torch.equal(fitted(made(tmp_path), engine="concurrent", workers=workers), first)


# ---- the index


def test_an_index_is_kept_and_made_again_if_it_is_damaged_or_data_change(tmp_path: Path) -> None:
    first = leaf(tmp_path)
    first.setup()
    (index,) = (tmp_path / ".fl_lightning").iterdir()
    whole = index.read_bytes()
    for damaged in (whole, whole[:100], whole[:-40], b""):
        index.write_bytes(damaged)
        again = leaf(tmp_path)
        assert again.partition_hash == first.partition_hash
        batches = [next(iter(one.client_batches(2, 0, 1)))[0] for one in (first, again)]
        assert torch.equal(*batches) and index.read_bytes()[:4] == b"PK\x03\x04"
    file = tmp_path / "train" / "b.json"
    changed = file.read_text().replace("[0, 1, 2, 0, 1", "[1, 1, 2, 0, 1")
    assert len(changed) == file.stat().st_size - 2
    file.write_text(changed)
    later = file.stat().st_mtime_ns + 1
    os.utime(file, ns=(later, later))
    assert [y for _, y in read(leaf(tmp_path), 8)][:3] == [1, 1, 2]
    assert len(list((tmp_path / ".fl_lightning").iterdir())) == 2


def test_a_later_start_reads_only_what_it_needs(tmp_path: Path) -> None:
    leaf(tmp_path).setup()
    file = tmp_path / "train" / "b.json"
    stat = file.stat()
    file.write_bytes(b"x" * stat.st_size)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    data = leaf(tmp_path)
    assert len(read(data, 1)) == len(CLIENTS["1"][1])
    with pytest.raises(ValueError):
        read(data, 8)


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
    many = {f"u{i}": ([[0.5, 2]] * 10, [i % 7] * 10) for i in range(2000)}
    path = leaf(tmp_path, many, test=False).path
    begun = time.perf_counter()
    expected = FromLEAF(path).partition_hash
    seconds = time.perf_counter() - begun
    folder = path / ".fl_lightning"
    for share in (0.05, 0.6, 0.8, 0.9, 1.0, 1.1):
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


# ---- kinds of data


def test_femnist_and_its_classes(tmp_path: Path) -> None:
    x = DRAW.random((3, 784))
    data = leaf(tmp_path, {"f0": (x, [0, 61, 35])})
    (picture, y) = read(data, 0)[1]
    assert picture.shape == (1, 28, 28) and picture.dtype == torch.float32 and y == 61
    assert float(picture[0, 1, 2]) == pytest.approx(x[1][30])
    assert data.num_classes == 62 and data.class_names[35] == "Z" and data.class_names[61] == "z"


def test_shakespeare_has_leafs_alphabet(tmp_path: Path) -> None:
    texts = ["A" * 79 + "}", "é" + "b" * 79]
    data = leaf(tmp_path, {"König": (texts, ["\n", "a"])}, test=False)
    samples = read(data, 0)
    assert list(data.client_names) == ["König"] and data.num_classes == 80 == len(ALPHABET)
    assert samples[0][0].tolist() == [ALPHABET.index("A")] * 79 + [79]
    assert samples[1][0].tolist()[:2] == [80, ALPHABET.index("b")]
    assert [y for _, y in samples] == [0, ALPHABET.index("a")]
    leaf_file(tmp_path / "train" / "c.json", {"x": (texts, ["é", "a"])})
    unknown = FromLEAF(tmp_path, unknown=True)
    assert unknown.num_classes == 81
    assert [y for _, y in read(unknown, 1)] == [80, ALPHABET.index("a")]


def test_sent140_by_bytes_and_by_words(tmp_path: Path) -> None:
    row = ["1", "date", "query", "user", "I'm so happy!"]
    (x, y) = read(leaf(tmp_path, {"u": ([row], [1])}, length=16), 0)[0]
    assert x.shape == (16,) and x[0] == ord("I") + 3 and x[-1] == -1 and y == 1
    (tmp_path / "words.json").write_text(json.dumps({"vocab": ["so", "I'm", "!"]}))
    words = FromLEAF(tmp_path, vocabulary=tmp_path / "words.json", words=6)
    assert read(words, 0)[0][0].tolist() == [1, 0, 3, 2, 3, 3]


def test_celeba_reads_pictures(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (20, 30), (10, 20, 30)).save(tmp_path / "images" / "1.png")
    data = leaf(tmp_path, {"5": (["1.png"], [1.0]), "6": (["2.png"], [0])})
    with pytest.raises(UserError, match=r"give data\.images"):
        data.setup()
    data = FromLEAF(tmp_path, images=tmp_path / "images")
    (x, y) = read(data, 0)[0]
    assert x.shape == (3, 84, 84) and y == 1
    assert x[:, 0, 0].tolist() == pytest.approx([10 / 255, 20 / 255, 30 / 255])
    with pytest.raises(UserError, match=r"2\.png' cannot be read"):
        read(data, 1)


def h5(path: Path, content: dict[str, Any]) -> Path:
    h5py = pytest.importorskip("h5py", reason="h5py, of the extra hdf5, is not installed")
    with h5py.File(path, "w") as file:
        for name, array in content.items():
            file[name] = array
    return path


def test_shakespeare_is_cut_into_windows(tmp_path: Path) -> None:
    text = "dhl" + "é" + CHARACTERS[-1]
    path = h5(tmp_path / "a.h5", {"examples/K/snippets": np.array([text.encode(), b"d"])})
    own = read(FromHDF5(path, length=4), 0)
    assert len(CHARACTERS) == 86
    # é is two bytes, which TFF does not know.
    expected = [[88, 1, 2, 3, 87], [87, 86, 89, -1, -1], [88, 1, 89, -1, -1]]
    assert [x.tolist() for x, _ in own] == expected
    assert [y for _, y in own] == [-1] * 3


def test_pfls_stackoverflow_has_partitions_and_padding(tmp_path: Path) -> None:
    content: dict[str, Any] = {"metadata/pad_symbol": 0}
    for side in ("train", "val", "test"):
        content |= {f"{side}/u/inputs": [[1, 5, 0]], f"{side}/u/targets": [[5, 2, 0]]}
    data = FromHDF5(h5(tmp_path / "a.h5", content))
    (x, y) = read(data, 0)[0]
    assert x.tolist() == [1, 5, 2, -1] and y == -1
    assert data.val_set is not None and data.test_set is not None


def test_pictures_and_groups_of_other_names(tmp_path: Path) -> None:
    """Bytes are scaled, as TFF's own, which are from 0 to 1."""
    content: dict[str, Any] = {"examples/a/pixels": np.full((1, 28, 28), 51, np.uint8)}
    path = h5(tmp_path / "a.h5", {**content, "examples/a/label": [1]})
    x = read(FromHDF5(path), 0)[0][0]
    assert x.shape == (1, 28, 28) and np.allclose(x, 0.2)
    other = h5(
        tmp_path / "b.h5", {"people/a/signal": np.arange(6.0).reshape(2, 3), "people/a/k": [1, 0]}
    )
    with pytest.raises(UserError, match=r"neither a group 'examples'.*it has people.*data\.group"):
        FromHDF5(other).setup()
    with pytest.raises(UserError, match=r"people/a'.*give data\.x and data\.y"):
        FromHDF5(other, group="people").setup()
    (x, y) = read(FromHDF5(other, x="signal", y="k", group="people"), 0)[1]
    assert x.dtype == torch.float32 and x.tolist() == [3, 4, 5] and y == 0


def test_tests_go_to_the_clients_of_their_names_if_all_have_one(tmp_path: Path) -> None:
    """TFF numbers the clients of CIFAR-100's test file anew."""
    image = {"image": np.zeros((2, 4, 4, 3), np.uint8), "label": np.array([[7], [9]])}
    every = {f"examples/{i}/{name}": one for i in range(11) for name, one in image.items()}
    train = h5(tmp_path / "a.h5", every)
    test = h5(tmp_path / "b.h5", {key: one for key, one in every.items() if key[9] in "03"})
    data = FromHDF5(train, test)
    with pytest.warns(UserWarning, match="2 of 11 clients' names occur among the 2 names"):
        data.setup()
    assert list(data.client_names) == NAMES
    assert not data.tests_clients and len(data.test_set or ()) == 4
    (x, y) = read(data, 0)[1]
    assert x.shape == (3, 4, 4) and y == 9 and data.num_classes == 10
    own = FromHDF5(train, test, tests="own")
    assert [len(own.client_test_indices(i)) for i in range(4)] == [2, 0, 0, 2]
    common = leaf(tmp_path, tests="common")
    common.setup()
    assert not common.tests_clients


@pytest.mark.parametrize(
    ("made", "given"), [(leaf, {"tests": "own"}), (hdf5, {"tests": "own"}), (pfllib, {})]
)
def test_clients_without_samples_have_no_number(made: Any, given: Any, tmp_path: Path) -> None:
    clients = {"0": (np.zeros((0, 2)), np.zeros(0)), "1": (np.zeros((1, 2)), np.zeros(1))}
    data = made(tmp_path, clients, **given)
    assert data.client_sizes().tolist() == [1] and list(data.client_names) == ["1"]
    assert len(data.client_test_indices(0)) == 1


def test_names_of_any_alphabet_and_length(tmp_path: Path) -> None:
    names = ["9" * 5000, "10", "ä ö", "日本", "a/b", ""]
    data = leaf(
        tmp_path, {name: ([[0.5, 2]] * (1 + i), [0] * (1 + i)) for i, name in enumerate(names)}
    )
    data.setup()
    assert list(data.client_names) == sorted(names)
    assert data.client_sizes().tolist() == [1 + names.index(name) for name in sorted(names)]
    assert all(read(data, i)[0][0].tolist() == [0.5, 2] for i in range(len(names)))


# ---- what is refused


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_pfllibs_files_is_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    data = pfllib(tmp_path, {"0": (np.zeros((1, 2)), [0]), "1": (Evil(ran), [0])})
    with pytest.raises(UserError, match=r"train/1\.npz' .*it holds a posix\.mkdir"):
        data.setup()
    assert not ran.exists()
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(UserError, match=r"0\.npz' .*it holds a torch"):
        pfllib(other, {"0": (torch.zeros(2), [0, 0])}).setup()


def cut(data: Any, file: Path, stop: int) -> Any:
    file.write_bytes(file.read_bytes()[:stop])
    return data


def of_text(path: Path, text: bytes) -> FromLEAF:
    (path / "train").mkdir()
    (path / "train" / "a.json").write_bytes(text)
    return FromLEAF(path)


def after(path: Path, made: Any, x: Any, y: Any) -> Any:
    """Clients of which the first is as it should be."""
    return made(path, {"0": (np.zeros((1, 2)), np.zeros(1, np.int64)), "1": (x, y)}, test=False)


def configured(path: Path, clients: int) -> FromPFLlib:
    data = pfllib(path)
    (path / "config.json").write_text(json.dumps({"num_clients": clients}))
    return data


TWO = np.zeros((2, 2))
ONE = [[0.5, 2]]
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut off": (lambda p: cut(leaf(p), p / "train/a.json", 300), r"a\.json' is broken .*char"),
    "no JSON": (lambda p: of_text(p, b"users: a"), "no key user_data"),
    "not UTF-8": (lambda p: of_text(p, b'{"user_data": \xff}'), "byte 0xff"),
    "no x": (lambda p: of_text(p, b'{"user_data": {"a": {"y": [1]}}}'), "user 'a' .*KeyError: 'x'"),
    "no files": (lambda p: FromLEAF(p), "there are no files train/"),
    "twice": (
        lambda p: (
            leaf(p, {"a": (ONE, [0]), "b": (ONE, [0])})
            and (leaf_file(p / "train/c.json", {"b": (ONE, [0])}) or FromLEAF(p))
        ),
        r"c\.json.*user 'b' occurs twice",
    ),
    "lengths": (lambda p: leaf(p, {"a": (ONE * 2, [1])}), "user 'a' .*2 x and 1 y"),
    "NaN": (lambda p: leaf(p, {"a": ([[1.0], [None]], [1, 0])}), "user 'a' has an x in sample 1"),
    "shape": (lambda p: leaf(p, {"a": (ONE, [0]), "b": ([[1.0]], [1])}), "user 'b' .*sample 0 has"),
    "kind": (lambda p: leaf(p, {"a": (ONE, [0]), "b": (["te"], [1])}), "user 'b' .*kind=numbers"),
    "too large": (lambda p: leaf(p, {"a": ([[10**400]], [0])}), "user 'a' .*OverflowError"),
    "negative": (lambda p: leaf(p, {"a": (ONE, [-1])}), "user 'a' has the label -1 in sample 0"),
    "fraction": (lambda p: leaf(p, {"a": (ONE, [0.5])}), "user 'a' has the label 0.5"),
    "beyond": (lambda p: leaf(p, {"a": (ONE, [10**20])}), "user 'a' has labels object"),
    "letter": (lambda p: leaf(p, {"a": (["b" * 80], ["é"])}), "'a' .*KeyError: 'é'.*unknown=true"),
    "h5 rows": (lambda p: after(p, hdf5, TWO, [0]), "examples/1' has 2 rows of 'x' and 1 of 'y'"),
    "h5 shape": (lambda p: after(p, hdf5, np.zeros((1, 3)), [0]), r"examples/1'.*shape \(3,\)"),
    "h5 type": (
        lambda p: after(p, hdf5, TWO.astype(int), [0, 0]),
        "of int64 .* first client float64",
    ),
    "h5 bytes": (lambda p: after(p, hdf5, TWO.astype(np.uint8), [0, 0]), "examples/1'.*uint8"),
    "h5 texts": (lambda p: after(p, hdf5, TWO, [b"q", b"r"]), "examples/1' has labels"),
    "h5 label": (lambda p: after(p, hdf5, TWO, [0, np.inf]), "examples/1' has the label inf in s"),
    "h5 huge": (lambda p: after(p, hdf5, TWO, np.array([0, 2**63 + 5], np.uint64)), "label 922"),
    "h5 labels": (lambda p: after(p, hdf5, TWO, np.zeros((2, 3))), r"float64 of shape \(2, 3\)"),
    "h5 NaN": (lambda p: after(p, hdf5, TWO * np.nan, [0, 0]), "examples/1' has an x in sample 0"),
    "h5 x": (lambda p: hdf5(p, {"0": ([b"q"], [0])}), "has x object, but x has to be numbers"),
    "h5 channels": (
        lambda p: hdf5(p, {"0": (np.zeros((2, 3, 8, 9), np.uint8), [0, 0])}),
        "channels last",
    ),
    "h5 cut": (lambda p: cut(hdf5(p), p / "train.h5", 900), r"train\.h5' cannot be read as HDF5"),
    "h5 gone": (lambda p: FromHDF5(p / "b.h5"), r"b\.h5' cannot be read .*Give the right path"),
    "pfl y": (lambda p: after(p, pfllib, TWO, np.zeros(3)), r"1\.npz' has 2 x and 3 y"),
    "pfl shape": (lambda p: after(p, pfllib, np.zeros((1, 3)), [0]), r"1\.npz' has x of the shape"),
    "pfl type": (lambda p: after(p, pfllib, TWO.astype(int), [0, 0]), "and int64, and the"),
    "pfl label": (
        lambda p: after(p, pfllib, TWO, np.array([0, -3])),
        r"1\.npz' has the label -3 in",
    ),
    "pfl NaN": (lambda p: after(p, pfllib, TWO + np.inf, [0, 0]), r"1\.npz' has an x in sample 0"),
    "pfl cut": (lambda p: cut(pfllib(p), p / "train/3.npz", 99), r"3\.npz' cannot be read as PFLl"),
    "pfl gap": (
        lambda p: pfllib(p, {"0": (TWO, [0, 0]), "9": (TWO, [0, 0])}),
        "has 2 files, of numbers up to 9",
    ),
    "pfl config": (lambda p: configured(p, 12), "has 11 files, .*num_clients=12"),
    "pfl gone": (lambda p: FromPFLlib(p / "gone"), r"no files train/0\.npz"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_by_place(what: str, tmp_path: Path) -> None:
    (make, message) = REFUSED[what]
    with pytest.raises(UserError, match=message):
        make(tmp_path).setup()
