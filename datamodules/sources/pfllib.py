"""PFLlib's folders of .npz files, which are read without running any of their code."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.datamodules.formats.file_index import Arrays, indexed
from fl_lightning.datamodules.sources.file_data_module import (
    KEPT,
    FileDataModule,
    Side,
    no_class,
    not_finite,
)
from fl_lightning.errors import UserError

# At most this number of bytes of x, of at most KEPT clients, is read at the start.
IN_MEMORY = 2**30
# The names that NumPy's own pickles of arrays use, in several versions.
HARMLESS = {
    *((core, "_reconstruct") for core in ("numpy.core.multiarray", "numpy._core.multiarray")),
    *((core, "scalar") for core in ("numpy.core.multiarray", "numpy._core.multiarray")),
    *((core, "_frombuffer") for core in ("numpy.core.numeric", "numpy._core.numeric")),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


class FromPFLlib(FileDataModule):
    """Federated data that PFLlib's ``generate_….py`` wrote: ``train/<i>.npz``, ``test/<i>.npz``.

    Clients are in the order of their numbers, and each has its own test samples. x keeps its type,
    except that float64 becomes float32; y is int64.

    PFLlib's files are pickles, which can run any program. This reader makes only arrays,
    dictionaries, lists, texts and numbers of them, and refuses anything else. The first run reads
    each file once and stores an index in ``.fl_lightning/`` beside the data. Later runs read up to
    1,000 clients at the start if x take at most 1 GiB, and otherwise only the clients that they
    need.

    Args:
        path: the folder with ``train``, ``test`` and ``config.json``, such as ``dataset/MNIST``.

    Raises:
        UserError: a file has an object of another class, a client has no training file, or
            ``config.json`` has another ``num_clients``; the error names the file.
    """

    def __init__(self, path: str | Path, **arguments: Any) -> None:
        super().__init__(tests="own", **arguments)
        self.path = Path(path).expanduser()

    def read(self) -> tuple[Side, Side | None, Side | None]:
        train = numbered(self.path / "train")
        test = numbered(self.path / "test")
        if not train:
            raise UserError(
                f"data.path is {str(self.path)!r}, and there are no files train/0.npz, … in it: "
                "give the folder that PFLlib wrote, such as dataset/MNIST."
            )
        last = max({*train, *test})
        if last >= len(train):
            missing = next(number for number in count() if number not in train)
            raise UserError(
                f"The folder {str(self.path / 'train')!r} has no file {missing}.npz, and there "
                f"are files up to {last}.npz: make the data again with PFLlib."
            )
        self._check_config(len(train))
        self._files = [*train.values(), *test.values()]
        sides = {"train": list(train.values()), "test": list(test.values())}
        options = {"reader": "pfllib"}
        index = indexed(self.path, self._files, options, partial(index_of, sides), self.tell)
        return (
            side_of(sides["train"], index, "train"),
            side_of(sides["test"], index, "test") if test else None,
            None,
        )

    def _check_config(self, clients: int) -> None:
        config = self.path / "config.json"
        if not config.is_file():
            return
        try:
            told = json.loads(config.read_text("utf-8")).get("num_clients")
        except (ValueError, AttributeError) as error:
            raise UserError(f"The file {str(config)!r} cannot be read ({error}).") from None
        if told not in (None, clients):
            raise UserError(
                f"The file {str(config)!r} says num_clients={told}, and there are {clients} "
                "training files: make the data again with PFLlib."
            )


def numbered(folder: Path) -> dict[int, Path]:
    """Return the files <i>.npz of a folder, by number."""
    files: dict[int, Path] = {}
    for file in folder.glob("*.npz"):
        if not file.stem.isdecimal():
            continue
        other = files.setdefault(int(file.stem), file)
        if other != file:
            raise UserError(
                f"The files {str(other)!r} and {str(file)!r} have the same number: remove one of "
                "them."
            )
    return dict(sorted(files.items()))


def index_of(sides: dict[str, list[Path]]) -> Arrays:
    """Return each file's number of samples and labels.

    Raises:
        UserError: a file is damaged, or has x of another shape than the first file.
    """
    made: Arrays = {}
    like: tuple[Any, ...] | None = None
    for side, files in sides.items():
        labels = [np.zeros(0, np.int64)]
        memory = 0
        for file in files:
            x, y = arrays_of(file)
            own = (x.shape[1:], x.dtype)
            like = own if like is None else like
            if own != like:
                raise UserError(
                    f"The file {str(file)!r} has x of the shape {own[0]} and {own[1]}, and the "
                    f"first file {like[0]} and {like[1]}: make the data again with PFLlib."
                )
            labels.append(y)
            memory += x.nbytes
        made[f"{side} bytes"] = np.array(memory)
        made[f"{side} sizes"] = np.array([len(own) for own in labels[1:]], np.int64)
        made[f"{side} labels"] = np.concatenate(labels)
    return made


def side_of(files: list[Path], index: Arrays, side: str) -> Side:
    names = [file.stem for file in files]
    read = partial(x_of, files)
    found = Side.of_clients(names, index[f"{side} sizes"], read, index[f"{side} labels"])
    if len(files) <= KEPT and int(index[f"{side} bytes"]) <= IN_MEMORY:
        found.dataset.keep_all()  # type: ignore[attr-defined]
    return found


def x_of(files: list[Path], client: int) -> Tensor:
    """The x of a client's samples."""
    x, _ = arrays_of(files[client])
    return torch.from_numpy(x)


class Harmless(pickle.Unpickler):
    """Reads only arrays and plain data from a pickle."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in HARMLESS:
            raise pickle.UnpicklingError(f"it holds a {module}.{name}")
        return super().find_class(module, name)


def arrays_of(file: Path) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """x and y of a file.

    Raises:
        UserError: the file is damaged, holds other objects, or has x and y of different lengths.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            raw = io.BytesIO(archive.read("data.npy"))
        version = np.lib.format.read_magic(raw)
        if version == (1, 0):
            np.lib.format.read_array_header_1_0(raw)
        else:
            np.lib.format.read_array_header_2_0(raw)
        found = Harmless(raw).load()
        content = found.item() if isinstance(found, np.ndarray) else found
        x = np.asarray(content["x"])
        y = np.asarray(content["y"])
    # pickle, zipfile and NumPy raise many kinds of errors for damaged files
    except Exception as error:
        raise UserError(
            f"The file {str(file)!r} cannot be read as PFLlib's: {str(error)[:160]}. The file "
            "needs an array data with the dictionary of x and y, which are arrays of numbers."
        ) from None
    if x.dtype.kind not in "iufb" or y.dtype.kind not in "iuf" or y.ndim != 1 or len(x) != len(y):
        raise UserError(
            f"The file {str(file)!r} has x {x.dtype} of the shape {x.shape} and y {y.dtype} of "
            f"{y.shape}: numbers are expected, and one y for each x."
        )
    wrong = no_class(y)
    if wrong is not None:
        raise UserError(
            f"The file {str(file)!r} has y that are not whole numbers from 0, such as {y[wrong]} "
            f"in sample {wrong}: classes are numbered from 0."
        )
    beyond = not_finite(x)
    if beyond is not None:
        raise UserError(
            f"The file {str(file)!r} has an x in sample {beyond} that is not finite in single "
            "precision. Mend the sample, or leave it out."
        )
    if x.dtype == np.float64:
        x = x.astype(np.float32)
    return x, y.astype(np.int64)
