"""Tables as columns by name, read from files and frames; errors name the line."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from zipfile import is_zipfile

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.formats.frames import columns_of_frame
from fl_lightning.datamodules.partitions.client_names import trimmed
from fl_lightning.errors import CellError, UserError, suggest

# Texts of a cell without a value; Parquet has its own nulls.
MISSING = {"", "na", "n/a", "#na", "#n/a", "<na>", "nan", "-nan", "nat", "null", "none"}
MISSING |= {"#n/a n/a", "1.#ind", "-1.#ind", "1.#qnan", "-1.#qnan"}
# Types of a cell that has several values, as Parquet and frames have them.
SEVERAL = (list, tuple, dict, set, np.ndarray)
TO_NUMBERS = (
    "convert the column to numbers, give data.encode (one-hot or codes) if it holds names, or "
    "leave it out of data.features"
)
# Names that pandas and R give to the column of row numbers: in a CSV, in a CSV read again, and in
# Parquet.
ROW_INDEX = re.compile(r"\s*|Unnamed: \d+|__index_level_\d+__")


@dataclass(frozen=True)
class FileTable:
    """Columns of a file, or of several, as text or numbers, by name.

    Args:
        files, lines: the file and the line of each row ``(N,)``.
    """

    path: Path
    columns: dict[str, Sequence[Any]]
    files: Sequence[Path]
    lines: Sequence[int]

    @property
    def where(self) -> str:
        """Return a name of the table for an error or a note about many rows."""
        files = [str(path) for path in dict.fromkeys(self.files)] or [str(self.path)]
        if len(files) == 1:
            return f"The table {files[0]!r}"
        return f"The tables {', '.join(map(repr, files))[:300]}"

    def has(self, value: Any, column: str, row: int) -> str:
        """Return the beginning of an error about a row's value in a column."""
        several = isinstance(value, SEVERAL)
        said = repr(value)[:200] if several or not is_missing(value) else "no value"
        file, line = str(self.files[row]), self.lines[row]
        return f"The table {file!r} has {said} in column {column!r} of line {line}"

    def place(self, column: str, row: int) -> str:
        """Return where a value stands, without the value and the column's name.

        In a file without a first line of names, the name of a column is a cell.
        """
        return f"column {[*self.columns].index(column) + 1}, line {self.lines[row]}"

    def only(self, rows: Sequence[int]) -> FileTable:
        """Return the table of these rows."""
        columns: dict[str, Sequence[Any]] = {}
        for name, values in self.columns.items():
            columns[name] = [values[row] for row in rows]
        files = [self.files[row] for row in rows]
        return FileTable(self.path, columns, files, [self.lines[row] for row in rows])

    def present(self, name: str, option: str = "") -> list[Any]:
        """Return a column's values, none of which may be missing; ``option``: text about
        another remedy.
        """
        values = list(self.columns[name])
        for row, value in enumerate(values):
            if isinstance(value, SEVERAL):
                raise CellError(
                    f"{self.has(value, name, row)[:300]}, but a table needs one number or name in "
                    "each cell: make a column of each part, or choose another column.",
                    self.place(name, row),
                )
            if is_missing(value):
                missing = sum(map(is_missing, values))
                raise CellError(
                    f"{self.has(value, name, row)} ({missing} of {len(values)} rows): fill them "
                    f"in, or leave these rows out{option}.",
                    self.place(name, row),
                )
        return values

    def numbers(self, names: Sequence[str], remedy: str = TO_NUMBERS) -> NDArray[np.float64]:
        """Return columns of numbers as ``(N, k)``, each within the range of float32.

        Args:
            remedy: what to do if a value is not a number.
        """
        x = np.empty((len(self.columns[names[0]]), len(names)))
        for k, name in enumerate(names):
            values = self.present(name, ", or leave the column out of data.features")
            try:
                if any(isinstance(value, str) and "_" in value for value in values):
                    raise ValueError
                x[:, k] = np.asarray(truths(values), np.float64)
            except (ValueError, TypeError):
                row = next(row for row, value in enumerate(values) if not is_number(value))
                raise CellError(
                    f"{self.has(values[row], name, row)}, which is not a number: {remedy}.",
                    self.place(name, row),
                ) from None
            beyond = np.flatnonzero(~(np.abs(x[:, k]) <= np.finfo(np.float32).max))
            if len(beyond):
                row = int(beyond[0])
                raise CellError(
                    f"{self.has(values[row], name, row)}, which is not a finite number in single "
                    "precision.",
                    self.place(name, row),
                )
        return x

    def target_numbers(self, name: str) -> NDArray[np.float64]:
        """Return the target's column ``(N,)``."""
        for row, value in enumerate(self.present(name)):
            if not is_number(value):
                raise CellError(
                    f"{self.has(value, name, row)}, which is not a number, but the target is a "
                    "number (data.regression, or "
                    "numbers with fractions in the training data): make it a number, or leave the "
                    "row out.",
                    self.place(name, row),
                )
        return self.numbers([name])[:, 0]


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


