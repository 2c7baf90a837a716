"""Null sizes of a packaged network come from the data's files, whatever reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fl_lightning.lab.cli.compose import prepare
from fl_lightning.lab.cli.network_sizes import fit_network_to_data
from fl_lightning.lab.cli.options import apply_options
from tests.helpers.zygote import Cli

CLASSES = 13


def leaf(path: Path, x: Any = 0.5, width: int = 784, label: int = CLASSES - 1) -> list[str]:
    own = {"x": [[x] * width] * 2, "y": [0, label]}
    (path / "train").mkdir()
    (path / "train" / "a.json").write_text(json.dumps({"users": ["a"], "user_data": {"a": own}}))
    return ["FromLEAF", f"--data.path={path}"]


def numbers(path: Path) -> list[str]:
    return leaf(path, width=6)


def pfllib(path: Path) -> list[str]:
    (path / "train").mkdir()
    both = {"x": np.zeros((2, 1, 2, 3), np.float32), "y": np.array([0, CLASSES - 1])}
    np.savez(path / "train" / "0.npz", data=both)
    return ["FromPFLlib", f"--data.path={path}"]


def hdf5(path: Path) -> list[str]:
    h5py = pytest.importorskip("h5py", reason="h5py, of the extra hdf5, is not installed")
    with h5py.File(path / "a.h5", "w") as file:
        file["examples/a/x"] = np.zeros((2, 6), np.float32)
        file["examples/a/y"] = [0, CLASSES - 1]
    return ["FromHDF5", f"--data.train={path / 'a.h5'}", "--data.x=x", "--data.y=y"]


def lists(path: Path) -> list[str]:
    (path / "art").mkdir()
    lines = []
    for label in range(CLASSES):
        Image.new("RGB", (2, 1)).save(path / "art" / f"{label}.png")
        lines.append(f"art/{label}.png {label}")
    (path / "art_train.txt").write_text("\n".join(lines) + "\n")
    return ["FromFolders", f"--data.path={path}", "--data.image_size=[1, 2]"]


def table(path: Path) -> list[str]:
    rows = [f"{i},0,0,red,0,{'abcdefghijklm'[i % CLASSES]}" for i in range(2 * CLASSES)]
    (path / "t.csv").write_text("a,b,c,colour,e,y\n" + "\n".join([*rows, "0,0,0,blue,0,a"]) + "\n")
    return [
        "FromTable",
        f"--data.path={path / 't.csv'}",
        "--data.target=y",
        "--data.encode=one-hot",
    ]


READERS: dict[str, tuple[Callable[[Path], list[str]], list[int]]] = {
    "leaf, recognised": (leaf, [784, 62]),
    "leaf, numbers": (numbers, [6, CLASSES]),
    "pfllib": (pfllib, [6, CLASSES]),
    "hdf5": (hdf5, [6, CLASSES]),
    "lists": (lists, [6, CLASSES]),
    "table": (table, [6, CLASSES]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("error")
def test_a_network_gets_the_sizes_of_the_files(reader: str, tmp_path: Path) -> None:
    (written, ends) = READERS[reader]
    prepared = prepare("fit", ["-c", "base", "--data", *written(tmp_path)])
    apply_options(prepared)
    fit_network_to_data(prepared)
    learner = prepared.config["model"]["learner"]["init_args"]
    assert learner["num_classes"] == ends[1]
    assert learner["network"]["init_args"]["sizes"] == [ends[0], 64, ends[1]]
    assert not [note for note in prepared.notes if "guess" in note]


@pytest.mark.slow
@pytest.mark.parametrize("data", ["leaf", "pfllib"])
def test_a_run_with_more_classes_than_ten_trains(data: str, cli: Cli) -> None:
    if data == "leaf":
        given = ["--data", *leaf(cli.folder, label=61)]
    else:
        given = ["-c", "data/pfllib", pfllib(cli.folder)[1]]
    run = cli("fit", "-c", "base", "-c", "trainer/cpu", "--trainer.max_epochs=1", *given)
    assert run.returncode == 0, run.stderr
