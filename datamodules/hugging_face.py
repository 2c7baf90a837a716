"""Data sets of Hugging Face's library datasets from disk; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fl_lightning.datamodules.partitions import IID, ByGroup, Partition
from fl_lightning.datamodules.pictures import Pictures, check_normalised, size_of
from fl_lightning.datamodules.readers import FileDataModule, Side, ascending, missing_package
from fl_lightning.datamodules.tokens import padded, tokenizer_of
from fl_lightning.errors import UserError, suggest

SPLITS = ("train", "test", "validation", "val")


class Rows(Dataset[Any]):
    """Rows as ``(x, y)``, read when they are asked for."""

    def __init__(self, data: FromHuggingFace, rows: Any, targets: NDArray[Any], name: str) -> None:
        columns = data.x if isinstance(data.x, list) else [data.x]
        self.rows = rows.select_columns(columns)
        self.columns = columns
        self.targets = targets
        self.name = name
        self.pictures = data.pictures
        self.length = data.length
        self.tokenizer = data.tokens

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        y = self.targets[i]
        label: Any = int(y) if self.targets.dtype.kind in "iu" else torch.tensor(y)
        try:
            row = self.rows[int(i)]
        except Exception as error:  # the library and PIL raise many kinds
            raise UserError(
                f"Row {i} of {self.name} cannot be read ({type(error).__name__}: "
                f"{str(error)[:120]}): mend the data, or leave the row out."
            ) from None
        return self._x(i, [row[column] for column in self.columns]), label

    def _x(self, i: int, values: list[Any]) -> Tensor:
        (value, *others) = values
        if others or isinstance(value, int | float):
            return torch.tensor(self._numbers(i, values), dtype=torch.float32)
        if isinstance(value, str):
            tokens = self.tokenizer.pairs([(value,)], self.length)
            return torch.from_numpy(padded(tokens, self.length)[0]).long()
        if hasattr(value, "convert"):
            pixels = self.pictures.array(value)
            return self.pictures.tensor(pixels)
        found = np.asarray(self._numbers(i, value))
        if found.dtype.kind in "iub":
            return torch.from_numpy(found.astype(np.int64))
        return torch.from_numpy(found.astype(np.float32))

    def _numbers(self, i: int, values: Any) -> Any:
        """Numbers, which a row has to have."""
        found = np.asarray(values)
        if found.dtype.kind not in "iubf" or not np.isfinite(found).all():
            raise UserError(
                f"Row {i} of {self.name} has {str(values)[:80]!r} in {', '.join(self.columns)}, "
                "which are no finite numbers, no text and no picture: mend the row, or leave it "
                "out."
            )
        return values


class FromHuggingFace(FileDataModule):
    """Federated data from a data set of the library ``datasets``, in memory or on disk.

    Args:
        data: a ``Dataset`` or ``DatasetDict``, a folder of ``save_to_disk``, or a file or folder
            of Parquet or Arrow files, whose names begin with their split (``train-….parquet``).
        x: a column of pictures, numbers, sequences of numbers or texts; or several columns of
            numbers, side by side.
        y: the column to predict: class labels, whole numbers, or texts, which are numbered in
            ascending order of the training rows' values. Numbers with fractions stay float32.
        client: the column that names the clients; None: ``partition`` splits the rows.
        train, test, val: names of splits.
        classes: the values of y in the order of their numbers.
        mode: PIL's, to which pictures are converted; None: as they are.
        image_size: pixels, or ``[height, width]``.
        mean, std: x of pictures is (pixel / 255 − mean) / std, by channel.
        length: tokens of a text, −1 after its end.
        tokenizer: a local folder with a tokenizer; None: bytes are the tokens.

    Raises:
        UserError: a column or split that is not there, a missing value in ``y`` or ``client`` with
            its row, a picture that cannot be decoded, a test label that no training row has.
    """

    def __init__(
        self,
        data: Any,
        x: str | list[str],
        y: str,
        client: str | None = None,
        train: str = "train",
        test: str | None = None,
        val: str | None = None,
        classes: Sequence[str] | None = None,
        mode: str | None = None,
        image_size: int | list[int] | None = None,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        length: int = 128,
        tokenizer: str | None = None,
        num_workers: int = 0,
        partition: Partition | None = None,
        num_clients: int | None = None,
        **arguments: Any,
    ) -> None:
        if client is not None and partition is not None:
            raise UserError(
                f"data.client={client!r} says whose each row is, and data.partition splits the "
                "rows anew: give one of the two."
            )
        super().__init__(
            num_workers=num_workers,
            partition=ByGroup() if client is not None else (partition or IID()),
            num_clients=None if client is not None else num_clients,
            **arguments,
        )
        if isinstance(data, str | Path) and not Path(data).expanduser().exists():
            raise UserError(
                f"data.data is {str(data)!r}, and there is no such file or folder. Nothing is "
                "downloaded: give a folder of save_to_disk, or Parquet or Arrow files."
            )
        check_normalised(mean, std)
        self.data = data
        self.x = x
        self.y = y
        self.client = client
        self.splits = {"train": train, "test": test, "val": val}
        self.classes = None if classes is None else list(classes)
        self.pictures = Pictures(size_of(image_size), mode, tuple(mean), tuple(std))
        self.length = length
        self.tokenizer = tokenizer

    def read(self) -> tuple[Side, Side | None, Side | None]:
        found = splits_of(self.data)
        if isinstance(self.data, str | Path):
            path = Path(self.data).expanduser()
            self._files = sorted(path.rglob("*.arrow")) + sorted(path.rglob("*.parquet"))
        self.tokens = tokenizer_of(self.tokenizer)
        sides: dict[str, Side | None] = {}
        for side, name in self.splits.items():
            if name is not None and name not in found:
                raise UserError(
                    f"data.{side} is {name!r}, and the data have the splits {', '.join(found)}."
                    + suggest(name, list(found))
                )
            sides[side] = None if name is None else self._side(found[name], name)
        train = sides["train"]
        assert train is not None
        return train, sides["test"], sides["val"]

    def _side(self, rows: Any, split: str) -> Side:
        name = f"the split {split!r}"
        wanted = [*(self.x if isinstance(self.x, list) else [self.x]), self.y]
        for column in [*wanted, *([self.client] if self.client else [])]:
            if column not in rows.column_names:
                raise UserError(
                    f"There is no column {column!r} in {name}; it has "
                    f"{', '.join(rows.column_names)[:300]}.{suggest(column, rows.column_names)}"
                )
        targets = self._targets(rows, name)
        groups = np.zeros(len(targets), np.int64)
        names = ["all"]
        if self.client is not None:
            values = [str(value) for value in self._present(rows, self.client, name)]
            names = list(dict.fromkeys(values))
            names = [names[i] for i in ascending(names)]
            places = {one: place for place, one in enumerate(names)}
            groups = np.array([places[value] for value in values], np.int64)
        return Side(names, groups, Rows(self, rows, targets, name))

    def _present(self, rows: Any, column: str, name: str) -> list[Any]:
        """A column's values, none of which is missing."""
        values = list(rows.with_format(None)[column][:])
        for row, value in enumerate(values):
            if value is None or value != value:
                raise UserError(
                    f"Column {column!r} of {name} has no value in row {row}: fill it in, or leave "
                    "the row out."
                )
        return values

    def _targets(self, rows: Any, name: str) -> NDArray[Any]:
        """The labels, or the numbers to predict."""
        values = self._present(rows, self.y, name)
        own = getattr(rows.features[self.y], "names", None)
        if own and self.classes is not None:
            values = [own[value] for value in values]
        elif own:
            if self.class_names and list(self.class_names) != list(own):
                raise UserError(
                    f"The classes of {name} are {', '.join(own)[:200]}, and those of the training "
                    f"rows {', '.join(self.class_names)[:200]}: give data.classes, by which all "
                    "are numbered."
                )
            self.class_names = list(own)
            return np.array(values, np.int64)
        if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            if self.classes is None:
                return np.array(values, np.int64)
        elif all(isinstance(value, float) for value in values) and self.classes is None:
            return np.array(values, np.float32)
        texts = list(map(str, values))
        if not self.class_names:
            self.class_names = self.classes or sorted(set(texts))
        places = {one: place for place, one in enumerate(map(str, self.class_names))}
        for row, text in enumerate(texts):
            if text not in places:
                raise UserError(
                    f"Column {self.y!r} of {name} has {text!r} in row {row}, which is none of the "
                    f"classes {', '.join(places)[:200]}: leave the row out, or give data.classes."
                )
        return np.array([places[text] for text in texts], np.int64)

    def column_values(self, column: str) -> NDArray[np.float32]:
        """A column's numbers in the training rows, for ``ByValue``."""
        rows = splits_of(self.data)[str(self.splits["train"])]
        if column not in rows.column_names:
            raise UserError(
                f"There is no column {column!r}; there are {', '.join(rows.column_names)[:300]}."
                + suggest(column, rows.column_names)
            )
        return np.array(self._present(rows, column, "the training rows"), np.float32)


