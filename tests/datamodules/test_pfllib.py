"""PFLlib's files are read back, and nothing in them is run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import UserError
from fl_lightning.datamodules import FromPFLlib

DRAW = np.random.default_rng(0)


def written(path: Path, number: int, side: str, content: Any) -> Any:
    """As PFLlib's ``save_file`` does it."""
    (path / side).mkdir(exist_ok=True)
    with open(path / side / f"{number}.npz", "wb") as file:
        np.savez_compressed(file, data=content)
    return content


def samples(count: int) -> dict[str, Any]:
    return {"x": DRAW.random((count, 1, 4, 4)), "y": DRAW.integers(0, 3, count)}


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, dict[int, Any]]:
    made = {i: written(tmp_path, i, "train", samples(3 + i)) for i in (0, 1, 10, 2)}
    for i in range(3, 10):
        made[i] = written(tmp_path, i, "train", samples(2))
    for i in range(11):
        written(tmp_path, i, "test", samples(2))
    (tmp_path / "config.json").write_text(json.dumps({"num_clients": 11, "alpha": 0.1}))
    return tmp_path, made


def test_clients_are_read_back_in_the_order_of_their_numbers(
    folder: tuple[Path, dict[int, Any]],
) -> None:
    (path, made) = folder
    data = FromPFLlib(path)
    assert data.num_clients == 11 and data.client_names[10] == "10"
    for i in range(11):
        own: Any = data.client_dataset(i)
        x = torch.stack([own[k][0] for k in range(len(own))])
        assert x.dtype == torch.float32
        assert torch.equal(x, torch.from_numpy(made[i]["x"].astype(np.float32)))
        assert [int(own[k][1]) for k in range(len(own))] == made[i]["y"].tolist()
        assert len(data.client_test_indices(i)) == 2


def test_a_later_start_reads_the_clients_that_it_needs(
    folder: tuple[Path, dict[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path, made) = folder
    FromPFLlib(path).setup()
    assert list((path / ".fl_lightning").glob("index-*.npz"))
    # As with more than 1,000 clients.
    monkeypatch.setattr("fl_lightning.datamodules.sources.pfllib.IN_MEMORY", 0)
    damaged = path / "train" / "3.npz"
    facts = damaged.stat()
    damaged.write_bytes(b"x" * facts.st_size)
    os.utime(damaged, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    data = FromPFLlib(path)
    own: Any = data.client_dataset(10)
    assert [int(own[k][1]) for k in range(len(own))] == made[10]["y"].tolist()
    with pytest.raises(UserError, match=r"3\.npz' cannot be read"):
        data.client_dataset(3)[0]


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_the_files_is_run(folder: tuple[Path, dict[int, Any]], tmp_path: Path) -> None:
    (path, _) = folder
    ran = tmp_path / "ran"
    written(path, 1, "train", {"x": Evil(ran), "y": np.zeros(1)})
    with pytest.raises(UserError, match=r"train/1\.npz' .*it holds a posix\.mkdir"):
        FromPFLlib(path).setup()
    assert not ran.exists()
    written(path, 1, "train", {"x": torch.zeros(2), "y": np.zeros(2)})
    with pytest.raises(UserError, match=r"1\.npz' .*it holds a torch"):
        FromPFLlib(path).setup()


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"x": np.zeros((2, 1, 4, 4)), "y": np.zeros(3)}, "one y for each x"),
        ({"x": np.zeros((2, 1, 5, 4)), "y": np.zeros(2)}, r"x of the shape \(1, 5, 4\)"),
        ({"x": np.zeros((2, 1, 4, 4))}, "cannot be read as PFLlib's"),
        ([1, 2], "cannot be read as PFLlib's"),
    ],
)
def test_damaged_files_are_refused_by_name(
    content: Any, what: str, folder: tuple[Path, dict[int, Any]]
) -> None:
    (path, _) = folder
    written(path, 1, "train", content)
    with pytest.raises(UserError, match=rf"train/1\.npz' .*{what}"):
        FromPFLlib(path).setup()


def test_missing_files_and_another_config_are_refused(folder: tuple[Path, dict[int, Any]]) -> None:
    (path, _) = folder
    (path / "config.json").write_text(json.dumps({"num_clients": 12}))
    with pytest.raises(UserError, match=r"config\.json' says num_clients=12, and there are 11"):
        FromPFLlib(path).setup()
    file = path / "train" / "3.npz"
    whole = file.read_bytes()
    file.write_bytes(whole[:-30])
    (path / "config.json").unlink()
    with pytest.raises(UserError, match=r"3\.npz' cannot be read"):
        FromPFLlib(path).setup()
    file.unlink()
    with pytest.raises(UserError, match=r"has no file 3\.npz"):
        FromPFLlib(path).setup()
    with pytest.raises(UserError, match=r"no files train/0\.npz"):
        FromPFLlib(path / "gone").setup()
