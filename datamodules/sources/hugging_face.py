"""Data sets of Hugging Face's library datasets from disk; nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fl_lightning.datamodules.batches.sample_labels import some_of
from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.datamodules.formats.pictures import Mode, Pictures, Size
from fl_lightning.datamodules.formats.tables import (
    FileTable,
    as_numbers,
    coded,
    codes,
    give_one,
    refuse_answers,
    require,
)
from fl_lightning.datamodules.formats.tokens import tokenizer_of
from fl_lightning.datamodules.partitions.partition import Partition, own_or_grouped
from fl_lightning.datamodules.sources.file_data_module import (
    Arrays,
    FileDataModule,
    Side,
    ascending,
    indexed,
)
from fl_lightning.errors import UserError, optional, suggest
from fl_lightning.introspection.accepted import NonNegativeInt, PositiveFloat, PositiveInt

SPLITS = ("train", "test", "validation", "valid", "val", "dev")
# A file belongs to the split with which its name begins: "test-0", "test.parquet", "test00".
OF_SPLIT = re.compile(rf"({'|'.join(SPLITS)})(?![A-Za-z])", re.IGNORECASE)
# Rows that are checked at a time.
PIECE = 10_000
PARQUET = (".parquet", ".pq")
# Files that save_to_disk writes besides the rows.
STATE = ("dataset_info.json", "dataset_dict.json", "state.json")
LARGEST = np.finfo(np.float32).max


def files_of_rows(path: Path) -> list[Path]:
    """Return the Parquet and Arrow files in a folder, or the file."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [one for one in files if one.suffix.lower() in (".arrow", *PARQUET)]


def splits_of(data: Any, option: str = "data") -> dict[str, Any]:
    """The splits of a data set, by name.

    Raises:
        UserError: it is not a data set, or cannot be read.
    """
    datasets = optional("datasets", "huggingface", "FromHuggingFace")
    if isinstance(data, str | Path):
        data = opened(Path(data).expanduser(), option)
    if isinstance(data, datasets.Dataset):
        return {"train": data}
    if isinstance(data, dict):
        return dict(data)
    raise UserError(
        f"data.{option} is of type {type(data).__name__}: give a Dataset or DatasetDict of the "
        "library datasets, or the path of a folder or file."
    )


def opened(path: Path, option: str) -> Any:
    """Open a folder of save_to_disk, or Parquet files by split, kept in the cache."""
    datasets = optional("datasets", "huggingface", "FromHuggingFace")
    files = [one for one in files_of_rows(path) if one.suffix.lower() in PARQUET]
    parts: dict[str, list[str]] = {}
    for file in files:
        of = OF_SPLIT.match(file.name)
        parts.setdefault(of.group().lower() if of else "train", []).append(str(file))
    with refused(f"data.{option} is {str(path)!r}, which cannot be read", "Copy it again."):
        if any((path / name).exists() for name in STATE):
            return datasets.load_from_disk(str(path))
        made = {split: datasets.Dataset.from_parquet(own) for split, own in parts.items()}
    if not made:
        raise UserError(
            f"data.{option} is {str(path)!r}, which was not written by save_to_disk and has no "
            "Parquet files, or is not there: give such a folder or file. Nothing is downloaded."
        )
    return made


def transforms(rows: Any) -> bool:
    """Return whether a data set changes its rows when they are read."""
    return bool(getattr(rows, "format", {}).get("type") == "custom")


def column_stored(rows: Any, column: str) -> Any:
    """Return a column of pyarrow; other columns are not read.

    Lists of one value each become these values.
    """
    import pyarrow.compute as compute

    values = rows.select_columns([column]).with_format("arrow")[:].column(column)
    if not is_list(values.type):
        return values
    lengths = compute.list_value_length(values).to_numpy(zero_copy_only=False)
    if (lengths != 1).any():
        raise UserError(
            f"Column {column!r} holds {values.type}: y and the clients' names are one value per "
            "row. Make a column of one value each, for example by map(…)."
        )
    return compute.list_flatten(values)