def nothing_to_learn_from(where: str, columns: Sequence[str]) -> UserError:
    """Return the error for a table whose columns are all answers or clients."""
    besides = f"no columns besides {', '.join(map(repr, columns))}" if columns else "no columns"
    return UserError(f"{where} has {besides}, so x is empty: give it columns of numbers.")


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


def require(path: Path, columns: Iterable[str], chosen: dict[str, Iterable[str]]) -> None:
    """Refuse names of columns that the table lacks; ``chosen`` has the columns of each option."""
    columns = list(columns)
    # An empty file is reported when it is read.
    for option, names in chosen.items():
        for name in names:
            if columns and name not in columns:
                raise UserError(
                    f"data.{option}={name!r}: the table {str(path)!r} has no column {name!r}; it "
                    f"has {', '.join(columns)[:300]}.{suggest(name, columns)}"
                )


def truths(values: Sequence[Any]) -> Sequence[Any]:
    """Return a column of true and false, as a CSV spells them, as 1 and 0; other columns
    unchanged.
    """
    if not all(isinstance(value, str) and value.strip().lower() in TRUTHS for value in values):
        return values
    return [TRUTHS[value.strip().lower()] for value in values]


TRUTHS = {"true": 1, "false": 0}


def by_value(value: Any) -> Any:
    """Return what equals for two spellings of one value, as pandas reads them.

    >>> by_value("1.0") == by_value(1), by_value("red ") == by_value("red"), by_value("TRUE")
    (True, True, 1)
    """
    if is_number(value):
        return exactly(value)
    text = trimmed(value)
    return TRUTHS.get(text.lower(), text)


def compared_as(values: Iterable[Any]) -> Callable[[Any], Any]:
    """Return what equals for two spellings of one of a column's values: ``by_value`` if all are
    numbers, or all true or false; else ``word``, because beside names 1E2 and 100 are two names.
    """
    values = list(values)
    plain = all(map(is_number, values)) or all(word(value) in TRUTHS for value in values)
    return by_value if plain else word


def is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in MISSING
    return value is None or value != value


def is_number(value: Any) -> bool:
    # Python reads 1_2 as 12, but in a table it is a name.
    if isinstance(value, str) and "_" in value:
        return False
    try:
        float(value)
    except (ValueError, TypeError):
        return False
    return True


def ordered(values: Sequence[Any]) -> list[Any]:
    """Return the distinct values, ascending; by number if all are numbers."""
    distinct = set(values)
    if all(is_number(value) for value in distinct):
        return sorted(distinct, key=exactly)
    return sorted(distinct, key=str)


def told_apart(table: FileTable, column: str) -> list[Any]:
    """Return the values of a column whose values are names.

    Raises:
        UserError: it has one number or name written in two ways, which would count as two names.
    """
    values = table.present(column)
    numbers = all(map(is_number, values))
    spelled: dict[Any, Any] = {}
    # Use the order of the rows: the order of a set differs between processes.
    for value in dict.fromkeys(values):
        first = spelled.setdefault(exactly(value) if numbers else word(value), value)
        if first != value:
            row = values.index(value)
            raise UserError(
                f"The table {str(table.files[row])!r} has one {'number' if numbers else 'name'} in "
                f"two ways in column {column!r}: {first!r} and {value!r} (line "
                f"{table.lines[row]}). Write it in one way."
            )
    return values


