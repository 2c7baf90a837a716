"""Rows of Hugging Face's library datasets, in memory and on disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.sources.file_data_module import missing_package
from fl_lightning.errors import UserError

SPLITS = ("train", "test", "validation", "valid", "val", "dev")
# A file belongs to the split with which its name begins: "test-0", "test.parquet", "test00".
OF_SPLIT = re.compile(rf"({'|'.join(SPLITS)})(?![A-Za-z])", re.IGNORECASE)

# Rows that are checked at a time.
PIECE = 10_000
ARROW = ".arrow"
PARQUET = (".parquet", ".pq")
# Files that save_to_disk writes besides the rows.
STATE = ("dataset_info.json", "dataset_dict.json", "state.json")


def transforms(rows: Any) -> bool:
    """Return whether a data set changes its rows when they are read."""
    return bool(getattr(rows, "format", {}).get("type") == "custom")


def plain(rows: Any) -> Any:
    """Return the rows as they are stored."""
    return rows.with_format(None) if hasattr(rows, "with_format") else rows


def row_of(rows: Any, i: int, name: str) -> dict[str, Any]:
    """Return a row.

    Raises:
        UserError: it cannot be read, or the data set's transform fails.
    """
    try:
        found: dict[str, Any] = rows[i]
        return found
    except Exception as error:  # the library, PIL and transforms raise many kinds of errors
        what = f"{type(error).__name__}: {str(error)[:120]}"
    if transforms(rows):
        row_of(plain(rows), i, name)
        raise UserError(
            f"The transform of {name} fails for row {i} ({what}), "
            "which can be read without it: mend the transform."
        )
    raise UserError(
        f"Row {i} of {name} cannot be read ({what}): mend the data, or leave the row out."
    )


def same(made: Any, stored: Any) -> bool:
    """Return whether a transform has kept a label."""
    if isinstance(stored, str):
        return bool(made == stored)
    try:
        return float(made) == float(stored)
    except (TypeError, ValueError):
        return False


def pieces_of(rows: Any, column: str) -> Iterator[tuple[int, Any]]:
    """Yield a column in parts, each with the number of its first row."""
    stored = rows.select_columns([column]).with_format("arrow")
    for first in range(0, len(rows), PIECE):
        for chunk in stored[first : first + PIECE].column(column).chunks:
            yield first, chunk
            first += len(chunk)


def column_of(rows: Any, column: str) -> Any:
    """Return a column of all rows as a pyarrow array; other columns are not read."""
    return rows.select_columns([column]).with_format("arrow")[:].column(column)


def distinct(values: Any) -> tuple[list[str], NDArray[np.int64]]:
    """Return the distinct values of a pyarrow column as texts, and the place of each row's
    value.
    """
    encoded = values.dictionary_encode().unify_dictionaries().combine_chunks()
    found = [str(value) for value in encoded.dictionary.to_pylist()]
    return found, np.asarray(encoded.indices.to_numpy(), np.int64)


def package() -> Any:
    try:
        import datasets
    except ImportError:
        raise missing_package("datasets", "huggingface") from None
    return datasets


def files_of_rows(path: Path) -> list[Path]:
    """Return the Parquet and Arrow files in a folder, or the file."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return [one for one in files if one.suffix.lower() in (ARROW, *PARQUET)]


def splits_of(data: Any, option: str = "data") -> dict[str, Any]:
    """The splits of a data set, by name.

    Raises:
        UserError: it is not a data set, or cannot be read.
    """
    datasets = package()
    if isinstance(data, str | Path):
        data = opened(Path(data).expanduser(), option)
    if isinstance(data, datasets.DatasetDict):
        return dict(data)
    if isinstance(data, datasets.Dataset):
        return {"train": data}
    if isinstance(data, dict):
        return data
    raise UserError(
        f"data.{option} is of type {type(data).__name__}: give a Dataset or DatasetDict of the "
        "library datasets, or the path of a folder or file."
    )


def opened(path: Path, option: str = "data") -> Any:
    """A folder of save_to_disk, or Parquet or Arrow files by split."""
    datasets = package()
    saved = path.is_dir() and any((path / name).exists() for name in STATE)
    files = [one for one in files_of_rows(path) if one.parent in (path, path.parent)]
    if not saved and not files:
        folders = sorted(one.name for one in path.iterdir() if one.is_dir())
        raise UserError(
            f"{str(path)!r} was not written by save_to_disk, and it has no Parquet or Arrow files; "
            f"its folders are {', '.join(folders)[:200] or 'none'}. Give a folder that "
            "save_to_disk wrote, or one that holds such files."
        )
    parts: dict[str, list[Path]] = {}
    for file in files:
        of = OF_SPLIT.match(file.name)
        split = of.group().lower() if of else "train"
        parts.setdefault(split, []).append(file)
    try:
        if saved:
            return datasets.load_from_disk(str(path))
        return {split: rows_of(datasets, own) for split, own in parts.items()}
    except UserError:
        raise
    except Exception as error:  # the library and pyarrow raise many kinds of errors
        cause = error.__cause__ or error
        raise UserError(
            f"data.{option} is {str(path)!r}, which cannot be read ({type(cause).__name__}: "
            f"{str(cause)[:160]}): copy it again."
        ) from None


def rows_of(datasets: Any, files: list[Path]) -> Any:
    """Return the rows of files; the library keeps those of Parquet files in its cache."""
    names = list(map(str, files))
    kinds = {file.suffix.lower() == ARROW for file in files}
    if kinds == {True}:
        return datasets.concatenate_datasets([datasets.Dataset.from_file(one) for one in names])
    if kinds == {False}:
        return datasets.Dataset.from_parquet(names)
    raise UserError(
        f"{str(files[0].parent)!r} has Parquet and Arrow files of one split: keep one kind, or "
        "begin their names with their splits (train-, test-)."
    )