def column_of(rows: Any, column: str) -> Any:
    """Return a column of pandas; other columns are not read.

    Numbers stay numbers, and all else becomes texts: of a ``ClassLabel`` its names, which another
    split may number in another order.
    """
    import pandas
    import pyarrow.types as types

    values = column_stored(rows, column)
    found = values.to_pandas(types_mapper=pandas.ArrowDtype)
    names = getattr(rows.features[column], "names", None)
    if names:  # The library gives the number -1 to rows without a label.
        return found.map(dict(enumerate(map(str, names))))
    if types.is_integer(values.type) or types.is_floating(values.type):
        return found.mask(np.isnan(as_numbers(found)))
    return found.astype(object).map(str, na_action="ignore")


def table_of(rows: Any, columns: Sequence[str | None], split: str) -> FileTable:
    """Return columns as a table, in which rows count from 0."""
    import pandas

    frame = pandas.DataFrame({name: column_of(rows, name) for name in columns if name is not None})
    name = f"split {split}"
    frame.index = pandas.MultiIndex.from_product([[name], range(len(frame))])
    return FileTable(Path(name), frame)


def is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def is_numbers(kind: Any) -> bool:
    """Return whether a type is a number or a truth value."""
    import pyarrow.types as types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def is_text(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def leaf_of(kind: Any) -> Any:
    """Return the type of a column's values, within lists and extension types."""
    while is_list(kind) or hasattr(kind, "storage_type"):
        kind = kind.value_type if is_list(kind) else kind.storage_type
    return kind


def check_numbers(rows: Any, column: str, name: str, like: list[tuple[int, ...]]) -> None:
    """Refuse a column whose rows are not all texts, or finite numbers in one shape.

    Args:
        name: the rows' name in an error.
        like: the shape of the first row; empty before it.

    Raises:
        UserError: with the row.
    """
    stored = rows.select_columns([column]).with_format("numpy")
    for first in range(0, len(rows), PIECE):
        for row, value in enumerate(stored[first : first + PIECE][column], first):
            x = np.asarray(value)
            like += [] if like else [x.shape]
            what = ""
            if x.dtype.kind in "iufb" and not (np.abs(x.astype(np.float64)) <= LARGEST).all():
                what = "is missing, or not finite in single precision"
            elif x.dtype.kind == "O" or x.shape != like[0]:
                what = f"is missing, or has another shape than the first row's {like[0]}"
            if what:
                raise UserError(
                    f"Row {row} of {name} has {str(value)[:80]} in the column {column!r}, which "
                    f"{what}: mend the row, or leave it out."
                )


class Rows(Dataset[Any]):
    """Rows as ``(x, y)``, each read on request."""

    def __init__(self, data: FromHuggingFace, rows: Any, targets: NDArray[Any], name: str) -> None:
        self.columns = data._columns()
        # A transform of the data set gets all columns, as it does without this reader.
        changed = transforms(rows)
        self.rows = rows if changed else rows.with_format(None).select_columns(self.columns)
        self.targets = targets
        self.name = name
        self.pictures = data.pictures
        self.length = data.length
        self.tokenizer = data.tokens

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[Tensor, Any]:
        y = self.targets[i]
        remedy = "Mend the data or their transform, or leave the row out."
        with refused(f"Row {i} of {self.name} cannot be read", remedy):
            row = self.rows[int(i)]
        x = self._x([row[column] for column in self.columns])
        return x, int(y) if self.targets.dtype.kind in "iu" else torch.tensor(y)

    def _x(self, values: list[Any]) -> Tensor:
        (value, *others) = values
        if isinstance(value, str):
            return torch.from_numpy(self.tokenizer.table([values], self.length)[0]).long()
        if others or isinstance(value, int | float):
            return torch.tensor(values, dtype=torch.float32)
        if hasattr(value, "convert"):
            return self.pictures.tensor(self.pictures.array(value))
        found = np.asarray(value)
        return torch.from_numpy(found.astype(np.int64 if found.dtype.kind in "iub" else np.float32))


class FromHuggingFace(FileDataModule):
    """Federated data from a data set of the library ``datasets``, in memory or on disk.

    Args:
        data: a ``Dataset`` or ``DatasetDict``, a folder of ``save_to_disk``, or a file or folder
            of Parquet files, whose names begin with their split (``train-….parquet``,
            ``test.parquet``); files of other names are of the split ``train``.
        x: a column of pictures, numbers, sequences of numbers or texts; several columns of numbers,
            which are joined; or two columns of texts, which the tokenizer joins.
        y: the column to predict: class labels, whole numbers, or texts, which get numbers in
            ascending order of the training rows' values. Numbers with fractions stay float32.
        client: the column that names the clients, by name if it is a ``ClassLabel``; None:
            ``partition`` splits the rows.
        train: the name of a split.
        test, val: likewise; or other data, in the forms that ``data`` has.
        classes: the values of y in the order of their numbers.
        mode: PIL's mode, to which pictures are converted; None: pictures keep theirs.
        image_size: pixels, or ``[height, width]``.
        mean, std: x of pictures is (pixel / 255 − mean) / std, by channel.
        length: number of tokens of a text, −1 after its end.
        tokenizer: a local folder with a tokenizer; None: the tokens are bytes.

    Raises:
        UserError: a column or split does not exist; a value in ``y`` or ``client`` is missing (with
            its row); a picture cannot be decoded; or no training row has a test label.
    """

    def __init__(
        self,
        data: Any,
        x: str | list[str],
        y: str,
        client: str | None = None,
        train: str = "train",
        test: Any = None,
        val: Any = None,
        classes: Sequence[str] | None = None,
        mode: Mode | None = None,
        image_size: Size = None,
        mean: Sequence[float] = (),
        std: Sequence[PositiveFloat] = (),
        length: PositiveInt = 128,
        tokenizer: str | None = None,
        num_workers: NonNegativeInt = 0,
        partition: Partition | None = None,
        num_clients: int | None = None,
        **arguments: Any,
    ) -> None:
        give_one({"client": client, "partition": partition})
        super().__init__(
            num_workers=num_workers,
            partition=own_or_grouped(partition, client, arguments),
            num_clients=None if client is not None else num_clients,
            **arguments,
        )
        if isinstance(data, str | Path) and not Path(data).expanduser().exists():
            raise UserError(
                f"data.data is {str(data)!r}, and there is no such file or folder. Nothing is "
                "downloaded: give a folder of save_to_disk, or Parquet files."
            )
        self.data = data
        self.x = list(x) if isinstance(x, tuple) else x
        refuse_answers(self._columns(), {"y": y, "client": client}, "data.x")
        self.y = y
        self.client = client
        self.splits = {"train": train, "test": test, "val": val}
        self.classes = None if classes is None else list(classes)
        self.pictures = Pictures.of(image_size, mode, mean, std)
        self.mean = self.pictures.mean
        self.std = self.pictures.std
        self.length = length
        self.tokenizer = tokenizer

    @classmethod
    def own_clients(cls, **arguments: Any) -> bool:
        """Return whether a column gives the clients."""
        return arguments.get("client") is not None

    def read(self) -> tuple[Side, Side | None, Side | None]:
        sides = self._sides()
        stored = [self.data, *self.splits.values()]
        if all(one is None or isinstance(one, str | Path) for one in stored):
            path = Path(self.data).expanduser()
            beside = path if path.is_dir() else path.parent
            options = {"reader": "huggingface", "x": self.x, "splits": str(self.splits)}
            indexed(beside, self._files, options, self._look, self.tell)
        else:
            self._look()
        return sides

    def _look(self) -> Arrays:
        """Read the columns x of numbers and texts once, and refuse what does not fit."""
        columns = self._columns()
        like: dict[str, list[tuple[int, ...]]] = {}
        for rows, name in self._rows:
            schema = rows.features.arrow_schema
            pair = len(columns) == 2 and is_text(schema.field(columns[0]).type)
            for column in [] if transforms(rows) else columns:
                kind = schema.field(column).type
                picture = len(columns) == 1 and type(rows.features[column]).__name__ == "Image"
                fits = is_text(kind) if pair else is_numbers(kind)
                if len(columns) == 1:
                    fits = is_text(kind) or is_numbers(leaf_of(kind))
                if not (fits or picture):
                    raise UserError(
                        f"Column {column!r} of {name} holds {kind}, and x has to be a column of "
                        "numbers, lists of numbers, texts or pictures, two columns of texts, or "
                        "several columns with one number per row each: convert it, for example by "
                        "cast_column."
                    )
                if not picture:
                    check_numbers(rows, column, name, like.setdefault(column, []))
        return {"rows": np.array([len(rows) for rows, _ in self._rows])}

    def _columns(self) -> list[str]:
        return self.x if isinstance(self.x, list) else [self.x]

    def _sides(self) -> tuple[Side, Side | None, Side | None]:
        self._rows: list[tuple[Any, str]] = []
        self.class_names = []
        self._form = ""  # of the training rows' y: names, whole numbers or fractions
        found = splits_of(self.data)
        if isinstance(self.data, str | Path):
            self._files = files_of_rows(Path(self.data).expanduser())
        self.tokens = tokenizer_of(self.tokenizer)
        sides: dict[str, Side | None] = {}
        for side, name in self.splits.items():
            if name is None:
                sides[side] = None
            elif isinstance(name, str) and name in found:
                sides[side] = self._side(found[name], name)
            else:
                sides[side] = self._side(self._other(side, name, list(found)), side)
        train = sides["train"]
        assert train is not None
        return train, sides["test"], sides["val"]

    def _other(self, side: str, given: Any, splits: list[str]) -> Any:
        """The rows of data that are given in place of a split's name."""
        if isinstance(given, str | Path):
            files = files_of_rows(Path(given).expanduser())
            if not files:
                raise UserError(
                    f"data.{side} is {str(given)!r}, and the data have the splits "
                    f"{', '.join(splits)}.{suggest(str(given), splits)} It may also be the path of "
                    "other data."
                )
            self._files += files
        found = splits_of(given, side)
        if len(found) > 1 and side not in found:
            raise UserError(
                f"data.{side} has the splits {', '.join(found)}: give data with one split, or "
                f"with a split {side!r}."
            )
        return found[side] if side in found else next(iter(found.values()))

    def _side(self, rows: Any, split: str) -> Side:
        name = f"the split {split!r}"
        clients = [] if self.client is None else [self.client]
        chosen = {"x": self._columns(), "y": [self.y], "client": clients}
        require(rows.column_names, name, chosen)
        self._rows.append((rows, name))
        if transforms(rows):
            self._check_label_kept(rows, name)
        table = table_of(rows, [self.y, *clients], split)
        targets = self._targets(table, getattr(rows.features[self.y], "names", None))
        groups = np.zeros(len(targets), np.int64)
        names = ["all"]
        if self.client is not None:
            places, found = codes(table.present(self.client).astype(str))
            order = ascending(found)
            names = [found[i] for i in order]
            groups = np.argsort(order)[places]
        return Side(names, groups, Rows(self, rows, targets, name))

    def _check_label_kept(self, rows: Any, name: str) -> None:
        """Refuse a transform that changes the labels: the split reads them without it."""
        for (i,) in some_of(len(rows)):
            made = rows[int(i)]
            stored = rows.with_format(None).select_columns([self.y])[int(i)][self.y]
            if self.y in made and not (np.asarray(made[self.y]) == np.asarray(stored)).all():
                raise UserError(
                    f"The transform of {name} (with_transform or set_transform) changes the column "
                    f"{self.y!r}: row {i} has {stored!r}, and the transform makes "
                    f"{made[self.y]!r} of it. The split and y follow the stored values, so change "
                    "the labels by map(…) before, which stores them."
                )

    def _targets(self, table: FileTable, named: list[str] | None) -> NDArray[Any]:
        """Return y: classes, or numbers as they are, of the training rows' kind.

        Args:
            named: the names of a ``ClassLabel``.
        """
        values = table.present(self.y)
        form = "fractions" if values.dtype.kind == "f" else "whole numbers"
        if self.classes is not None or self.y in table.texts():
            form = "names"
        self._form = self._form or form  # the training rows come first
        # The text 1 is the first class here, and the number 1 the second.
        if form != self._form:
            raise UserError(
                f"Column {self.y!r} has {self._form} in the training rows and {form} in "
                f"{str(table.path)!r}: cast it to one type in both (cast_column), or give "
                "data.classes."
            )
        if form == "names":
            if not self.class_names:
                self.class_names = self.classes or named or codes(values)[1]
            return coded(table, self.y, list(map(str, self.class_names)), "the classes")
        y = table.numbers([self.y], "mend the row, or leave it out")[:, 0]
        return y.astype(np.float32 if form == "fractions" else np.int64)

    def column_values(self, column: str) -> NDArray[Any]:
        """Return a column in the training rows, for ``ByValue``."""
        rows = splits_of(self.data)[str(self.splits["train"])]
        require(rows.column_names, "the training split", {"partition.column": [column]})
        table_of(rows, [column], "train").present(column)
        return np.asarray(column_stored(rows, column).to_numpy(zero_copy_only=False))
