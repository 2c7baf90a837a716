"""Rows of Parquet files; a row group is read when one of its rows is asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.errors import UserError

# Bytes of row groups kept in memory, for all files together: as many as FromFolders keeps of
# pictures.
KEPT_BYTES = 2**30


class ParquetRows:
    """Rows that are numbered file by file, as in the library datasets.

    No file stays open, so worker processes and threads can read on their own.

    Args:
        files: files with the same columns.
        datasets: the library, which decodes pictures.

    Raises:
        UserError: a file has other columns or types than the first.
    """

    def __init__(self, files: Sequence[Path], datasets: Any) -> None:
        import pyarrow.parquet

        self._parquet = pyarrow.parquet
        self.files = list(files)
        self._metadata: list[Any] = []
        schema: Any = None
        for file in self.files:
            with self._parquet.ParquetFile(file) as opened:
                self._metadata.append(opened.metadata)
                if schema is None:
                    schema = opened.schema_arrow
                elif not schema.equals(opened.schema_arrow):
                    raise UserError(
                        f"The file {str(file)!r} has other columns or types than "
                        f"{self.files[0].name!r}, which holds the same split: make them alike, or "
                        "begin their names with their splits (train-, test-)."
                    )
        self._schema = schema
        self.features, self.unreadable = _features(datasets, schema)
        self._columns: list[str] | None = None
        self._groups: list[tuple[int, int]] = []
        rows: list[int] = []
        for number, found in enumerate(self._metadata):
            self._groups += [(number, group) for group in range(found.num_row_groups)]
            rows += [found.row_group(group).num_rows for group in range(found.num_row_groups)]
        self._ends = np.cumsum(rows, dtype=np.int64)
        self._latest: OrderedDict[int, Any] = OrderedDict()

    @property
    def column_names(self) -> list[str]:
        return list(self.features)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def select_columns(self, columns: Sequence[str]) -> ParquetRows:
        """Return the same rows with only these columns; others are not read."""
        selected = copy(self)
        selected._columns = list(columns)
        selected._latest = OrderedDict()
        return selected

    def column(self, name: str) -> Any:
        """Return a column of all rows as a pyarrow array."""
        import pyarrow

        chunks: list[Any] = []
        for file, metadata in zip(self.files, self._metadata, strict=True):
            with self._parquet.ParquetFile(file, metadata=metadata) as opened:
                chunks += opened.read([name], use_threads=False).column(name).chunks
        return pyarrow.chunked_array(chunks, type=self._schema.field(name).type)

    def pieces(self, name: str) -> Iterator[tuple[int, Any]]:
        """Yield a column in parts, each with the number of its first row."""
        first = 0
        for file, metadata in zip(self.files, self._metadata, strict=True):
            with self._parquet.ParquetFile(file, metadata=metadata) as opened:
                for batch in opened.iter_batches(columns=[name], use_threads=False):
                    yield first, batch.column(0)
                    first += len(batch)

    def __getitem__(self, i: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._ends, i, side="right"))
        table = self._latest.get(group)
        if table is None:
            table = self._read(group)
        first = int(self._ends[group - 1]) if group else 0
        (row,) = table.slice(i - first, 1).to_pylist()
        features = {name: self.features[name] for name in row}
        decoded: dict[str, Any] = type(self.features)(features).decode_example(row)
        return decoded

    def _read(self, group: int) -> Any:
        (file, place) = self._groups[group]
        with self._parquet.ParquetFile(self.files[file], metadata=self._metadata[file]) as opened:
            table = opened.read_row_group(place, columns=self._columns, use_threads=False)
        # Threads may read in parallel, so another thread may have removed an entry already.
        kept = list(self._latest.values())
        while kept and sum(one.nbytes for one in kept) + table.nbytes > KEPT_BYTES:
            try:
                self._latest.popitem(last=False)
            except KeyError:
                break
            kept = kept[1:]
        self._latest[group] = table
        return table

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": OrderedDict()}


def _features(datasets: Any, schema: Any) -> tuple[Any, dict[str, str]]:
    """Return the library's features of the columns, and the types of those that it cannot read."""
    import pyarrow

    found = datasets.Features()
    unreadable: dict[str, str] = {}
    for field in schema:
        try:
            one = pyarrow.schema([field], metadata=schema.metadata)
            found |= datasets.Features.from_arrow_schema(one)
        except Exception:  # a column that is not used need not be readable
            unreadable[field.name] = str(field.type)
    return datasets.Features(found), unreadable
