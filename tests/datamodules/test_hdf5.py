"""HDF5 files as TFF and pfl write them, read back; damaged ones are refused by file and group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import UserError
from fl_lightning.datamodules import FromHDF5
from fl_lightning.datamodules.sources.hdf5 import CHARACTERS

h5py = pytest.importorskip("h5py", reason="h5py, of the extra hdf5, is not installed")
DRAW = np.random.default_rng(0)


def written(path: Path, clients: dict[str, dict[str, Any]], group: str = "examples") -> Path:
    with h5py.File(path, "a") as file:
        for name, arrays in clients.items():
            for key, array in arrays.items():
                file[f"{group}/{name}/{key}"] = array
    return path


def pixels(count: int) -> dict[str, Any]:
    x = DRAW.random((count, 28, 28)).astype(np.float32)
    return {"pixels": x, "label": DRAW.integers(0, 10, count).astype(np.int32)}


def read(data: FromHDF5, client: int) -> list[tuple[Any, int]]:
    found: Any = data.client_dataset(client)
    return [found[i] for i in range(len(found))]


def test_federated_emnist_is_read_back_by_client(tmp_path: Path) -> None:
    clients = {"f1_10": pixels(3), "f0_2": pixels(2)}
    path = written(tmp_path / "train.h5", clients)
    test = written(tmp_path / "test.h5", {name: pixels(1) for name in clients})
    data = FromHDF5(path, test)
    assert data.num_clients == 2 and list(data.client_names) == ["f0_2", "f1_10"]
    for i, name in enumerate(data.client_names):
        own = read(data, i)
        assert torch.equal(
            torch.cat([x for x, _ in own]), torch.from_numpy(clients[name]["pixels"])
        )
        assert [y for _, y in own] == clients[name]["label"].tolist()
    assert [len(data.client_test_indices(i)) for i in range(2)] == [1, 1]
    assert (tmp_path / ".fl_lightning").is_dir()
    again = FromHDF5(path, test)
    assert again.partition_hash == data.partition_hash
    batches = [next(iter(one.client_batches(1, 0, 1)))[0] for one in (data, again)]
    assert torch.equal(*batches)


def test_numbers_that_mean_others_are_tested_on_in_common(tmp_path: Path) -> None:
    image = {"image": np.zeros((2, 4, 4, 3), np.uint8), "label": np.array([[7], [9]])}
    train = written(tmp_path / "a.h5", {str(i): image for i in range(11)})
    test = written(tmp_path / "b.h5", {str(i): image for i in range(3)})
    data = FromHDF5(train, test)
    data.setup()
    assert list(data.client_names) == [str(i) for i in range(11)]
    assert not data.tests_clients and len(data.test_set or ()) == 6
    (x, y) = read(data, 0)[1]
    assert x.shape == (3, 4, 4) and y == 9 and data.num_classes == 10
    own = FromHDF5(train, test, tests="own")
    assert [len(own.client_test_indices(i)) for i in range(4)] == [2, 2, 2, 0]


def test_shakespeare_is_cut_into_windows(tmp_path: Path) -> None:
    text = "dhl" + "é" + CHARACTERS[-1]
    path = written(tmp_path / "a.h5", {"K": {"snippets": np.array([text.encode(), b"d"])}})
    own = read(FromHDF5(path, length=4), 0)
    assert len(CHARACTERS) == 86
    # é is two bytes, which TFF does not know.
    assert [x.tolist() for x, _ in own] == [
        [88, 1, 2, 3, 87],
        [87, 86, 89, -1, -1],
        [88, 1, 89, -1, -1],
    ]
    assert [y for _, y in own] == [-1] * 3


def test_pfls_stackoverflow_has_partitions_and_padding(tmp_path: Path) -> None:
    tokens = {"inputs": np.array([[1, 5, 0]]), "targets": np.array([[5, 2, 0]])}
    path = tmp_path / "a.h5"
    for side in ("train", "val", "test"):
        written(path, {"u": tokens}, side)
    written(path, {"": {"pad_symbol": 0}}, "metadata")
    data = FromHDF5(path)
    (x, y) = read(data, 0)[0]
    assert x.tolist() == [1, 5, 2, -1] and y == -1
    assert data.val_set is not None and data.test_set is not None


def test_other_names_are_given(tmp_path: Path) -> None:
    rows = {"signal": np.arange(6.0).reshape(2, 3), "kind": np.array([1, 0])}
    path = written(tmp_path / "a.h5", {"a": rows}, "people")
    with pytest.raises(UserError, match=r"neither a group 'examples'.*it has people.*data\.group"):
        FromHDF5(path).setup()
    with pytest.raises(UserError, match=r"people/a'.*give data\.x and data\.y"):
        FromHDF5(path, group="people").setup()
    (x, y) = read(FromHDF5(path, x="signal", y="kind", group="people"), 0)[1]
    assert x.dtype == torch.float32 and x.tolist() == [3, 4, 5] and y == 0


@pytest.mark.parametrize(
    ("client", "what"),
    [
        ({"pixels": np.zeros((2, 28, 28)), "label": np.zeros(3)}, "has 2 rows of .* and 3 of"),
        ({"pixels": np.zeros((2, 28, 28))}, "has no dataset 'label'; it has pixels"),
        ({"pixels": np.zeros((1, 14, 28)), "label": np.zeros(1)}, r"the shape \(14, 28\), and"),
        (
            {"pixels": np.zeros((1, 28, 28), np.uint8), "label": np.zeros(1)},
            "uint8, and float32 in",
        ),
        ({"pixels": np.zeros((1, 28, 28)), "label": np.array([-1])}, "whole numbers from 0"),
        ({"pixels": np.zeros((1, 28, 28)), "label": np.array([0.5])}, "whole numbers from 0"),
    ],
)
def test_damaged_clients_are_refused_by_group(client: Any, what: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5", {"f0": pixels(2), "f1": client})
    with pytest.raises(UserError, match=rf"a\.h5', group 'examples/f1'.*{what}"):
        FromHDF5(path).setup()


@pytest.mark.parametrize("names", [{}, {"x": "image", "y": "label"}])
def test_pictures_as_bytes_and_as_numbers_are_not_mixed(
    names: dict[str, str], tmp_path: Path
) -> None:
    # Bytes become numbers from 0 to 1, channels first; other numbers stay as they are.
    kinds = [np.uint8, np.float32, np.int64]
    for i, kind in enumerate(kinds):
        others = [np.uint8, kind] if i else [kind, kind]
        own = {
            f"f{k}": {"image": np.full((2, 4, 4, 3), 9, one), "label": np.zeros(2, np.int64)}
            for k, one in enumerate(others)
        }
        path = written(tmp_path / f"{i}.h5", own)
        if not i:
            assert FromHDF5(path, **names).num_clients == 2
            continue
        with pytest.raises(UserError, match=rf"examples/f1'.*'image' holds {np.dtype(kind)}, and"):
            FromHDF5(path, **names).setup()


def test_widths_of_numbers_may_differ(tmp_path: Path) -> None:
    kinds = {"f0": np.float32, "f1": np.float64, "f2": np.float16}
    own = {name: {"a": np.ones((1, 2), kind), "b": [0]} for name, kind in kinds.items()}
    data = FromHDF5(written(tmp_path / "a.h5", own), x="a", y="b")
    assert [read(data, i)[0][0].tolist() for i in range(3)] == [[1, 1]] * 3


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e300])
def test_a_sample_that_is_not_finite_is_refused_by_group_and_place(
    value: float, tmp_path: Path
) -> None:
    own = {"f0": np.ones((2, 3)), "f1": np.ones((4, 3))}
    own["f1"][2, 1] = value
    path = written(tmp_path / "a.h5", {k: {"a": x, "b": [0] * len(x)} for k, x in own.items()})
    with pytest.raises(UserError, match=r"a\.h5', group 'examples/f1': sample 2 of 'a'"):
        FromHDF5(path, x="a", y="b").setup()


def test_files_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.h5", {"f0": pixels(20)})
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"a\.h5' cannot be read as HDF5"):
        FromHDF5(path).setup()
    with pytest.raises(UserError, match="there is no such file"):
        FromHDF5(tmp_path / "b.h5").setup()


def test_pixels_of_bytes_are_scaled(tmp_path: Path) -> None:
    """As TFF's own, which are from 0 to 1."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["examples/a/pixels"] = np.full((1, 28, 28), 51, np.uint8)
        file["examples/a/label"] = [1]
    data = FromHDF5(tmp_path / "a.h5")
    x = data.client_dataset(0)[0][0]
    assert x.shape == (1, 28, 28) and np.allclose(x, 0.2)
