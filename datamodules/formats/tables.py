"""Tables from CSV, Parquet and frames, as frames of pandas with Arrow's types; errors name the
line.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.partitions.client_names import trimmed
from fl_lightning.errors import CellError, UserError, suggest

TO_NUMBERS = (
    "convert the column to numbers, give data.encode (one-hot or codes) if it holds names, or "
    "leave it out of data.features"
)
TARGET_TO_NUMBERS = (
    "but the target is a number (data.regression, data.above, or numbers with fractions in the "
    "training data): make it a number, or leave the row out"
)
# Names that pandas and R give to the column of row numbers: in a CSV, in a CSV read again, and in
# Parquet.
ROW_INDEX = re.compile(r"\s*|Unnamed: \d+|__index_level_\d+__")


@dataclass(frozen=True)
class FileTable:
    """Columns of a file, or of several.

    Args:
        path: the file, or the first of them.
        frame: a frame of pandas; its index holds the file and the number of each row in it.
        separator: between a CSV's columns.
    """

    path: Path
    frame: Any
    separator: str = ","

    @property
    def where(self) -> str:
        """Return a name of the table for an error or a note about many rows."""
        files = self.frame.index.unique(0)
        if len(files) <= 1:
            return f"The table {str(self.path)!r}"
        return f"The tables {', '.join(map(repr, files))[:300]}"

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
        value = self.frame[column].iloc[row]
        said = "no value" if self.frame[column].isna().iloc[row] else repr(value)[:200]
        file, _ = self.frame.index[row]
        return f"The table {file!r} has {said} in column {column!r} of line {self.line(row)}"

    def line(self, row: int) -> int:
        """Return the line in which a row begins: in a CSV a row may have several lines."""
        file, number = self.frame.index[row]
        path = Path(file)
        if not path.is_file() or is_parquet(path):
            return int(number)
        with text_of(path) as text:
            reader = csv.reader(text, delimiter=self.separator)
            end = 0
            for record in reader:
                if record and number == 0:
                    return end + 1
                number -= bool(record)
                end = reader.line_num
        return end

    def wrong(self, column: str, row: int, what: str) -> CellError:
        """Return an error about a row's value in a column."""
        # In a file without a first line of names, the name of a column is a cell: so the place has
        # its number.
        place = f"column {self.columns.index(column) + 1}, line {self.line(row)}"
        return CellError(f"{self.has(column, row)}{what}", place)

    def present(self, name: str, option: str = "") -> Any:
        """Return a column's values, none of which may be missing; ``option``: text about
        another remedy.
        """
        import pyarrow

        values = self.frame[name]
        if pyarrow.types.is_nested(values.dtype.pyarrow_dtype):
            raise self.wrong(
                name,
                0,
                ", but a table needs one number or name in each cell: make a column of each "
                "part, or choose another column.",
            )
        gone = np.flatnonzero(values.isna())
        if len(gone):
            raise self.wrong(
                name,
                int(gone[0]),
                f" ({len(gone)} of {len(values)} rows): fill them in, or leave these rows out"
                f"{option}.",
            )
        return values

    def numbers(self, names: Sequence[str], remedy: str = TO_NUMBERS) -> NDArray[np.float64]:
        """Return columns of numbers as ``(N, k)``, each within the range of float32.

        Args:
            remedy: what to do if a value is not a number.
        """
        columns = []
        for name in names:
            values = self.present(name, ", or leave the column out of data.features")
            x = as_numbers(values)
            not_a_number = np.flatnonzero(np.isnan(x))
            if len(not_a_number):
                row = int(not_a_number[0])
                raise self.wrong(name, row, f", which is not a number: {remedy}.")
            beyond = np.flatnonzero(np.abs(x) > np.finfo(np.float32).max)
            if len(beyond):
                what = ", which is not a finite number in single precision."
                raise self.wrong(name, int(beyond[0]), what)
            columns.append(x)
        return np.stack(columns, axis=1)

    def target_numbers(self, name: str) -> NDArray[np.float64]:
        """Return the target's column ``(N,)``."""
        self.present(name)
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
    features = []
    for place, name in enumerate(columns, 1):
        if name in others:
            continue
        if ROW_INDEX.fullmatch(name):
            raise UserError(
                f"The table {str(path)!r} has a column {name!r} (its column {place}), which is "
                "what pandas calls the row index, and data.features is not given, so the model "
                "would learn from the row's number: write the file with index=False "
                "(df.to_csv(path, index=False)), or name the columns to learn from by "
                "data.features."
            )
        features.append(name)
    return features


def refuse_twice(option: str, names: Sequence[str | int]) -> None:
    """Refuse a list that names something twice."""
    twice = [name for name in names if list(names).count(name) > 1]
    if twice:
        raise UserError(f"{option} names {twice[0]!r} twice: name each once.")