def word(value: Any) -> str:
    """Return a common form of names that differ only in spelling."""
    text = trimmed(value)
    return text.lower() if text.lower() in TRUTHS else text


def exactly(value: Any) -> int | float:
    """Return the number that a value stands for; whole numbers are exact, however large they
    are.
    """
    try:
        return int(str(value))
    except ValueError:
        return float(value)


def whose(table: FileTable, column: str, clients: Sequence[str]) -> NDArray[np.int64]:
    """Return the client of each row ``(N,)``, by name; -1: no client.

    Raises:
        UserError: a row has no name, or the name of a client in another spelling.
    """
    places = {name: place for place, name in enumerate(clients)}
    values = told_apart(table, column)
    spelled: dict[Any, str] = {}
    for name in clients:
        spelled.update(dict.fromkeys(spellings(name), name))
    found = []
    for row, name in enumerate(map(str, values)):
        place = places.get(name, -1)
        same = [spelled[alike] for alike in spellings(name) if alike in spelled]
        if place < 0 and same:
            raise CellError(
                f"{table.has(values[row], column, row)}, and the training data call that "
                f"client {same[0]!r}: write "
                "it in one way, or its rows would not be this client's own test set.",
                table.place(column, row),
            )
        found.append(place)
    return np.array(found, np.int64)


def spellings(name: str) -> list[Any]:
    """Return a common form of names that differ only in spelling."""
    return [trimmed(name), exactly(name)] if is_number(name) else [trimmed(name)]


def codes(values: list[Any]) -> tuple[NDArray[np.int64], list[str]]:
    """Return each value's place among the distinct values ``(N,)``, and these as text."""
    names = ordered(values)
    places = {name: place for place, name in enumerate(names)}
    return np.array([places[value] for value in values], np.int64), [str(name) for name in names]


def labels(table: FileTable, target: str) -> tuple[NDArray[Any], dict[str, int] | None]:
    """Return y ``(N,)``, and each value's class number.

    If the target is a number with fractions, there are no classes: the second is None.
    """
    values = table.present(target)
    if all(map(is_number, values)) and any(float(value) % 1 for value in values):
        return table.target_numbers(target).astype(np.float32), None
    y, names = codes(told_apart(table, target))
    return y, {name: place for place, name in enumerate(names)}


def coded(
    table: FileTable,
    target: str,
    classes: dict[str, int] | None,
    of: str = "the training data",
) -> NDArray[Any]:
    """Return y of a table by the classes of another table, or by given classes.

    Raises:
        UserError: a value is not among the accepted ones.
    """
    if classes is None:
        return table.target_numbers(target).astype(np.float32)
    values = table.present(target)
    form = compared_as(classes)
    alike = {form(name): place for name, place in classes.items()}
    # Names such as 7 and 007 may be two classes.
    found = [classes.get(str(value)) for value in values]
    if len(alike) == len(classes):
        found = [alike.get(form(value)) for value in values]
    if None in found:
        row = found.index(None)
        raise CellError(
            f"{table.has(values[row], target, row)}, which is not in {of}: "
            f"{', '.join(classes)[:300]}.",
            table.place(target, row),
        )
    return np.array(found, np.int64)


def columns_of(path: Path, separator: str) -> list[str]:
    """Return the names of a table's columns; its rows are not read."""
    if is_parquet(path):
        with reading(path):
            names: list[str] = parquet().ParquetFile(path).schema_arrow.names
            return names
    with reading(path), opened(path) as file:
        return next(csv.reader(file, delimiter=separator), [])


