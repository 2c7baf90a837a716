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

from fl_lightning.accepted import NonNegativeInt, PositiveInt
from fl_lightning.datamodules.batches.sample_labels import some_of
from fl_lightning.datamodules.formats.arrow_columns import (
    check_numbers,
    is_list,
    is_numbers,
    is_text,
    leaf_of,
)
from fl_lightning.datamodules.formats.file_index import Arrays, indexed
from fl_lightning.datamodules.formats.pictures import Mode, Pictures, check_normalised, size_of
from fl_lightning.datamodules.formats.stored_rows import (
    column_of,
    distinct,
    files_of_rows,
    pieces_of,
    plain,
    row_of,
    same,
    splits_of,
    transforms,
)
from fl_lightning.datamodules.formats.tables import refuse_answers, refuse_blanks, refuse_twice
from fl_lightning.datamodules.formats.tokens import padded, tokenizer_of
from fl_lightning.datamodules.partitions.partition import Partition, own_or_grouped
from fl_lightning.datamodules.sources.file_data_module import FileDataModule, Side, ascending
from fl_lightning.errors import UserError, suggest


class Rows(Dataset[Any]):
    """Rows as ``(x, y)``, each read on request."""

    def __init__(self, data: FromHuggingFace, rows: Any, targets: NDArray[Any], name: str) -> None:
        columns = data._columns()
        # A transform of the data set gets all columns, as it does without this reader.
        self.rows = rows if transforms(rows) else plain(rows).select_columns(columns)
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
        row = row_of(self.rows, int(i), self.name)
        for column in self.columns:
            if column not in row:
                raise UserError(
                    f"The transform of {self.name} makes no column {column!r} of row {i}; it makes "
                    f"{', '.join(row)[:200]}. Give one of them as data.x, or mend the transform."
                )
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
        """Return the numbers of a row; other values are an error."""
        found = np.asarray(values)
        if found.dtype.kind not in "iubf" or not np.isfinite(found).all():
            raise UserError(
                f"Row {i} of {self.name} has {str(values)[:80]!r} in {', '.join(self.columns)}, "
                "which is neither finite numbers nor a text nor a picture: mend the row, or leave "
                "it "
                "out."
            )
        return values


