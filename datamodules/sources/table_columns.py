"""Conversions of a table's columns: rows left out, texts as numbers, scales, test rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.formats.tables import (
    SEVERAL,
    TRUTHS,
    FileTable,
    by_value,
    compared_as,
    is_missing,
    is_number,
    ordered,
    truths,
    word,
)
from fl_lightning.datamodules.partitions.client_names import trimmed
from fl_lightning.datamodules.partitions.partition import Indices
from fl_lightning.errors import UserError, suggest

SMALL = 1e-9
# A column of texts with more values than this, and than half of the rows, is not made one-hot.
MANY_COLUMNS = 1000
Kind = Literal["one-hot", "codes"]
# Values that are neither numbers nor names.
TIMES = (date, time, timedelta)


def joined_tables(tables: Mapping[str, FileTable], column: str) -> FileTable:
    """Return several tables as one, with a column of their names.

    Raises:
        UserError: their columns differ, or one has the name of the new one.
    """
    first, *others = tables.values()
    for other in others:
        if list(other.columns) != list(first.columns):
            raise UserError(
                f"{other.where} has the columns {', '.join(other.columns)[:200]}, and "
                f"{str(first.path)!r} has {', '.join(first.columns)[:200]}: all need the same, in "
                "the same order."
            )
    if column in first.columns:
        raise UserError(
            f"data.path gives a file per client, and {first.where} has a column {column!r}: name "
            "the clients by this column, data.client, and give one file; or leave data.client out."
        )
    rows: dict[str, Any] = {name: [] for name in [*first.columns, column]}
    files: list[Path] = []
    lines: list[int] = []
    for name, table in tables.items():
        for of in first.columns:
            rows[of] += list(table.columns[of])
        rows[column] += [name] * len(table.lines)
        files += table.files
        lines += table.lines
    return FileTable(first.path, rows, files, lines)


def without_missing(
    table: FileTable,
    used: Iterable[str],
    marks: Sequence[str],
    drop: bool,
    tell: Callable[[str], None],
) -> FileTable:
    """Return a table in which ``marks`` are missing values; if ``drop``, without the rows that
    lack a value.
    """
    marked = {_mark(mark) for mark in marks}
    columns: dict[str, Sequence[Any]] = {}
    for name, values in table.columns.items():
        gone = [not isinstance(value, SEVERAL) and _mark(value) in marked for value in values]
        if any(gone):
            values = [None if one else value for value, one in zip(values, gone, strict=True)]
        columns[name] = values
    read = FileTable(table.path, columns, table.files, table.lines)
    if not drop:
        return read
    count = len(table.lines)
    kept = np.ones(count, bool)
    for name in dict.fromkeys(used):
        kept &= ~np.array([is_missing(value) for value in columns[name]], bool)
    if kept.all():
        return read
    if not kept.any():
        gaps = {name: sum(map(is_missing, columns[name])) for name in used}
        most = max(gaps, key=lambda name: gaps[name])
        raise UserError(
            f"{table.where}: each of the {count} rows lacks a value, most often in the column "
            f"{most!r} ({gaps[most]} rows), so data.missing=drop leaves none: leave such columns "
            "out of data.features, or fill them in."
        )
    tell(f"{table.where}: {int((~kept).sum())} of {count} rows lack a value, and are left out")
    return read.only(np.flatnonzero(kept).tolist())


def _mark(value: Any) -> Any:
    """Return what equals for two spellings of one value; 0 is not false here."""
    return word(value) if word(value) in TRUTHS else by_value(value)


@dataclass
class Encoding:
    """Converts texts to numbers, by the categories of the training rows.

    Args:
        given: ``"one-hot"`` or ``"codes"`` for all columns of texts, or a kind by column; None:
            texts are refused.
        drop_first: leave out the first one-hot column of each.
    """

    given: Kind | Mapping[str, Kind] | None
    drop_first: bool = False
    categories: dict[str, list[str]] = field(default_factory=dict)

    def kind(self, column: str) -> str | None:
        """Return how a column is encoded, if it is."""
        if isinstance(self.given, Mapping):
            return self.given.get(column)
        return self.given if column in self.categories else None

    def check(self, features: Sequence[str]) -> None:
        """Refuse to encode a column that is not a part of x."""
        for name in self.given if isinstance(self.given, Mapping) else ():
            if name not in features:
                raise UserError(
                    f"data.encode has {name!r}, which is not among the columns of x: "
                    f"{', '.join(features)[:300]}.{suggest(name, features)}"
                )

    def learn(
        self,
        table: FileTable,
        features: Sequence[str],
        rows: Indices,
        tell: Callable[[str], None],
    ) -> None:
        """Note the categories of the training rows."""
        for name in features:
            values = list(truths(table.present(name)))
            named = isinstance(self.given, Mapping) and name in self.given
            numbers = all(is_number(value) or isinstance(value, TIMES) for value in values)
            texts = isinstance(self.given, str) and not numbers
            if named or texts:
                # The first spelling names a category.
                first: dict[Any, str] = {}
                trained = [values[row] for row in rows.tolist()]
                form = compared_as(trained)
                for value in trained:
                    first.setdefault(form(value), trimmed(value))
                self.categories[name] = ordered([*first.values()])
                self._refuse_names_of_rows(table, name, len(trained))
                if not named:
                    self._tell_of_numbers(table, name, values, tell)

    def _refuse_names_of_rows(self, table: FileTable, name: str, rows: int) -> None:
        """Refuse to make a column of each row's own name, which would fill the memory."""
        count = len(self.categories[name])
        if self.kind(name) == "one-hot" and count > max(MANY_COLUMNS, rows / 2):
            raise UserError(
                f"{table.where}: data.encode=one-hot makes {count} columns of {name!r}, which has "
                f"{count} values in {rows} training rows: leave it out of data.features, or give "
                f"data.encode={{{name}: codes}}."
            )

    def _tell_of_numbers(
        self, table: FileTable, name: str, values: list[Any], tell: Callable[[str], None]
    ) -> None:
        """Report a column that became categories, although most of its values look like numbers."""
        odd = [row for row, value in enumerate(values) if not is_number(value)]
        commas = sum(is_number(str(values[row]).replace(",", ".")) for row in odd)
        if 2 * (len(values) - len(odd) + commas) > len(values):
            tell(
                f"{table.has(values[odd[0]], name, odd[0])}, which is not a number, so its "
                f"{len(self.categories[name])} values are categories (data.encode): if it holds "
                "numbers, write them with a point, and give the mark of a missing value as "
                "data.missing_marks"
            )

    def names(self, features: Sequence[str]) -> list[str]:
        """The columns of x."""
        found = []
        for name in features:
            if self.kind(name) == "one-hot":
                found += [f"{name}={one}" for one in self._shown(name)]
            else:
                found.append(name)
        return found

    def _shown(self, name: str) -> list[str]:
        return self.categories[name][1 if self.drop_first else 0 :]

    def numbers(
        self, table: FileTable, features: Sequence[str], tell: Callable[[str], None]
    ) -> NDArray[np.float64]:
        """x ``(N, columns)``."""
        parts = []
        for name in features:
            kind = self.kind(name)
            if kind is None:
                parts.append(table.numbers([name]))
                continue
            form = compared_as(self.categories[name])
            places = {form(one): place for place, one in enumerate(self.categories[name])}
            values = map(form, table.present(name))
            codes = np.array([places.get(value, len(places)) for value in values])
            unseen = int((codes == len(places)).sum())
            if unseen:
                tell(f"{table.where}: {unseen} values of {name!r} occur in no training row")
            if kind == "codes":
                parts.append(codes[:, None].astype(np.float64))
            else:
                shown = range(1 if self.drop_first else 0, len(places))
                parts.append((codes[:, None] == np.array(shown)).astype(np.float64))
        return np.concatenate(parts, axis=1)


