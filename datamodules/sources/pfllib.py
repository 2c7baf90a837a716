"""PFLlib's folders of .npz files, which are read without running any of their code."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.datamodules.sources.file_data_module import (
    FileDataModule,
    OfClients,
    Side,
    check_finite,
    whole_labels,
)
from fl_lightning.errors import UserError

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
    dictionaries, lists, texts and numbers of them, and refuses anything else. All files are read at
    the start, and their arrays stay in memory.

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
        config = self.path / "config.json"
        content = json.loads(config.read_text("utf-8")) if config.is_file() else {}
        told = content.get("num_clients", len(train))
        last = max({*train, *test})
        if told != len(train) or last >= len(train):
            raise UserError(
                f"The folder {str(self.path / 'train')!r} has {len(train)} files, of numbers up to "
                f"{last}, and config.json says num_clients={told}: make the data again with PFLlib."
            )
        self._files = [*train.values(), *test.values()]
        like: list[Any] = []
        side = self._side(list(train.values()), like)
        return side, self._side(list(test.values()), like) if test else None, None

    @staticmethod
    def _side(files: list[Path], like: list[Any]) -> Side:
        """Return the samples of these files; ``like``: the shape and type of the first x."""
        found = [arrays_of(file) for file in files]
        like += [] if like else [(found[0][0].shape[1:], found[0][0].dtype)]
        for file, (x, _) in zip(files, found, strict=True):
            if (x.shape[1:], x.dtype) != like[0]:
                raise UserError(
                    f"The file {str(file)!r} has x of the shape {x.shape[1:]} and {x.dtype}, and "
                    f"the first file {like[0][0]} and {like[0][1]}: make the data again with "
                    "PFLlib."
                )
        sizes = np.array([len(y) for _, y in found], np.int64)
        samples = OfClients(
            sizes,
            [torch.from_numpy(x) for x, _ in found].__getitem__,
            np.concatenate([y for _, y in found]),
        )
        return Side([file.stem for file in files], np.repeat(np.arange(len(files)), sizes), samples)


def numbered(folder: Path) -> dict[int, Path]:
    """Return the files <i>.npz of a folder, by number."""
    files = [file for file in folder.glob("*.npz") if file.stem.isdecimal()]
    return dict(sorted((int(file.stem), file) for file in files))


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
    with refused(
        f"The file {str(file)!r} cannot be read as PFLlib's",
        "The file needs an array data with the dictionary of x and y, which are arrays of numbers.",
    ):
        with zipfile.ZipFile(file) as archive:
            raw = io.BytesIO(archive.read("data.npy"))
        header = {(1, 0): np.lib.format.read_array_header_1_0}
        header.get(np.lib.format.read_magic(raw), np.lib.format.read_array_header_2_0)(raw)
        found = Harmless(raw).load()
        content = found.item() if isinstance(found, np.ndarray) else found
        x = np.asarray(content["x"])
        y = np.asarray(content["y"])
    where = f"The file {str(file)!r}"
    if len(x) != len(y):
        raise UserError(f"{where} has {len(x)} x and {len(y)} y: one y for each x is expected.")
    check_finite(x, where)
    return x.astype(np.float32) if x.dtype == np.float64 else x, whole_labels(y, where)