def refuse_answers(
    features: Iterable[str], others: dict[str, str | None], chosen: str = "data.features"
) -> None:
    """Refuse to use the target, or the client's column, as an input."""
    for name in map(str, features):
        for option, other in others.items():
            if name == other:
                raise UserError(
                    f"{chosen} has {name!r}, which is data.{option}={other!r}: the model "
                    f"would learn from it. Leave it out of {chosen}, or give another "
                    f"data.{option}."
                )


def require(table: FileTable, chosen: dict[str, Iterable[str]]) -> None:
    """Refuse names of columns that the table lacks; ``chosen`` has the columns of each option."""
    columns = table.columns
    for option, names in chosen.items():
        for name in names:
            if name not in columns:
                raise UserError(
                    f"data.{option}={name!r}: the table {str(table.path)!r} has no column "
                    f"{name!r}; it has {', '.join(columns)[:300]}.{suggest(name, columns)}"
                )


def places_of(values: Any, names: Sequence[str]) -> NDArray[np.int64]:
    """Return the place of each value among names ``(N,)``: by number in a column of numbers, else
    by text; -1: it is not among them.
    """
    import pandas

    known = pandas.Series(names, dtype=str)
    if pandas.api.types.is_numeric_dtype(values.dtype):
        known = pandas.to_numeric(known, errors="coerce")
    else:
        values = values.astype(str)
    places = {name: place for place, name in enumerate(known.to_list())}
    return np.array([places.get(value, -1) for value in values.to_list()], np.int64)


def codes(values: Any) -> tuple[NDArray[np.int64], list[str]]:
    """Return each value's place among the distinct values ``(N,)``, and these as text, ascending:
    numbers by size, texts by letter.
    """
    import pandas

    places, found = pandas.factorize(values, sort=True)
    return np.asarray(places, np.int64), [str(name) for name in found]


def labels(table: FileTable, target: str) -> tuple[NDArray[Any], list[str] | None]:
    """Return y ``(N,)``, and the classes' names.

    If the target is a number with fractions, there are no classes: the second is None.
    """
    values = table.present(target)
    if target not in table.texts() and (np.nan_to_num(as_numbers(values)) % 1).any():
        return table.target_numbers(target).astype(np.float32), None
    return codes(values)


def coded(
    table: FileTable,
    target: str,
    classes: Sequence[str] | None,
    of: str = "the training data",
) -> NDArray[Any]:
    """Return y of a table by the classes of another table, or by given classes.

    Raises:
        UserError: a value is not among the accepted ones.
    """
    if classes is None:
        return table.target_numbers(target).astype(np.float32)
    found = places_of(table.present(target), classes)
    unknown = np.flatnonzero(found < 0)
    if len(unknown):
        what = f", which is not in {of}: {', '.join(classes)[:300]}."
        raise table.wrong(target, int(unknown[0]), what)
    return found


def read_table(
    given: Path | Any,
    separator: str,
    names: Sequence[str] | None = None,
    marks: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> FileTable:
    """Read a whole table, from a file or a frame.

    Args:
        names: the columns' names, for a CSV without a first line of names.
        marks: texts and numbers that mark a missing value.
        texts: columns of a CSV that hold texts, even if all of them look like numbers.

    Raises:
        UserError: it does not exist, has no rows, or has rows of different lengths.
    """
    _check_installed()
    path = given if isinstance(given, Path) else Path(f"<{type(given).__name__}>")
    first = 1  # row numbers of Parquet and frames; in a CSV the names are row 0
    with reading(path):
        if not isinstance(given, Path):
            read = _of_frame(given)
        elif is_parquet(path):
            import pyarrow.parquet

            read = pyarrow.parquet.ParquetFile(path).read()
        else:
            first = int(names is None)
            read = _of_csv(path, separator, names, marks, texts)
        refuse_two_of_a_name(path, read.column_names)
        frame = _in_pandas(path, read, marks)
    if not len(frame):
        raise UserError(f"The table {str(path)!r} has no rows: give at least one.")
    import pandas

    frame.index = range(first, first + len(frame))
    return FileTable(path, pandas.concat({str(path): frame}), separator)


def _check_installed() -> None:
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"Tables are read by pandas and pyarrow, of which one is not installed ({error}): pip "
            "install 'fl-lightning[tables]'."
        ) from None