@dataclass
class Scale:
    """Converts x to (x − mean) / (std + 1e-9), by the training rows of each group; std with n − 1.

    Args:
        columns: names of the columns of x.
        whose: names of the groups, for notes; none if there is one group.
    """

    columns: Sequence[str]
    whose: Sequence[str]
    tell: Callable[[str], None]

    def __call__(
        self, x: NDArray[np.float64], groups: NDArray[np.int64], trained: Indices
    ) -> NDArray[np.float64]:
        """Return x ``(N, columns)``, scaled.

        Args:
            groups: group of each row ``(N,)``.
            trained: positions of the training rows.
        """
        left = np.zeros(len(x), bool)
        left[trained] = True
        found = np.empty_like(x)
        alone = 0
        for group in np.unique(groups):
            rows = groups == group
            own = x[rows & left]
            if not len(own):
                # Rows that belong to no training client are standardised by all training rows.
                own = x[left]
            else:
                alone += len(own) == 1
                self._tell_of_no_spread(int(group), own, x[rows & ~left])
            spread = own.std(axis=0, ddof=1) if len(own) > 1 else np.zeros(x.shape[1])
            found[rows] = (x[rows] - own.mean(axis=0)) / (spread + SMALL)
        if alone:
            self.tell(
                f"data.scale: {alone} of {len(np.unique(groups[trained]))} clients have one "
                "training row, which becomes 0 in every column: give data.scale=all, or leave "
                "these clients out"
            )
        return found

    def _tell_of_no_spread(
        self, group: int, own: NDArray[np.float64], others: NDArray[np.float64]
    ) -> None:
        """Report columns that are constant in the training rows, but not in the test rows."""
        for column in np.flatnonzero((own == own[0]).all(axis=0)).tolist():
            rows = int((others[:, column] != own[0, column]).sum())
            if not rows:
                continue
            of = f"the training rows of client {self.whose[group]!r}" if self.whose else "training"
            many = f"{rows} test row{'s' * (rows > 1)}"
            remedy = ", or give data.scale=all" if self.whose else ""
            self.tell(
                f"data.scale: the column {self.columns[column]!r} is always "
                f"{own[0, column]:.12g} in {of}, so its spread is 0, and another value in {many} "
                f"becomes as large as 1e9 times the difference: leave the column out of "
                f"data.features{remedy}"
            )


