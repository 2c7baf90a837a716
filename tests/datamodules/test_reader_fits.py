"""Fits on files have the same bits with and without an index, in one process and in several."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning import FederatedModule
from fl_lightning.datamodules import FromHDF5, FromHuggingFace, FromLEAF, FromPFLlib
from fl_lightning.models import ImageClassifier
from tests.helpers.learners import trainer
from tests.helpers.processes import same_models_on_one_and_two

DRAW = np.random.default_rng(0)
CLIENTS = [(DRAW.random((5 + i, 4)).astype(np.float32), np.arange(5 + i) % 3) for i in range(6)]


def leaf(path: Path) -> FromLEAF:
    users = {f"u{i}": {"x": x.tolist(), "y": y.tolist()} for i, (x, y) in enumerate(CLIENTS)}
    for side in ("train", "test"):
        (path / side).mkdir(parents=True, exist_ok=True)
        file = path / side / "a.json"
        if not file.exists():
            file.write_text(json.dumps({"users": list(users), "user_data": users}))
    return FromLEAF(path, batch_size=4)


def hdf5(path: Path) -> FromHDF5:
    h5py = pytest.importorskip("h5py", reason="h5py, of the extra hdf5, is not installed")
    file = path / "train.h5"
    if not file.exists():
        with h5py.File(file, "w") as opened:
            for i, (x, y) in enumerate(CLIENTS):
                opened[f"examples/u{i}/x"] = x
                opened[f"examples/u{i}/y"] = y
    return FromHDF5(file, test=file, x="x", y="y", batch_size=4)


def pfllib(path: Path) -> FromPFLlib:
    for side in ("train", "test"):
        (path / side).mkdir(exist_ok=True)
        for i, (x, y) in enumerate(CLIENTS):
            if not (path / side / f"{i}.npz").exists():
                np.savez(path / side / f"{i}.npz", data={"x": x, "y": y})
    return FromPFLlib(path, batch_size=4)


def parquet(path: Path) -> FromHuggingFace:
    pytest.importorskip("datasets", reason="datasets, of the extra huggingface, is not installed")
    import pyarrow as pa
    import pyarrow.parquet

    file = path / "train.parquet"
    if not file.exists():
        x = np.concatenate([x for x, _ in CLIENTS])
        y = np.concatenate([y for _, y in CLIENTS])
        who = np.repeat([f"u{i}" for i in range(len(CLIENTS))], [len(y) for _, y in CLIENTS])
        table = pa.table({"x": list(x), "y": y, "who": who})
        pa.parquet.write_table(table, file, row_group_size=3)
    return FromHuggingFace(file, "x", "y", client="who", batch_size=4)


READERS: dict[str, Callable[[Path], Any]] = {
    "leaf": leaf,
    "hdf5": hdf5,
    "pfllib": pfllib,
    "parquet": parquet,
}


def fitted(data: Any, **arguments: Any) -> torch.Tensor:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    learner = ImageClassifier(network, num_classes=3, lr=0.1)
    module = FederatedModule(learner, participation=0.7, local_epochs=2, seed=1, **arguments)
    trainer(2).fit(module, data)
    return module.global_vector


@pytest.mark.parametrize("reader", READERS)
def test_the_index_and_worker_processes_change_no_bit(reader: str, tmp_path: Path) -> None:
    made = READERS[reader]
    first = fitted(made(tmp_path), engine="sequential")
    assert (tmp_path / ".fl_lightning").is_dir()
    assert torch.equal(fitted(made(tmp_path), engine="sequential"), first)
    shutil.rmtree(tmp_path / ".fl_lightning", ignore_errors=True)
    for workers in (1, 2, 4):
        assert torch.equal(fitted(made(tmp_path), engine="concurrent", workers=workers), first)


@pytest.mark.slow
@pytest.mark.parametrize("reader", [leaf, hdf5])
def test_two_processes_that_make_the_index_at_once_have_the_bits_of_one(
    reader: Callable[[Path], Any], tmp_path: Path
) -> None:
    for world in (1, 2):
        (tmp_path / f"{world} processes").mkdir()
        reader(tmp_path / f"{world} processes")
    same_models_on_one_and_two({leaf: on_ranks_leaf, hdf5: on_ranks_hdf5}[reader], tmp_path)


def on_ranks_leaf(folder: Path, rank: int, world: int) -> None:
    on_ranks(leaf, folder, rank, world)


def on_ranks_hdf5(folder: Path, rank: int, world: int) -> None:
    on_ranks(hdf5, folder, rank, world)


def on_ranks(reader: Callable[[Path], Any], folder: Path, rank: int, world: int) -> None:
    given = {} if world == 1 else {"strategy": "federated", "devices": world}
    # The files are made before; each process may be the first to read them.
    data = reader(folder / f"{world} processes")
    torch.manual_seed(3)
    learner = ImageClassifier(nn.Linear(4, 3), num_classes=3, lr=0.1)
    module = FederatedModule(learner, participation="all", seed=1)
    trainer(2, default_root_dir=folder, **given).fit(module, data)
    if rank == 0:
        torch.save(module.export().state_dict(), folder / f"{world}.pt")