def _of_csv(
    path: Path,
    separator: str,
    names: Sequence[str] | None,
    marks: Sequence[str],
    texts: Sequence[str],
) -> Any:
    """Return a CSV as Arrow's table, which tells numbers, truth values, dates and texts apart."""
    import pyarrow
    from pyarrow import csv as arrow

    if is_zipfile(path):
        raise UserError(
            f"The table {str(path)!r} is a zip archive, as Excel's .xlsx is: unpack it, or save "
            "the sheet as CSV."
        )
    # pandas' marks of a missing value, of which Arrow lacks two.
    missing = [*arrow.ConvertOptions().null_values, "<NA>", "None", *marks]
    options = {
        # Several threads would lose the number of a row that cannot be read.
        "read_options": arrow.ReadOptions(column_names=names, use_threads=False),
        "parse_options": arrow.ParseOptions(delimiter=separator, newlines_in_values=True),
        "convert_options": arrow.ConvertOptions(
            null_values=missing,
            strings_can_be_null=True,
            column_types=dict.fromkeys(texts, pyarrow.string()),
        ),
    }
    try:
        read = arrow.read_csv(path, **options)
    except pyarrow.ArrowInvalid as error:
        raise UserError(
            f"The table {str(path)!r} cannot be read: {' '.join(str(error).split())[:200]}. Its "
            "first line has to name the columns (or give data.columns), each row needs a cell for "
            f"each of them (data.separator is {separator!r}), and each quote has to be closed."
        ) from None
    for field in read.schema:
        if pyarrow.types.is_binary(field.type):
            raise UserError(
                f"The table {str(path)!r} is not in UTF-8 in column {field.name!r}: save it as "
                "UTF-8."
            )
    return read


def _of_frame(given: Any) -> Any:
    """Return a frame of pandas or polars as Arrow's table."""
    if hasattr(given, "to_arrow"):
        return given.to_arrow()
    import pyarrow

    refuse_two_of_a_name(Path(f"<{type(given).__name__}>"), list(map(str, given.columns)))
    return pyarrow.Table.from_pandas(given, preserve_index=False)


def _in_pandas(path: Path, read: Any, marks: Sequence[str]) -> Any:
    """Return Arrow's table as a frame with missing values in place of ``marks``."""
    import pandas

    columns = [_simple(column) for column in read.columns]
    plain = read.from_arrays(columns, names=read.column_names)
    frame = plain.to_pandas(types_mapper=pandas.ArrowDtype)
    numbers = pandas.to_numeric(pandas.Series(marks, dtype=object), errors="coerce").dropna()
    for name, values in frame.items():
        if pandas.api.types.is_string_dtype(values.dtype):
            frame[name] = values.mask(values.isin([*marks, ""]))
        elif pandas.api.types.is_numeric_dtype(values.dtype):
            frame[name] = values.mask(values.isin(numbers))
    return frame


def _simple(column: Any) -> Any:
    """Return a column of Arrow: categories as their values, decimals as float64, NaN as missing,
    and texts without blanks around them, each accented letter as one character: macOS writes é as
    two.
    """
    import pyarrow
    from pyarrow import compute, types

    kind = column.type
    if types.is_dictionary(kind):
        return _simple(column.cast(kind.value_type))
    if types.is_decimal(kind):
        return column.cast(pyarrow.float64())
    if types.is_floating(kind):
        return compute.if_else(compute.is_nan(column), None, column)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        trimmed = compute.utf8_trim_whitespace(column.cast(pyarrow.string()))
        return compute.utf8_normalize(trimmed, "NFC")
    return column


def refuse_blanks(names: Iterable[Any], where: str) -> None:
    """Refuse names that are empty, or differ only in blanks or forms of letters."""
    spelled: dict[str, str] = {}
    for name in map(str, names):
        first = spelled.setdefault(trimmed(name), name)
        if first != name:
            raise UserError(
                f"{where} has one name in two ways: {first!r} and {name!r}. Write it in one way."
            )
    if "" in spelled:
        raise UserError(f"{where} has a name without letters: fill it in, or leave the row out.")


def refuse_two_of_a_name(path: Path, names: Sequence[str]) -> None:
    """Refuse a table with two columns of the same name."""
    twice = [name for name in names if list(names).count(name) > 1]
    if twice:
        raise UserError(f"The table {str(path)!r} has two columns {twice[0]!r}: name each once.")


def is_parquet(path: Path) -> bool:
    """Return whether a file is Parquet, by its ending or its first bytes."""
    if path.suffix.lower() in (".parquet", ".pq"):
        return True
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


@contextmanager
def text_of(path: Path) -> Iterator[Any]:
    """Open a CSV, packed or not, as text."""
    import pyarrow

    with pyarrow.input_stream(str(path)) as file:
        yield io.TextIOWrapper(file, encoding="utf-8-sig", newline="")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within this context, errors about a file name the file."""
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(
            f"The table {str(path)!r} is not there (the present folder is {str(Path.cwd())!r})."
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"The table {str(path)!r} is not in UTF-8 ({error.reason}): save it as UTF-8."
        ) from error
    except Exception as error:  # pyarrow raises errors of many kinds
        text = " ".join(str(error).split())[:200]
        raise UserError(f"The table {str(path)!r} cannot be read: {text}.") from error