def single(
    x: NDArray[np.float64], columns: Sequence[str], tell: Callable[[str], None]
) -> NDArray[np.float32]:
    """Return x ``(N, columns)`` as float32; a note says where whole numbers lose digits."""
    found = x.astype(np.float32)
    for column, name in enumerate(columns):
        lost = np.flatnonzero((found[:, column] != x[:, column]) & (x[:, column] % 1 == 0))
        if len(lost):
            tell(
                f"x is float32, which does not hold all digits of the column {name!r}, such as "
                f"{x[lost[0], column]:.0f}: give data.scale, or smaller numbers, such as the days "
                "since the first"
            )
    return found


def check_rule(test: Mapping[str, Any]) -> None:
    """Refuse an unknown rule for test rows."""
    unknown = set(test) - {"share", "rule", "seed"}
    share = test.get("share")
    fits = isinstance(share, float) and 0 < share < 1
    if unknown or test.get("rule") != "sklearn" or not fits:
        raise UserError(
            f"data.test is of type dict, {dict(test)!r}: give a share, a file, or "
            "{'share': 0.34, 'rule': 'sklearn', 'seed': 43}, which splits as train_test_split does."
        )


def refuse_both(
    client: Any, partition: Any, classes: Any, regression: bool, above: float | None
) -> None:
    """Refuse options that contradict each other."""
    if above is not None and (classes is not None or regression):
        other = "data.regression=True" if regression else f"data.classes={list(classes)!r}"
        raise UserError(
            f"data.above={above:g} makes two classes of the target, 0 and 1, and {other} says "
            "otherwise: give one of the two."
        )
    if client is not None and partition is not None:
        raise UserError(
            f"data.client={client!r} says whose each row is, and data.partition splits the rows "
            "anew: give one of the two."
        )
    if classes is not None and regression:
        raise UserError(
            f"data.classes={list(classes)!r} names the target's classes, and data.regression=True "
            "says that it is a number: give one of the two."
        )


def as_names(
    target: Any, client: Any, features: Sequence[Any] | None
) -> tuple[str, str | None, list[str] | None]:
    """Return names of columns as texts: a frame's may be numbers."""
    if isinstance(features, str):
        features = [features]
    of_client = None if client is None else str(client)
    return str(target), of_client, None if features is None else list(map(str, features))


def held_out(
    test: Mapping[str, Any], y: NDArray[Any], groups: NDArray[np.int64]
) -> tuple[Indices, Indices]:
    """Return rows to train on and to test on, within each group, by scikit-learn's
    train_test_split.

    Raises:
        UserError: a key or rule is not known, or a group is too small.
    """
    from sklearn.model_selection import train_test_split

    share = float(test["share"])
    seed = int(test.get("seed", 0))
    trained = []
    tested = []
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        _, counts = np.unique(y[rows], return_counts=True)
        even = y[rows] if len(counts) > 1 and counts.min() > 2 else None
        options = {"train_size": 1 - share, "test_size": share, "random_state": seed}
        try:
            left, held = train_test_split(rows, stratify=even, **options)
        except ValueError as error:
            raise UserError(
                f"data.test's share is {share:g}: {len(rows)} rows of one client cannot be split "
                f"so ({str(error)[:120]}). Give another share, or leave these rows out."
            ) from None
        trained.append(left)
        tested.append(held)
    return np.concatenate(trained), np.concatenate(tested)


def under(root: str | Path | None, path: Any) -> Any:
    """Return a path below ``root``, if it is relative."""
    if root is None or not isinstance(path, str | Path):
        return path
    return Path(root).expanduser() / path