class FromHuggingFace(FileDataModule):
    """Federated data from a data set of the library ``datasets``, in memory or on disk.

    Args:
        data: a ``Dataset`` or ``DatasetDict``, a folder of ``save_to_disk``, or a file or folder
            of Parquet or Arrow files, whose names begin with their split (``train-….parquet``,
            ``test.parquet``); files of other names are of the split ``train``.
        x: a column of pictures, numbers, sequences of numbers or texts; or several columns of
            numbers, which are joined.
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
        image_size: int | list[int] | None = None,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        length: PositiveInt = 128,
        tokenizer: str | None = None,
        num_workers: NonNegativeInt = 0,
        partition: Partition | None = None,
        num_clients: int | None = None,
        **arguments: Any,
    ) -> None:
        if client is not None and partition is not None:
            raise UserError(
                f"data.client={client!r} names the client of each row, but data.partition splits "
                "the rows again: give one of the two."
            )
        super().__init__(
            num_workers=num_workers,
            partition=own_or_grouped(partition, client, arguments),
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
        self.x = list(x) if isinstance(x, tuple) else x
        refuse_answers(self._columns(), {"y": y, "client": client}, "data.x")
        refuse_twice("data.x", self._columns())
        if not self._columns():
            raise UserError("data.x is empty: give a column, or several.")
        self.y = y
        self.client = client
        self.splits = {"train": train, "test": test, "val": val}
        self.classes = None if classes is None else list(classes)
        self.pictures = Pictures(size_of(image_size), mode, tuple(mean), tuple(std))
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
        """Read the columns x of numbers and texts once, and refuse rows that do not fit."""
        like: dict[str, list[int]] = {}
        for rows, name in self._rows:
            for column in [] if transforms(rows) else self._columns():
                kind = leaf_of(rows.features.arrow_schema.field(column).type)
                if is_numbers(kind) or is_text(kind):
                    first = like.setdefault(column, [])
                    check_numbers(pieces_of(rows, column), column, name, first)
        return {"rows": np.array([len(rows) for rows, _ in self._rows])}

    def _columns(self) -> list[str]:
        return self.x if isinstance(self.x, list) else [self.x]

    def _sides(self) -> tuple[Side, Side | None, Side | None]:
        self._rows: list[tuple[Any, str]] = []
        self._form = ""
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
        for column in [*self._columns(), self.y, *([self.client] if self.client else [])]:
            if column not in rows.column_names:
                raise UserError(
                    f"There is no column {column!r} in {name}; it has "
                    f"{', '.join(rows.column_names)[:300]}.{suggest(column, rows.column_names)}"
                )
        self._rows.append((rows, name))
        if transforms(rows):
            self._check_label_kept(rows, name)
        else:
            self._check_kinds(rows, name)
        targets = self._targets(rows, name)
        groups = np.zeros(len(targets), np.int64)
        names = ["all"]
        if self.client is not None:
            found, codes = self._clients(rows, self.client, name)
            refuse_blanks(found, f"Column {self.client!r} of {name}")
            order = ascending(found)
            names = [found[i] for i in order]
            places = np.empty(len(found), np.int64)
            places[order] = np.arange(len(found))
            groups = places[codes]
        return Side(names, groups, Rows(self, rows, targets, name))

    def _clients(self, rows: Any, column: str, name: str) -> tuple[list[str], NDArray[np.int64]]:
        """Return the clients' names, and the place of each row's; numbers of names are these
        names, because another split may number them in another order.
        """
        found, codes = distinct(self._present(rows, column, name))
        own = getattr(rows.features[column], "names", None)
        if own:
            numbers = np.array([int(one) for one in found], np.int64)
            self._check_known(numbers[codes], column, name)
            found = [str(own[number]) for number in numbers]
        return found, codes

    def _check_kinds(self, rows: Any, name: str) -> None:
        """Refuse columns x that hold neither numbers nor texts nor pictures."""
        several = len(self._columns()) > 1
        for column in self._columns():
            kind = rows.features.arrow_schema.field(column).type
            if several and (is_list(kind) or not is_numbers(kind)):
                raise UserError(
                    f"data.x names {len(self._columns())} columns, which are joined and each need "
                    f"one number per row, but the column {column!r} of {name} holds {kind}: "
                    "leave it out, or give it as the only column."
                )
            picture = type(rows.features[column]).__name__ == "Image"
            if not is_numbers(leaf_of(kind)) and not is_text(kind) and not picture:
                raise UserError(
                    f"Column {column!r} of {name} holds {kind}, and x has to be numbers, texts or "
                    "pictures: convert it, for example by cast_column."
                )

    def _check_label_kept(self, rows: Any, name: str) -> None:
        """Refuse a transform that changes the labels: the split reads them without it."""
        for (i,) in some_of(len(rows)):
            made = row_of(rows, int(i), name)
            stored = plain(rows).select_columns([self.y])[int(i)][self.y]
            if self.y in made and not same(made[self.y], stored):
                raise UserError(
                    f"The transform of {name} (with_transform or set_transform) changes the column "
                    f"{self.y!r}: row {i} has {stored!r}, and the transform makes "
                    f"{made[self.y]!r} of it. The split and y follow the stored values, so change "
                    "the labels by map(…) before, which stores them."
                )

    def _present(self, rows: Any, column: str, name: str) -> Any:
        """Return a column of pyarrow; a missing value is an error."""
        import pyarrow
        import pyarrow.compute as compute

        values = column_of(rows, column)
        if pyarrow.types.is_nested(values.type) or pyarrow.types.is_decimal(values.type):
            raise UserError(
                f"Column {column!r} of {name} holds {values.type}: one whole number, float or text "
                "per row is needed, to which cast_column converts it."
            )
        fractions = pyarrow.types.is_floating(values.type)
        missing = compute.is_null(values, nan_is_null=fractions)
        row = compute.index(missing, True).as_py()
        if row >= 0:
            raise UserError(
                f"Column {column!r} of {name} has no value in row {row}: fill it in, or leave "
                "the row out."
            )
        return values

    def _targets(self, rows: Any, name: str) -> NDArray[Any]:
        """Return the labels, or the numbers to predict."""
        import pyarrow

        values = self._present(rows, self.y, name)
        own = getattr(rows.features[self.y], "names", None)
        whole = pyarrow.types.is_integer(values.type)
        fractions = pyarrow.types.is_floating(values.type)
        numbers = (whole or fractions) and self.classes is None
        if self.classes is None:
            forms = {"labels with names": own, "whole numbers": whole, "fractions": fractions}
            self._check_same_form(next((one for one in forms if forms[one]), "texts"), name)
        if own:
            codes = np.asarray(values.to_numpy(), np.int64)
            self._check_known(codes, self.y, name)
            if self.classes is None:
                self._take_names(list(own), name)
                return codes
            texts = list(map(str, own))
        elif numbers:
            if fractions:
                check_numbers([(0, values.combine_chunks())], self.y, name, [])
                return np.asarray(values.to_numpy(), np.float32)
            codes = np.asarray(values.to_numpy())
            if int(codes.max(initial=0)) > np.iinfo(np.int64).max:
                raise UserError(
                    f"Column {self.y!r} of {name} has the number {codes.max()}, which is beyond 64 "
                    "bits with a sign: number the classes from 0."
                )
            return codes.astype(np.int64)
        else:
            texts, codes = distinct(values)
        refuse_blanks(sorted(texts), f"Column {self.y!r} of {name}")
        if not self.class_names:
            self.class_names = self.classes or sorted(texts)
        places = {one: place for place, one in enumerate(map(str, self.class_names))}
        of = np.array([places.get(text, -1) for text in texts], np.int64)
        unknown = np.flatnonzero(of[codes] < 0)
        if len(unknown):
            row = int(unknown[0])
            raise UserError(
                f"Column {self.y!r} of {name} has {texts[codes[row]]!r} in row {row}, which is not "
                f"one of the classes {', '.join(places)[:200]}: leave the row out, or give "
                "data.classes."
            )
        return of[codes]

    def _check_same_form(self, form: str, name: str) -> None:
        """Refuse another form than the training rows have: one text 1 is class 0."""
        self._form = self._form or form
        if self._form != form:
            raise UserError(
                f"Column {self.y!r} has {self._form} in the training rows and {form} in {name}: "
                "cast it to one type in both (cast_column), or give data.classes."
            )

    def _check_known(self, codes: NDArray[np.int64], column: str, name: str) -> None:
        """Refuse −1, which the library writes if a label is not known."""
        unknown = np.flatnonzero(codes < 0)
        if len(unknown):
            raise UserError(
                f"Column {column!r} of {name} has the label {codes[unknown[0]]} in row "
                f"{unknown[0]}, which the library datasets gives to rows without a label "
                f"({len(unknown)} rows): leave these rows out, or give another split."
            )

    def _take_names(self, own: list[str], name: str) -> None:
        """Keep the names of the classes; they have to equal those of the training rows."""
        if self.class_names and list(self.class_names) != own:
            raise UserError(
                f"The classes of {name} are {', '.join(own)[:200]}, and those of the training rows "
                f"{', '.join(self.class_names)[:200]}: give data.classes, by which all are "
                "numbered."
            )
        self.class_names = own

    def column_values(self, column: str) -> NDArray[np.float64]:
        """Return a column's numbers in the training rows, for ``ByValue``."""
        rows = splits_of(self.data)[str(self.splits["train"])]
        if column not in rows.column_names:
            raise UserError(
                f"There is no column {column!r}; there are {', '.join(rows.column_names)[:300]}."
                + suggest(column, rows.column_names)
            )
        values = self._present(rows, column, "the training rows").to_numpy()
        try:
            return np.asarray(values, np.float64)
        except (TypeError, ValueError):
            raise UserError(
                f"Column {column!r} of the training rows has {str(values[0])[:60]!r}, which is not "
                "a number: give another data.partition.column."
            ) from None
