"""Tables from CSV, Parquet and frames, as frames of pandas with Arrow's types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.errors import CellError, UserError, optional, suggest

TO_NUMBERS = (
    "convert the column to numbers, give data.encode (one-hot or codes) if it holds names, or "
    "leave it out of data.features"
)
TARGET_TO_NUMBERS = (
    "but the target is a number (data.regression, data.above, or numbers with fractions in the "
    "training data): make it a number, or leave the row out"
)
_FILL_GAPS = (
    "fill the gaps in, leave these rows out (FromTable does with data.missing=drop), or take other "
    "columns"
)
# Names that pandas and R give to the column of row numbers: in a CSV, in a CSV read again, and in
# Parquet.
ROW_INDEX = re.compile(r"\s*|Unnamed: \d+|__index_level_\d+__")
_SHOWN = 10  # columns in an error
LARGEST = np.finfo(np.float32).max
# pandas cannot switch quotes off with this engine, so it gets a character that no text begins with.
NO_QUOTES = "\x1f"


@dataclass(frozen=True)
class FileTable:
    """Columns of a file, or of several.

    Args:
        path: the file, or all files' names.
        frame: a frame of pandas; its index holds the file and the number of each row in it. In a
            CSV the line of names is row 1.
    """

    path: Path
    frame: Any

    @property
    def where(self) -> str:
        return f"The table {str(self.path)!r}"

    @property
    def columns(self) -> list[str]:
        return list(self.frame.columns)

    def texts(self) -> set[str]:
        """Return the columns that hold texts, and not numbers, truth values or dates."""
        import pandas

        dtypes = self.frame.dtypes.items()
        return {name for name, dtype in dtypes if pandas.api.types.is_string_dtype(dtype)}

    def has(self, column: str, row: int) -> str:
        """Return the beginning of an error about a row's value in a column."""
        (file, _) = self.frame.index[row]
        return f"The table {file!r} has {self._cell(column, row, file)}"

    def _cell(self, column: str, row: int, named: str) -> str:
        """Return a cell in words, with its file if that is not the file ``named``."""
        value = self.frame[column].iloc[row]
        said = "no value" if self.frame[column].isna().iloc[row] else repr(value)[:200]
        (file, number) = self.frame.index[row]
        of = "" if file == named else f" of {file!r}"
        return f"{said} in column {column!r} of row {number}{of}"

    def wrong(self, faults: Sequence[tuple[str, int, str]], remedy: str) -> CellError:
        """Return an error about cells: the column and the row of each, and what is wrong."""
        (file, _) = self.frame.index[faults[0][1]]
        said = [self._cell(column, row, file) + what for column, row, what in faults[:_SHOWN]]
        said += [f"{len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
        # In a file without a first line of names, the name of a column is a cell: so the place has
        # its number.
        places = [
            f"column {self.columns.index(column) + 1}, row {self.frame.index[row][1]}"
            for column, row, _ in faults
        ]
        return CellError(f"The table {file!r} has {'; '.join(said)}: {remedy}.", "; ".join(places))

    def check(self, used: Sequence[str], numbers: Sequence[str], remedy: str = TO_NUMBERS) -> None:
        """Refuse columns that are wrong, by one error that names them all.

        Args:
            used: columns that need a value in each row.
            numbers: those of them that have to hold numbers within the range of float32.
            remedy: what to do if a value is not a number.
        """
        faults = []
        remedies = []
        for name in dict.fromkeys(used):
            gone = self.frame[name].isna().to_numpy(bool)
            if name in numbers:
                odd = ~gone & ~(np.abs(as_numbers(self.frame[name])) <= LARGEST)
                what = ", which is not a finite number in single precision"
                faults += [(name, int(odd.argmax()), what)] if odd.any() else []
                remedies += [remedy] if odd.any() else []
            if gone.any():
                faults.append((name, int(gone.argmax()), f" ({gone.sum()} of {len(gone)} rows)"))
                remedies.append(_FILL_GAPS)
        if faults:
            raise self.wrong(faults, "; ".join(dict.fromkeys(remedies)))

    def present(self, name: str) -> Any:
        """Return a column's values, none of which may be missing."""
        self.check([name], ())
        return self.frame[name]

    def numbers(self, names: Sequence[str], remedy: str = TO_NUMBERS) -> NDArray[np.float64]:
        """Return columns of numbers as ``(N, k)``, each within the range of float32.

        Args:
            remedy: what to do if a value is not a number.
        """
        self.check(names, names, remedy)
        return np.stack([as_numbers(self.frame[name]) for name in names], axis=1)

    def target_numbers(self, name: str) -> NDArray[np.float64]:
        """Return the target's column ``(N,)``."""
        found: NDArray[np.float64] = self.numbers([name], TARGET_TO_NUMBERS)[:, 0]
        return found


def as_numbers(values: Any) -> NDArray[np.float64]:
    """Return a column ``(N,)``; NaN if a value is not a number."""
    import pandas

    types = pandas.api.types
    if types.is_string_dtype(values.dtype):
        values = pandas.to_numeric(values, errors="coerce")
    elif not types.is_numeric_dtype(values.dtype) and not types.is_bool_dtype(values.dtype):
        return np.full(len(values), np.nan)
    return np.asarray(values.to_numpy(np.float64, na_value=np.nan))


def all_but(path: Path, columns: Iterable[str], others: Sequence[str]) -> list[str]:
    """Return the columns except ``others``, in the file's order.

    Raises:
        UserError: one of the columns is a row index, which has no information about a sample.
    """
    features = [name for name in columns if name not in others]
    for name in features:
        if ROW_INDEX.fullmatch(name):
            raise UserError(
                f"The table {str(path)!r} has a column {name!r}, which is what pandas calls the "
                "row index, and data.features is not given, so the model would learn from the "
                "row's number: write the file with index=False (df.to_csv(path, index=False)), or "
                "name the columns to learn from by data.features."
            )
    return features


def refuse_twice(option: str, names: Sequence[str | int]) -> None:
    """Refuse a list that names something twice."""
    twice = [name for name in names if list(names).count(name) > 1]
    if twice:
        raise UserError(f"{option} names {twice[0]!r} twice: name each once.")


def give_one(options: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other."""
    given = [f"data.{name}={value!r}" for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} contradict each other: give one of them.")


def refuse_answers(
    features: Sequence[str], others: Mapping[str, str | None], chosen: str = "data.features"
) -> None:
    """Refuse to use the target, or the client's column, as an input."""
    for option, other in others.items():
        if other in features:
            raise UserError(
                f"{chosen} has {other!r}, which is data.{option}={other!r}: the model would learn "
                f"from it. Leave it out of {chosen}, or give another data.{option}."
            )


def require(columns: Sequence[str], where: str, chosen: Mapping[str, Iterable[str]]) -> None:
    """Refuse names of columns that the data lack.

    Args:
        where: the name of the data in an error.
        chosen: the columns of each option.
    """
    for option, names in chosen.items():
        for name in names:
            if name not in columns:
                raise UserError(
                    f"data.{option}={name!r}: {where} has no column {name!r}; it has "
                    f"{', '.join(columns)[:300]}.{suggest(name, columns)}"
                )


def places_of(values: Any, names: Sequence[str]) -> NDArray[np.int64]:
    """Return each value's place among names ``(N,)``, by number in a column of them; -1: none."""
    import pandas

    known = pandas.Series(names, dtype=str)
    if pandas.api.types.is_numeric_dtype(values.dtype):
        known = pandas.to_numeric(known, errors="coerce")
    else:
        values = values.astype(str)
    places = {name: place for place, name in enumerate(known.to_list())}
    return np.array([places.get(value, -1) for value in values.to_list()], np.int64)


def codes(values: Any) -> tuple[NDArray[np.int64], list[str]]:
    """Return each value's place among the distinct ones ``(N,)``, and these as text, ascending."""
    import pandas

    places, found = pandas.factorize(values, sort=True)
    return np.asarray(places, np.int64), [str(name) for name in found]


def coded(table: FileTable, target: str, classes: Sequence[str] | None, of: str) -> NDArray[Any]:
    """Return y of a table by the classes that ``of`` gives; None: y are numbers.

    Raises:
        UserError: a value is not among the accepted ones.
    """
    if classes is None:
        return table.target_numbers(target).astype(np.float32)
    found = places_of(table.present(target), classes)
    unknown = np.flatnonzero(found < 0)
    if len(unknown):
        fault = (target, int(unknown[0]), f", which is not in {of}")
        raise table.wrong([fault], ", ".join(classes)[:300])
    return found


def separator_of(path: Path) -> str:
    """Return a tab for ``.tsv`` and ``.tsv.gz``, else a comma."""
    return "\t" if path.name.lower().endswith((".tsv", ".tsv.gz")) else ","


def read_table(
    given: Path | Any,
    separator: str | None = None,
    quotes: bool | None = None,
    names: Sequence[str] | None = None,
    marks: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> FileTable:
    """Read a whole table, from a file or a frame.

    Args:
        separator: between a CSV's columns; None: by the file's name.
        quotes: whether a cell may be in quotes; None: unless a tab is the separator.
        names: the columns' names, for a CSV without a first line of names.
        marks: texts and numbers that mark a missing value.
        texts: columns of a CSV that hold texts, even if all of them look like numbers.

    Raises:
        UserError: it cannot be read, or has no rows.
    """
    pandas = optional("pandas", "tables", "A table")
    pyarrow = optional("pyarrow", "tables", "A table")
    path = given if isinstance(given, Path) else Path(f"<{type(given).__name__}>")
    separator = separator_of(path) if separator is None else separator
    quotes = separator != "\t" if quotes is None else quotes
    first = 1
    if isinstance(given, Path) and not given.exists():
        raise UserError(
            f"The table {str(path)!r} is not there (the present folder is {str(Path.cwd())!r})."
        )
    with refused(
        f"The table {str(path)!r} cannot be read",
        "A CSV is text in UTF-8, whose first line names the columns, each by another name (or give "
        "data.columns). Each row needs a cell for each column (data.separator is "
        f"{separator!r}), and each quote has to be closed (data.quotes is {str(quotes).lower()}).",
    ):
        if not isinstance(given, Path):
            if hasattr(given, "to_arrow"):
                read = given.to_arrow()
            else:
                read = pyarrow.Table.from_pandas(given, preserve_index=False)
            frame = read.to_pandas(types_mapper=pandas.ArrowDtype)
        elif path.suffix.lower() in (".parquet", ".pq"):
            frame = pandas.read_parquet(path, dtype_backend="pyarrow")
        else:
            first = 1 if names is not None else 2
            frame = _read_csv(path, separator, quotes, names, marks, texts)
        if not frame.columns.is_unique:
            raise ValueError("two columns have one name")
        numbers = pandas.to_numeric(pandas.Series(marks, dtype=object), errors="coerce").dropna()
        for name in frame:
            frame[name] = _plain(frame[name], marks, numbers)
    if not len(frame):
        raise UserError(f"The table {str(path)!r} has no rows: give at least one.")
    rows = range(first, first + len(frame))
    frame.index = pandas.MultiIndex.from_product([[str(path)], rows])
    return FileTable(path, frame)


def _read_csv(
    path: Path,
    separator: str,
    quotes: bool,
    names: Sequence[str] | None,
    marks: Sequence[str],
    texts: Sequence[str],
) -> Any:
    """Return the frame of a CSV.

    Raises:
        ValueError: with the row, if one is wrong.
    """
    import pandas
    import pyarrow
    from pyarrow import csv

    try:
        return pandas.read_csv(
            path,
            sep=separator,
            quotechar='"' if quotes else NO_QUOTES,
            names=names,
            na_values=list(marks),
            dtype=dict.fromkeys(texts, pandas.ArrowDtype(pyarrow.string())),
            engine="pyarrow",
            dtype_backend="pyarrow",
        )
    except pandas.errors.ParserError:
        # The threads that read do not know the row, and one thread does.
        csv.read_csv(
            path,
            csv.ReadOptions(use_threads=False),
            csv.ParseOptions(
                delimiter=separator, quote_char='"' if quotes else False, newlines_in_values=True
            ),
        )
        raise


def _plain(values: Any, marks: Sequence[str], numbers: Any) -> Any:
    """Return a column with missing values in place of ``marks`` and NaN.

    Categories become their values and decimals float64. Texts lose the blanks around them, and get
    each accented letter as one character: macOS writes é as two.
    """
    import pandas
    import pyarrow

    kind = values.dtype.pyarrow_dtype
    if pyarrow.types.is_binary(kind):
        raise ValueError(f"column {values.name!r} is not text in UTF-8")
    if pyarrow.types.is_dictionary(kind):
        values = values.astype(pandas.ArrowDtype(kind.value_type))
    if pyarrow.types.is_decimal(kind):
        values = values.astype(pandas.ArrowDtype(pyarrow.float64()))
    if pandas.api.types.is_string_dtype(values.dtype):
        values = values.str.strip().str.normalize("NFC")
        return values.mask(values.isin([*marks, ""]))
    if pandas.api.types.is_numeric_dtype(values.dtype):
        return values.mask(np.isnan(as_numbers(values)) | values.isin(numbers))
    return values