def package() -> Any:
    try:
        import datasets
    except ImportError:
        raise missing_package("datasets", "huggingface") from None
    return datasets


def splits_of(data: Any) -> dict[str, Any]:
    """The splits of a data set, by name.

    Raises:
        UserError: it is none, or cannot be read.
    """
    datasets = package()
    if isinstance(data, str | Path):
        data = opened(Path(data).expanduser())
    if isinstance(data, datasets.DatasetDict):
        return dict(data)
    if isinstance(data, datasets.Dataset):
        return {"train": data}
    if isinstance(data, dict):
        return data
    raise UserError(
        f"data.data is of type {type(data).__name__}: give a Dataset or DatasetDict of the library "
        "datasets, or the path of a folder or file."
    )


def opened(path: Path) -> Any:
    """A folder of save_to_disk, or Parquet or Arrow files by split."""
    datasets = package()
    files = [path] if path.is_file() else sorted([*path.glob("*.parquet"), *path.glob("*.arrow")])
    saved = path.is_dir() and any((path / name).exists() for name in STATE)
    try:
        if saved:
            return datasets.load_from_disk(str(path))
        parts: dict[str, list[Any]] = {}
        for file in files:
            split = next((one for one in SPLITS if file.name.startswith(f"{one}-")), "train")
            parts.setdefault(split, []).append(read_file(datasets, file))
        return {split: datasets.concatenate_datasets(own) for split, own in parts.items()}
    except Exception as error:  # the library and pyarrow raise many kinds
        raise UserError(
            f"data.data is {str(path)!r}, which cannot be read ({type(error).__name__}: "
            f"{str(error)[:160]}): copy it again."
        ) from None


# What save_to_disk writes beside the rows.
STATE = ("dataset_info.json", "dataset_dict.json", "state.json")


def read_file(datasets: Any, file: Path) -> Any:
    """A file's rows, without a copy in the library's cache."""
    if file.suffix == ".arrow":
        return datasets.Dataset.from_file(str(file))
    import pyarrow.parquet

    # Its features (pictures, class labels) lie in the schema.
    table = pyarrow.parquet.read_table(file, memory_map=True)
    return datasets.Dataset(datasets.table.InMemoryTable(table))