def read_table(path: Path | Any, separator: str, given: Sequence[str] | None = None) -> FileTable:
    """Read a whole table, from a file or a frame.

    Args:
        given: the columns' names, for a CSV without a first line of names.

    Raises:
        UserError: it does not exist, has no rows, or has rows of different lengths.
    """
    if not isinstance(path, Path):
        read = columns_of_frame(path)
        path = Path(f"<{type(path).__name__}>")
        refuse_two_of_a_name(path, [name for name, _ in read])
        return _table(path, dict(read), range(1, 1 + max((len(v) for _, v in read), default=0)))
    if is_parquet(path):
        with reading(path):
            refuse_two_of_a_name(path, parquet().ParquetFile(path).schema_arrow.names)
            read = parquet().read_table(path)
        columns = {name: read.column(name).to_pylist() for name in read.column_names}
        return _table(path, columns, range(1, 1 + read.num_rows))
    with reading(path), opened(path) as file:
        # A quote that is never closed would put the rest of the file into one value.
        reader = csv.reader(file, delimiter=separator, strict=True)
        lines: list[int] = []
        rows: list[list[str]] = []
        end = 0
        for row in reader:
            # Leave out empty lines. A value in quotes may have several lines.
            if row:
                lines.append(end + 1)
                rows.append(row)
            end = reader.line_num
    if given is not None:
        names = list(given)
    elif rows:
        names = rows.pop(0)
        lines.pop(0)
    else:
        raise UserError(
            f"The table {str(path)!r} is empty: its first line has to name the columns."
        )
    refuse_two_of_a_name(path, names)
    for line, row in zip(lines, rows, strict=True):
        if len(row) != len(names):
            raise UserError(
                f"The table {str(path)!r} has {len(row)} values in line {line} and "
                f"{len(names)} columns: data.separator is {separator!r}; mend the line or give "
                "another separator."
            )
    by_name = zip(*rows, strict=True) if rows else ([] for _ in names)
    return _table(path, dict(zip(names, by_name, strict=True)), lines)


def refuse_blanks(names: Iterable[Any], where: str) -> None:
    """Refuse names that differ only in blanks or forms of letters, and would count as two."""
    spelled: dict[str, str] = {}
    for name in map(str, names):
        first = spelled.setdefault(trimmed(name), name)
        if first != name:
            raise UserError(
                f"{where} has one name in two ways: {first!r} and {name!r}. Write it in one way."
            )


def refuse_two_of_a_name(path: Path, names: Sequence[str]) -> None:
    """Refuse a table with two columns of the same name."""
    twice = [name for name in names if list(names).count(name) > 1]
    if twice:
        raise UserError(f"The table {str(path)!r} has two columns {twice[0]!r}: name each once.")


def _table(path: Path, columns: dict[str, Sequence[Any]], lines: Sequence[int]) -> FileTable:
    """Return the table of one file, which must have rows."""
    table = FileTable(path, columns, [path] * len(lines), lines)
    if not lines:
        raise UserError(f"{table.where} has no rows: give at least one.")
    return table


def is_parquet(path: Path) -> bool:
    """Return whether a file is Parquet, by its ending or its first bytes."""
    if path.suffix.lower() in (".parquet", ".pq"):
        return True
    if not path.is_file():
        return False
    with reading(path), open(path, "rb") as file:
        return file.read(4) == b"PAR1"


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    if path.suffix.lower() == ".gz":
        with gzip.open(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    else:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield file


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
    except csv.Error as error:
        raise UserError(
            f"The table {str(path)!r} cannot be read: {error}. Close each quote, with nothing "
            "between it and the separator."
        ) from error
    except UnicodeDecodeError as error:
        if is_zipfile(path):
            raise UserError(
                f"The table {str(path)!r} is a zip archive, as Excel's .xlsx is: unpack it, or "
                "save the sheet as CSV."
            ) from None
        raise UserError(
            f"The table {str(path)!r} is not in UTF-8, which it has to be ({error.reason} at byte "
            f"{error.start}): save it as UTF-8."
        ) from error
    except Exception as error:  # gzip and pyarrow raise their own errors
        raise UserError(f"The table {str(path)!r} cannot be read: {str(error)[:200]}.") from error


def parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            "Parquet files are read by pyarrow, which is not installed: pip install "
            "'fl-lightning[parquet]', or give a CSV file."
        ) from None
    return pyarrow.parquet
